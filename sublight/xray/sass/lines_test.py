"""Every listing says where its lines come from, calls included; all three agree."""

from __future__ import annotations

import pytest

from sublight.xray import binary
from sublight.xray.record import Place
from sublight.xray.sass import lines
from sublight.xray.sass.lines import Chain

OWN, HELPER = "/home/me/double.py", "/home/me/lib/standard.py"


def frames(chains: list[Chain]) -> list[list[str]]:
    return [[f"{place.file[-9:-3]}:{place.line}" for place in chain] for chain in chains]


def test_sass_chains_end_at_the_comment_that_was_not_inlined() -> None:
    text = f"""_double:
	//## File "{OWN}", line 6
	//## File "{OWN}", line 7
        /*0000*/  LDC R1, c[0x0][0x28] ;
	//## File "{HELPER}", line 287 inlined at "{HELPER}", line 314
	//## File "{HELPER}", line 314 inlined at "{OWN}", line 10
	//## File "{OWN}", line 10
        /*0010*/  FADD R4, R4, R5 ;
        /*0020*/  FADD R4, R4, R6 ;
.L_x_0:
	//## File "{OWN}", line 0
        /*0030*/  NOP ;"""
    assert frames(lines.chains_of_sass(text)) == [
        [], [], [], ["double:7"], [], [], [], ["andard:287", "andard:314", "double:10"],
        ["andard:287", "andard:314", "double:10"], [], [], [],
    ]  # fmt: skip
    assert lines.lines_of_sass(text)[7] == Place(file=OWN, line=10)
    assert lines.lines_of_sass(text, "lib/standard.py")[7] == Place(file=HELPER, line=287)


def test_ptx_finds_the_call_that_a_call_was_inlined_into() -> None:
    text = f"""	.loc	1 7 0
	ld.param.b64 	%rd1, [p];
	.loc	1 10 15
	.loc	2 314 12, function_name $L__info_string0, inlined_at 1 10 15 // standard.py:314:12
	.loc	2 287 12, function_name $L__info_string0, inlined_at 2 314 12 // inlined_at 1 99 9
loop: // again
	@%p1 add.f32 	%r6, %r2, %r3;
	{{ cp.async.bulk.shared::cluster.global [%r1], [%rd1], 16; }}
	.loc	1 11 3
	.loc	2 314 12, function_name $L__info_string0, inlined_at 1 11 3
	.loc	2 287 12, function_name $L__info_string0, inlined_at 2 314 12
	add.f32 	%r6, %r2, %r3;
	.loc	1 0 12, function_name $L__info_string1, inlined_at 1 12 25
	.reg .b32 %r<9>;
	ret;
.visible .entry next(
	bar.sync 0;
	.file	1 "{OWN}"
	.file	2 "{HELPER}", 1700000000, 12345"""
    found = frames(lines.chains_of_ptx(text))
    assert found[1] == ["double:7"]
    assert found[6] == found[7] == ["andard:287", "andard:314", "double:10"]
    assert found[11] == ["andard:287", "andard:314", "double:11"]
    assert found[14] == ["double:12"]  # line 0 is no line
    assert [index for index, chain in enumerate(found) if chain] == [1, 6, 7, 11, 14]  # instructions alone
    assert [place.line for place in lines.lines_of_ptx(text) if place] == [7, 10, 10, 11, 12]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("#own", ["double:9"]),
        ("unknown", []),
        ("#missing", []),
        ("#itself", []),
        (f'"{OWN}":4:2', ["double:4"]),
        (f'"{OWN}":4:2 to 5:3', ["double:4"]),
        (f'"{OWN}":4:2 to :8', ["double:4"]),
        ('"only a name"', []),
        ('"x"(#own)', ["double:9"]),
        (f'"a \\" ) quote"("{OWN}":3:1)', ["double:3"]),
        (f'callsite("{HELPER}":5:1 at "x"(#own))', ["andard:5", "double:9"]),
        (f'callsite(callsite("{HELPER}":5:1 at "{HELPER}":6:1) at #own)', ["andard:5", "andard:6", "double:9"]),
        ("callsite(unknown at #own)", ["double:9"]),
        ("fused[unknown, #own, #loc]", ["double:9"]),
        (f'fused<"cse">["{OWN}":2:2, #own]', ["double:2"]),
        ("callsite(fused[#own] at #loc)", ["double:9", "double:7"]),
        ("callsite(?! at #own)", []),
    ],
)
def test_ttgir_reads_every_form_of_location(location: str, expected: list[str]) -> None:
    text = f"""#loc = loc("{OWN}":7:1)
%0 = tt.op loc({location})
#own = loc("{OWN}":9:9)
#itself = loc("x"(#itself))"""
    assert frames(lines.chains_of_ttgir(text)) == [[], expected, [], []]


