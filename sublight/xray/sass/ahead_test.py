"""How many bytes a thread has under way, as a reader of the SASS counts them."""

from __future__ import annotations

from sublight.xray.sass.ahead import bytes_ahead
from sublight.xray.sass.instruction import parse


def ahead(*lines: str) -> int | None:
    """Labels end in a colon; the rest are instructions."""
    text, address = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/ {line} ;")
        address += 16
    return bytes_ahead(parse("\n".join(text)))


def load(register: int, at: int = 0, width: str = ".128", predicate: str = "") -> str:
    return f"{predicate}LDG.E{width} R{register}, desc[UR4][R2.64+{at:#x}]"


def test_loads_count_until_one_of_them_is_used() -> None:
    assert ahead(load(4), load(8, 16), "FADD R20, R4, R8", "EXIT") == 32
    assert ahead(load(4), "FADD R20, R4, R4", load(8, 16), "FADD R20, R20, R8", "EXIT") == 16
    assert ahead(load(4), load(8, 16), "FADD R20, R4, R4", load(12, 32), "FADD R20, R8, R12", "EXIT") == 32, "in order"
    assert ahead(load(4, width=""), load(5, 4, ".U16"), "EXIT") == 6


def test_the_last_word_of_a_load_is_its_too() -> None:
    assert ahead(load(4), "MOV R20, R7", load(8, 16), "EXIT") == 16
    assert ahead(load(4), "MOV R20, R3", load(8, 16), "EXIT") == 32, "R3 is before it"


def test_an_operand_may_be_several_registers() -> None:
    assert ahead(load(6, width=".64"), "STG.E.128 desc[UR4][R20.64], R4", load(8), "EXIT") == 16, "R4 to R7"
    assert ahead(load(5, width=""), "STG.E desc[UR4][R4.64], R20", load(8), "EXIT") == 16, "R4 and R5 are its address"
    assert ahead(load(6, width=".64"), "HMMA.16816.F32.BF16 R40, R4, R24, R40", load(8), "EXIT") == 16


def test_a_register_is_not_loaded_into_before_it_has_come() -> None:
    assert ahead(load(4), load(4, 16), "EXIT") == 16
    assert ahead(load(4), "MOV R4, RZ", load(8, 16), "EXIT") == 16


def test_a_load_through_a_loaded_address_waits() -> None:
    chase = "LDG.E.64 R2, desc[UR4][R2.64]"
    assert ahead(chase, chase, chase, "EXIT") == 8


def test_masked_loads_count_and_those_never_made_do_not() -> None:
    assert ahead(load(4, predicate="@!P0 "), load(8, 16, predicate="@P1 "), "EXIT") == 32
    assert ahead(load(4), load(8, 16, predicate="@!PT "), "EXIT") == 16


def test_branches_are_not_added_up() -> None:
    """A masked and an unmasked copy of the same code."""
    both = ("@P0 BRA `(.L_1)", load(4), load(8, 16), "FADD R20, R4, R8", "EXIT", ".L_1:", load(12), load(16), "EXIT")
    assert ahead(*both) == 32
    unused = ("@P0 BRA `(.L_1)", load(4), load(8, 16), "EXIT", ".L_1:", load(12), load(16), "EXIT")
    assert ahead(*unused) == 32, "an exit ends it"


def test_what_is_under_way_crosses_a_join() -> None:
    lines = ("@P0 BRA `(.L_1)", load(4), ".L_1:", load(8, 16), "FADD R20, R4, R8", "EXIT")
    assert ahead(*lines) == 32


def test_a_loop_carries_its_loads_over_the_jump_back() -> None:
    """Loads of the next turn are made before this turn's are used: two turns' loads are under way at once."""
    lines = (load(4), ".L_1:", load(8, 16), "FADD R20, R20, R4", load(4, 32), "FADD R20, R20, R8", "@P0 BRA `(.L_1)")
    assert ahead(*lines, "EXIT") == 32
    late = (".L_1:", load(8), "FADD R20, R20, R4", "MOV R4, R8", "@P0 BRA `(.L_1)", "EXIT")
    assert ahead(*late) == 16
    use = "FADD R20, R12, R8"
    carried = (".L_1:", load(8), load(12, 16), "FADD R20, R20, R4", use, load(4, 32), "@P0 BRA `(.L_1)")
    assert ahead(*carried, "EXIT") == 48, "the third of the turn before, and the first two of this one"


def copy(at: int = 0) -> str:
    return f"LDGSTS.E.BYPASS.128 [R10+{at:#x}], desc[UR4][R2.64]"


def test_copies_count_by_their_groups() -> None:
    two = (copy(), "LDGDEPBAR", copy(512), "LDGDEPBAR")
    assert ahead(*two, "DEPBAR.LE SB0, 0x0", "EXIT") == 32
    assert ahead(*two, "DEPBAR.LE SB0, 0x1", copy(1024), "LDGDEPBAR", "EXIT") == 32, "the first has come"
    assert ahead(*two, "DEPBAR.LE SB0, 0x2", copy(1024), "LDGDEPBAR", "EXIT") == 48


def test_a_pipeline_of_copies_has_as_many_as_it_has_stages() -> None:
    turn = (".L_1:", "DEPBAR.LE SB0, 0x1", copy(), "LDGDEPBAR", "@P0 BRA `(.L_1)", "EXIT")
    assert ahead(copy(), "LDGDEPBAR", copy(512), "LDGDEPBAR", *turn) == 32, "three buffers, two of them under way"


def test_bulk_copies_are_not_told() -> None:
    assert ahead(load(4), "UTMALDG.2D [UR8], [UR4]", "EXIT") is None
    assert ahead("UTMASTG.2D [UR8], [UR4]", "EXIT") == 0, "what is written is waited for by nobody"
    assert bytes_ahead(()) == 0
