"""A listing in nvdisasm's own form, with what can go wrong in it: chains of places, labels, predicates, padding."""

from __future__ import annotations

import pytest

from sublight.gpus import find
from sublight.xray.record import Code, Place, Resources
from sublight.xray.sass.instruction import Instruction, file_of, parse

LISTING = """\
\t.section\t.text.kernel,"ax",@progbits
\t.align\t128
        .global         kernel
        .type           kernel,@function
        .size           kernel,(.L_x_4 - kernel)
kernel:
.text.kernel:
\t//## File "/home/me/kernel.py", line 5
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/lib/triton/standard.py", line 196 inlined at "/lib/triton/standard.py", line 216
\t//## File "/lib/triton/standard.py", line 216 inlined at "/home/me/kernel.py", line 9
\t//## File "/home/me/kernel.py", line 9
        /*0010*/                   FMNMX R3, R2, R3.reuse, !PT ;
.L_x_0:
        /*0020*/              @!P2 LDG.E.128 R8, desc[UR10][R22.64+0x800] ;
\t//## File "/home/me/kernel.py", line 61 inlined at "/home/me/kernel.py", line 11
\t//## File "/home/me/kernel.py", line 11
        /*0030*/               @P0 BRA `(.L_x_0) ;
        /*0040*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0050*/                   BRX R2 -0x60          (*"BRANCH_TARGETS .L_x_0,.L_x_1"*) ;
.L_x_1:
        /*0060*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div) ;
        /*0070*/              @!UP1 UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ ;
        /*0080*/                   EXIT ;
        .weak           $__internal_0_$__cuda_sm3x_div
        .type           $__internal_0_$__cuda_sm3x_div,@function
$__internal_0_$__cuda_sm3x_div:
        /*0090*/                   RET.REL.NODEC R2 `(kernel) ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
        /*00b0*/                   NOP;
        /*00c0*/                   NOP;
.L_x_4:


//--------------------- SYMBOLS --------------------------

\t.type\t\t.nv.reservedSmem.offset0,@object
"""
RESOURCES = Resources(registers=32)


def at(address: int) -> Instruction:
    return next(each for each in parse(LISTING) if each.address == address)


def test_every_instruction_is_there_and_the_padding_is_not() -> None:
    assert [each.address for each in parse(LISTING)] == list(range(0, 0xA0, 0x10))


def test_a_last_branch_to_itself_without_nops_is_padding_too() -> None:
    kept, _, _ = LISTING.partition("        /*00b0*/")
    assert parse(kept)[-1].opcode == "RET"


def test_opcode_modifiers_predicate_and_operands() -> None:
    load = at(0x20)
    assert (load.opcode, load.modifiers, load.name) == ("LDG", ("E", "128"), "LDG.E.128")
    assert load.predicate == "!P2"
    assert load.operands == ("R8", "desc[UR10][R22.64+0x800]")
    assert at(0x70).predicate == "!UP1" and at(0x70).operands == ("UR4", "UPT", "UPT", "UR4", "0x1", "URZ")
    assert at(0x80).operands == () and at(0x80).predicate == ""


def test_where_a_branch_may_go() -> None:
    assert at(0x30).targets == (0x20,)
    assert at(0x40).targets == (0x60,)
    assert at(0x50).targets == (0x20, 0x60), "listed in a comment"
    assert at(0x60).targets == (0x90,)
    assert at(0x90).targets == (), "a return names the kernel, and goes to its caller"


@pytest.mark.parametrize(
    ("address", "goes_on"),
    [(0x20, True), (0x30, True), (0x40, True), (0x50, False), (0x60, True), (0x80, False), (0x90, False)],
)
def test_what_the_next_instruction_can_follow(address: int, goes_on: bool) -> None:
    assert at(address).falls_through is goes_on


def test_an_exit_under_a_predicate_goes_on() -> None:
    assert Instruction(address=0, opcode="EXIT", predicate="P0").falls_through
    assert not Instruction(address=0, opcode="EXIT", predicate="PT").falls_through


def test_the_chain_of_places_is_kept() -> None:
    assert [place.line for place in at(0x10).places] == [196, 216, 9]
    assert [place.line for place in at(0x20).places] == [196, 216, 9], "a label changes nothing"
    assert [place.line for place in at(0x30).places] == [61, 11]


@pytest.mark.parametrize("file", ["/home/me/kernel.py", "kernel.py", "me/kernel.py"])
def test_an_instruction_belongs_to_the_authors_innermost_line(file: str) -> None:
    assert at(0x10).place(file) == Place(file="/home/me/kernel.py", line=9)
    assert at(0x30).place(file) == Place(file="/home/me/kernel.py", line=61)


def test_a_file_that_is_in_no_chain_gives_the_outermost_line() -> None:
    assert at(0x10).place("other.py") == Place(file="/home/me/kernel.py", line=9)
    assert at(0x10).place("") == Place(file="/home/me/kernel.py", line=9)
    assert Instruction(address=0, opcode="NOP").place("other.py") is None


def test_the_authors_file_is_found_where_it_is_not_given() -> None:
    code = Code(name="kernel", symbol="kernel", gpu=find("h200"), resources=RESOURCES, sass=LISTING)
    assert file_of(code, parse(LISTING)) == "/home/me/kernel.py"


def test_nothing_is_parsed_from_nothing() -> None:
    assert parse("") == ()