def test_ttgir_regions_open_at_the_line_where_they_close() -> None:
    text = f"""#loc = loc("{OWN}":7:1)
  tt.func public @k(%x: i32 loc("x"("{OWN}":8:1))) {{
    scf.for %i = %a to %b step %c {{
      %s = "tt.reduce"(%x) <{{axis = 0 : i32}}> ({{
      ^bb0(%a: f32 loc("{OWN}":20:1), %b: f32 loc("{OWN}":21:1)):
        tt.reduce.return %c : f32 loc("{OWN}":22:1)
      }}) : (tensor<512xf32>) -> f32 loc("{OWN}":23:1)
    }} loc("{OWN}":24:1)
    scf.if %p {{
    }} else {{
    }} loc("{OWN}":30:1)
  }} loc(#loc)"""
    found = [place.line if place else None for place in lines.lines_of_ttgir(text)]
    assert found == [None, 8, 24, 23, 21, 22, 23, 24, 30, 30, 30, 7]


def test_the_own_file_is_where_the_first_line_was_inlined_into() -> None:
    own, helper = Place(file=OWN, line=7), Place(file=HELPER, line=5)
    assert lines.own_file([(), (helper, own), (helper,)]) == OWN
    assert lines.places([(), (helper, own), (helper,)]) == [None, own, helper]  # nearest to it that there is
    assert lines.places([(helper, own)], "standard.py") == [helper]
    assert lines.places([(helper, own)], "elsewhere.py") == [own]


def test_the_assemblers_own_words_are_understood() -> None:
    """ptxas and nvdisasm as they are: the call site survives into SASS."""
    ptx = f""".version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p)
{{
	.reg .b64 %rd<3>; .reg .b32 %r<3>;
	.loc	1 7 1
	ld.param.u64 	%rd1, [p];
	cvta.to.global.u64 	%rd2, %rd1;
	ld.global.u32 	%r1, [%rd2];
	.loc	1 10 3
	.loc	2 5 1, function_name $L__info_string0, inlined_at 1 10 3
	popc.b32 	%r2, %r1;
	.loc	1 11 1
	st.global.u32 	[%rd2], %r2;
	ret;
}}
	.file	1 "{OWN}"
	.file	2 "{HELPER}"
	.section	.debug_str
	{{
$L__info_string0:
.b8 104, 0
	}}
"""
    sass = binary.disassemble(binary.assemble(ptx, 90))["k"]
    found = {
        line.split("*/")[1].split()[0].partition(".")[0]: chain
        for line, chain in zip(sass.split("\n"), lines.chains_of_sass(sass), strict=True)
        if "*/" in line
    }
    assert frames([found["LDG"], found["POPC"], found["STG"]]) == [
        ["double:7"],
        ["andard:5", "double:10"],
        ["double:11"],
    ]
    ptx_places = {place.line for place in lines.lines_of_ptx(ptx) if place}
    assert {place.line for place in lines.lines_of_sass(sass) if place} == ptx_places == {7, 10, 11}
