"""Which of several ways a warp takes, by the accesses that it made."""

from __future__ import annotations

from sublight.xray.sass.ahead_test import load
from sublight.xray.sass.instruction import Instruction, parse
from sublight.xray.sass.loops import flow
from sublight.xray.sass.path import path_outside

STORE = "STG.E.128 desc[UR4][R2.64], R4"


def code(*lines: str) -> tuple[Instruction, ...]:
    text, address = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/ {line} ;")
        address += 16
    return parse("\n".join(text))


def path(accesses: float | None, *lines: str) -> tuple[int, ...]:
    instructions = code(*lines)
    return path_outside(instructions, flow(instructions), accesses)


TWICE = (  # a whole block at the end, one with a mask before it
    "MOV R2, RZ", "@!P0 BRA `(.L_1)", load(4, predicate="@P1 "), "FADD R4, R4, R4", STORE, "EXIT",
    ".L_1:", load(4), STORE, "EXIT",
)  # fmt: skip


def test_code_that_is_there_twice_is_issued_once_the_shorter_of_the_two() -> None:
    assert path(2, *TWICE) == (0, 1, 6, 7, 8)
    assert path(None, *TWICE) == (0, 1, 6, 7, 8), "as many accesses as there are on one way"


def test_an_early_exit_is_taken_only_by_a_warp_without_accesses() -> None:
    early = ("MOV R2, RZ", "@P0 EXIT", load(4), STORE, "EXIT")
    assert path(2, *early) == (0, 1, 2, 3, 4)
    assert path(1.4, *early) == (0, 1, 2, 3, 4), "some warps of a block had nothing to load"
    assert path(0, *early) == (0, 1)


def test_a_slow_way_round_is_left_out() -> None:
    lines = (load(4), "@P0 BRA `(.L_1)", "FADD R4, R4, R4", "FADD R4, R4, R4", ".L_1:", STORE, "EXIT")
    assert path(2, *lines) == (0, 1, 4, 5)


def test_more_accesses_than_the_shortest_way_has_are_made_on_a_longer_one() -> None:
    lines = (load(4), "@P0 BRA `(.L_1)", load(8), load(12), ".L_1:", STORE, "EXIT")
    assert path(2.2, *lines) == (0, 1, 4, 5)
    assert path(3.5, *lines) == (0, 1, 2, 3, 4, 5)


def test_a_loop_is_passed_and_not_counted() -> None:
    loop = (load(4), ".L_1:", load(8, 16), "FADD R4, R4, R8", "@P0 BRA `(.L_1)", STORE, "EXIT")
    assert path(2, *loop) == (0, 4, 5)
    skipped = (load(4), "@P1 BRA `(.L_2)", ".L_1:", load(8, 16), "@P0 BRA `(.L_1)", ".L_2:", STORE, "EXIT")
    assert path(2, *skipped) == (0, 1, 4, 5)


def test_nothing() -> None:
    assert path_outside((), flow(()), 3) == ()
