"""PTX is read in parts, scopes and places included."""

from __future__ import annotations

import pytest

from sublight.errors import BadInput
from sublight.xray.ptx.entry import parse_entry
from sublight.xray.record import Place

TRITON = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.global .align 4 .u32 table[3] = {1, 0x10, 3};
.visible .entry other(.param .u32 a)
{
	.reg .b32 %r<2>;
	.shared .align 4 .b8 not_ours[64];
	ret;
}
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .align 8 .b8 kernel_param_2[24]
)
.reqntid 128
.maxntid 256, 2
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<4>;
	.reg .b64 	%rd<3>;
	.loc	1 90 0                          // mine.py:90:0
$L__func_begin0:
	ld.param.b64 	%rd1, [kernel_param_0];  // a comment; with a semicolon { and a brace
	.loc	1 98 9
	// begin inline asm
	@!%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 8 ];
	// end inline asm
	.loc	1 99 11
	.loc	2 216 16, function_name $L__info_string0, inlined_at 1 99 11 // standard.py:216:16
	.loc	2 196 12, function_name $L__info_string0, inlined_at 2 216 16
	/* begin inline asm
	*/ { .reg .pred done; .reg .b32 %r1;
	again: mov.u32 %r1, 7; setp.eq.u32 done, %r1, %r2;
	@!done bra again;
	}
	{ .reg .pred done;
	again:
	@done bra.uni again;
	@%p2 bra $L__end;
	}
$L__end:
	ret;
}
	.file	1 "/home/me/mine.py"
	.file	2 "/lib/triton/language/standard.py"
"""


def test_head() -> None:
    entry = parse_entry(TRITON, "kernel")
    assert [(one.name, one.type, one.bytes, one.is_pointer) for one in entry.parameters] == [
        ("kernel_param_0", "u64", 8, True),
        ("kernel_param_1", "u32", 4, False),
        ("kernel_param_2", "b8", 24, False),
    ]
    assert (entry.threads, entry.most_threads) == ((128, 1, 1), (256, 2, 1))
    assert [(one.name, one.space, one.bytes, one.content) for one in entry.variables] == [
        ("global_smem", "shared", 0, ()),
        ("table", "global", 12, (1, 16, 3)),
    ]


def test_an_instruction_in_parts() -> None:
    load = parse_entry(TRITON, "kernel").instructions[1]
    assert load.parts == ("ld", "global", "v2", "b32")
    assert load.operands == ("{%r1,%r2}", "[%rd1+8]")
    assert (load.predicate, load.is_negated) == ("%p1", True)
    assert load.place == Place(file="/home/me/mine.py", line=98)


def test_names_of_a_scope_are_its_own() -> None:
    entry = parse_entry(TRITON, "kernel")
    move, compare, first, second, outer, _ = entry.instructions[2:]
    assert move.operands == ("%r1@1", "7")
    assert compare.operands == ("done@1", "%r1@1", "%r2")
    assert (first.predicate, second.predicate) == ("done@1", "done@2")
    assert entry.labels[first.operands[0]] == 2
    assert entry.labels[second.operands[0]] == 5
    assert entry.labels[outer.operands[0]] == 7
    assert entry.registers["done@1"] == "pred"


def test_a_helper_s_line_is_the_line_that_calls_it() -> None:
    assert parse_entry(TRITON, "kernel").instructions[2].place == Place(file="/home/me/mine.py", line=99)


def test_a_wrong_name() -> None:
    with pytest.raises(BadInput, match="no kernel 'kernels': it has other, kernel"):
        parse_entry(TRITON, "kernels")


def test_the_only_kernel_needs_no_name() -> None:
    assert parse_entry(".visible .entry one(){ ret; }").name == "one"
    with pytest.raises(BadInput, match="no kernel ''"):
        parse_entry(TRITON)


def test_a_branch_to_nowhere() -> None:
    with pytest.raises(BadInput, match="branches to gone"):
        parse_entry(".visible .entry one(){ bra gone; }")


def test_a_table_of_branches() -> None:
    body = ".visible .entry one(){ .reg .b32 %r<2>; T: .branchtargets A, B; brx.idx %r1, T; A: ret; B: ret; }"
    entry = parse_entry(body)
    assert entry.instructions[0].operands == ("%r1", "A", "B")
    assert (entry.labels["A"], entry.labels["B"]) == (1, 2)
