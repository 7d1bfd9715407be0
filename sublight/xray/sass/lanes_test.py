"""Addresses that are one for all lanes, and addresses that came from the thread's number by some way."""

from __future__ import annotations

import pytest

from sublight.xray.sass.instruction import parse
from sublight.xray.sass.lanes import Lanes

LOAD = "LDG.E.U16 R9, desc[UR4][R2.64]"


def differ(*lines: str) -> bool:
    instructions = parse("\n".join(f"        /*{16 * number:04x}*/   {line} ;" for number, line in enumerate(lines)))
    return Lanes(instructions).differ(len(instructions) - 1)


@pytest.mark.parametrize(
    "lines",
    [
        ("S2R R0, SR_TID.X", "IMAD.WIDE.U32 R2, R0, 0x2, R4", LOAD),
        ("S2R R3, SR_LANEID", LOAD),  # the upper half of the address
        ("S2R R0, SR_TID.X", "LEA R2, P0, R0.reuse, UR4, 0x2", LOAD),
        ("S2R R0, SR_TID.X", "SHFL.IDX PT, R2, R0, 0x1, 0x1f", LOAD),  # behind a predicate
        ("S2R R0, SR_TID.X", "LDG.E.64 R2, desc[UR4][R0.64]", LOAD),  # a pointer that each lane loaded
        ("S2R R2, SR_TID.X", "@P0 MOV R2, UR4", LOAD),  # not written in every case
        ("S2R R0, SR_TID.X", "VIADD R2, R0, 0x1", "STG.E.U16 desc[UR4][R2.64], R9"),
    ],
)
def test_lanes_with_their_own_addresses(lines: tuple[str, ...]) -> None:
    assert differ(*lines)


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD,),
        ("LDC.64 R2, c[0x0][0x210]", LOAD),
        ("S2R R0, SR_CTAID.X", "IMAD.WIDE.U32 R2, R0, 0x2, R4", LOAD),
        ("S2R R2, SR_TID.X", "MOV R2, UR4", LOAD),  # written again
        ("S2R R2, SR_TID.X", "LDC.64 R2, c[0x0][0x210]", LOAD),
        ("S2R R0, SR_TID.X", "R2UR UR6, R0", "LDG.E.U16 R9, desc[UR4][UR6.64]"),
        ("S2R R9, SR_TID.X", "STG.E.U16 desc[UR4][R2.64], R9"),  # the value differs, the address does not
        ("S2R R0, SR_TID.X", "ISETP.GE.AND P0, PT, R0, R2, PT", LOAD),  # writes a predicate, and no register
    ],
)
def test_lanes_with_one_address(lines: tuple[str, ...]) -> None:
    assert not differ(*lines)


def test_a_counter_of_a_loop_leads_to_its_first_value() -> None:
    turn = ("IMAD.WIDE R2, R0, 0x2, R4", "VIADD R0, R0, UR4")
    assert differ("S2R R0, SR_TID.X", *turn, *turn, LOAD)
    assert not differ("MOV R0, RZ", *turn, *turn, LOAD)
