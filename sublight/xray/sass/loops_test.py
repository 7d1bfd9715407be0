"""Loops of graphs that are written out: nested, with two ways back, with a second copy for diverged lanes."""

from __future__ import annotations

from sublight.xray.sass.instruction import Instruction, parse
from sublight.xray.sass.loops import Flow, flow


def code(*lines: str) -> tuple[Instruction, ...]:
    """`label:` or an instruction a line, 16 bytes each; every instruction's line of source is its number."""
    text, number = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text += [f'\t//## File "k.py", line {number}', f"        /*{16 * number:04x}*/    {line} ;"]
        number += 1
    return parse("\n".join(text))


def shape(found: Flow) -> list[tuple[int, int | None, list[int], list[int]]]:
    return [(loop.depth, loop.parent, list(loop.members), list(loop.own)) for loop in found.loops]


def test_no_loop() -> None:
    found = flow(code("MOV R0, R1", "@P0 BRA `(.L)", "FADD R0, R0, R0", ".L:", "EXIT"))
    assert found.loops == ()
    assert found.reached == found.outside == (0, 1, 2, 3)


def test_one_loop() -> None:
    instructions = code("MOV R0, R1", ".L:", "FADD R0, R0, R0", "@P0 BRA `(.L)", "EXIT")
    found = flow(instructions)
    assert shape(found) == [(1, None, [1, 2], [1, 2])]
    assert found.outside == (0, 3)
    assert found.loops[0].place(instructions, "k.py").line == 2  # type: ignore[union-attr]


def test_a_loop_of_one_instruction() -> None:
    assert shape(flow(code(".L:", "@P0 BRA `(.L)", "EXIT"))) == [(1, None, [0], [0])]


def test_nested_loops() -> None:
    """An instruction is its innermost loop's own."""
    found = flow(
        code(
            ".OUTER:",
            "MOV R0, R1",
            ".INNER:",
            "FADD R0, R0, R0",
            "@P0 BRA `(.INNER)",
            "MOV R2, R3",
            ".SECOND:",
            "@P1 BRA `(.SECOND)",
            "@P2 BRA `(.OUTER)",
            "EXIT",
        )
    )
    assert shape(found) == [(1, None, [0, 1, 2, 3, 4, 5], [0, 3, 5]), (2, 0, [1, 2], [1, 2]), (2, 0, [4], [4])]
    assert found.outside == (6,)


def test_two_ways_back_are_one_loop() -> None:
    """A `continue` is no loop of its own."""
    found = flow(code(".L:", "FADD R0, R0, R0", "@P0 BRA `(.L)", "FMUL R0, R0, R0", "@P1 BRA `(.L)", "EXIT"))
    assert shape(found) == [(1, None, [0, 1, 2, 3], [0, 1, 2, 3])]
    assert found.loops[0].latch == 3


def test_a_branch_out_of_a_loop_and_code_behind_it_are_not_in_the_loop() -> None:
    found = flow(code(".L:", "@P0 BRA `(.OUT)", "@P1 BRA `(.L)", "EXIT", ".OUT:", "MOV R0, R1", "EXIT"))
    assert shape(found) == [(1, None, [0, 1], [0, 1])]
    assert found.outside == (2, 3, 4)


def test_a_backward_branch_that_is_no_loop() -> None:
    """It leads to code that is reached in no other way."""
    found = flow(code("BRA `(.LATE)", ".EARLY:", "EXIT", ".LATE:", "BRA `(.EARLY)"))
    assert found.loops == ()
    assert found.reached == (0, 1, 2)


def test_what_only_diverged_lanes_run_is_left_out() -> None:
    found = flow(
        code(
            ".L:",
            "BRA.DIV UR4, `(.COLD)",
            "SHFL.BFLY PT, R3, R2, 0x10, 0x1f",
            ".BACK:",
            "@P0 BRA `(.L)",
            "EXIT",
            ".COLD:",
            "SHFL.BFLY PT, R3, R2, 0x10, 0x1f",
            "BRA `(.BACK)",
        )
    )
    assert shape(found) == [(1, None, [0, 1, 2], [0, 1, 2])]
    assert found.reached == (0, 1, 2, 3)


def test_a_function_that_a_loop_calls_is_reached_but_outside() -> None:
    found = flow(
        code(".L:", "CALL.REL.NOINC `(f)", "@P0 BRA `(.L)", "EXIT", "f:", "FADD R0, R0, R0", "RET.REL.NODEC R2")
    )
    assert shape(found) == [(1, None, [0, 1], [0, 1])]
    assert found.outside == (2, 3, 4)


def test_nothing_has_no_flow() -> None:
    assert flow(()) == Flow(reached=(), outside=(), loops=())
