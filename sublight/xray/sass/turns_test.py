"""How often loops turn, told by the accesses that followed warps made, and what that makes of a warp's clocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sublight.gpus import find
from sublight.xray.record import Access, Code, Place, Resources, Space
from sublight.xray.sass.instruction import parse
from sublight.xray.sass.loops import flow
from sublight.xray.sass.turns import Turns, turns_of

USED = Resources(
    registers=32, spill_bytes=0, stack_bytes=0, static_shared_bytes=0, dynamic_shared_bytes=0, barriers=0, threads=128
)
LOAD, STORE, ADD = "LDG.E R{0}, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R4", "FADD R20, R20, R4"


def turns(
    requests: dict[int, int], *lines: tuple[int, str] | str, warps: int = 2, also: Sequence[Access] = ()
) -> Turns:
    """Instructions with the line of their source; labels alone."""
    text, address = [], 0
    for line in lines:
        if isinstance(line, str):
            text.append(line)
            continue
        text += [f'//## File "k.py", line {line[0]}', f"        /*{address:04x}*/ {line[1]} ;"]
        address += 16
    instructions = parse("\n".join(text))
    code = Code(name="k", symbol="k", gpu=find("h200"), resources=USED, sass="\n".join(text), file="k.py")
    seen = [
        Access(place=Place(file="k.py", line=line), space="global", kind="load", bytes_per_thread=4, requests=count)
        for line, count in requests.items()
    ]
    return turns_of(code, instructions, flow(instructions), "k.py", [*seen, *also], warps)


def a_loop(loads: int, label: str = ".L_1", line: int = 5) -> tuple[tuple[int, str] | str, ...]:
    body = [(line, LOAD.format(4 + k)) for k in range(loads)]
    return f"{label}:", *body, (line + 1, ADD), (4, f"@P0 BRA `({label})")


END = ((9, STORE), (9, "EXIT"))


def test_a_loop_turns_as_often_as_its_load_was_made() -> None:
    found = turns({5: 20, 9: 2}, *a_loop(1), *END)
    assert found.loops == (10.0,) and found.unknown == ()
    assert found.clocks == 10 * 4 + 4, "a load keeps the pipe for 4 clocks of a scheduler, and so does the store"
    assert found.limit == "load and store"


def test_what_tensor_cores_read_is_no_load_of_its_line() -> None:
    operand = Access(
        place=Place(file="k.py", line=5), space="shared", kind="matrix operand", bytes_per_thread=48, requests=999
    )
    assert turns({5: 20, 9: 2}, *a_loop(1), *END, also=[operand]).loops == (10.0,)


COPY = "LDGSTS.E.BYPASS.128 [R8], desc[UR4][R2.64]"


def copies(line: int, *, fetched: int, written: int) -> list[Access]:
    """An asynchronous copy as it is followed: its global half and its shared half."""
    halves: tuple[tuple[Space, int], ...] = (("global", fetched), ("shared", written))
    return [
        Access(place=Place(file="k.py", line=line), space=space, kind="async copy", bytes_per_thread=16, requests=count)
        for space, count in halves
    ]


@pytest.mark.parametrize(("fetched", "written"), [(20, 20), (12, 20), (20, 0)])
def test_an_asynchronous_copy_is_one_instruction(fetched: int, written: int) -> None:
    """12: its last turns fetch nothing and write zeros; 0: where in shared memory it writes is not known."""
    loop = (".L_1:", (5, COPY), (6, ADD), (4, "@P0 BRA `(.L_1)"))
    assert turns({9: 2}, *loop, *END, also=copies(5, fetched=fetched, written=written)).loops == (10.0,)


def test_a_store_of_a_matrix_is_an_instruction_of_its_line() -> None:
    line = Place(file="k.py", line=5)
    also = [Access(place=line, space="shared", kind="matrix store", bytes_per_thread=16, requests=20)]
    loop = (".L_1:", (5, LOAD.format(4)), (5, "STSM.16.M88.4 [R8], R4"), (4, "@P0 BRA `(.L_1)"))
    assert turns({5: 20, 9: 2}, *loop, *END, also=also).loops == (10.0,)


def test_an_unrolled_loop_turns_less_often() -> None:
    assert turns({5: 20, 9: 2}, *a_loop(2), *END).loops == (5.0,)


def test_what_remains_of_an_unrolled_loop_is_not_counted_again() -> None:
    assert turns({5: 20, 9: 2}, *a_loop(4), *a_loop(1, ".L_2"), *END).loops == (2.5, 0.0)


def test_loads_before_a_loop_are_not_its_own() -> None:
    assert turns({5: 20, 9: 2}, (5, LOAD.format(4)), *a_loop(1), *END).loops == (9.0,)


def test_a_loop_that_was_not_entered_does_not_turn() -> None:
    found = turns({9: 2}, (3, "@P1 BRA `(.L_9)"), *a_loop(1), ".L_9:", *END)
    assert found.loops == (0.0,) and found.clocks == 4, "the store; branch and exit are issued beside it"


def test_a_loop_without_accesses_counts_once_and_is_told() -> None:
    found = turns({9: 2}, ".L_1:", (6, ADD), (4, "@P0 BRA `(.L_1)"), *END)
    assert found.loops == (None,) and found.unknown == ("loop at line 4",) and found.clocks == 2 + 4
    unfollowed = turns({}, *a_loop(1), *END, warps=0)
    assert unfollowed.loops == (None,) and unfollowed.clocks == 4 + 4
