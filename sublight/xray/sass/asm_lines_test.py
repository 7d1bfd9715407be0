"""A load of four registers without a mask, as Triton writes it and LLVM numbers it."""

from __future__ import annotations

from sublight.gpus import find
from sublight.xray.record import Code, Resources
from sublight.xray.sass.asm_lines import mended, read, righted
from sublight.xray.sass.instruction import parse

PTX = """\
\t.file\t1 "/home/me" "kernel.py"
\t.loc\t1 7 9                          // kernel.py:7:9
\t// begin inline asm
\t.loc\t1 7 9                          // kernel.py:7:9
\tmov.u32 %r1, 0x0;
\t.loc\t1 8 9                          // kernel.py:8:9
\tmov.u32 %r2, 0x0;
\t.loc\t1 9 9                          // kernel.py:9:9
\tld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];

\t// end inline asm
\tadd.f32 %r3, %r1, %r2;
\t.loc\t1 8 5                          // kernel.py:8:5
\tmul.f32 %r4, %r3, %r3;
\t.loc\t1 9 5                          // kernel.py:9:5
\t// begin inline asm
\t.loc\t1 9 5                          // kernel.py:9:5
\tst.global.b32 [ %rd2 + 0 ], { %r4 };

\t// end inline asm
\tret;
"""
LINES = {"LDG.E.64 R2, desc[UR4][R2.64]": 9, "FMUL R4, R3, R3": 8, "STG.E desc[UR4][R6.64], R4": 9}


def sass(lines: dict[str, int]) -> str:
    text = []
    for number, (words, line) in enumerate(lines.items()):
        text += [f'\t//## File "/home/me/kernel.py", line {line}', f"        /*{16 * number:04x}*/    {words} ;"]
    return "\n".join(text)


def righted_lines(lines: dict[str, int], ptx: str) -> list[int]:
    return [each.places[0].line for each in righted(parse(sass(lines)), ptx)]


def test_a_load_goes_back_to_its_line_and_the_store_stays() -> None:
    assert righted_lines(LINES, PTX) == [7, 8, 9]


def test_without_ptx_nothing_moves() -> None:
    assert righted_lines(LINES, "") == [9, 8, 9]


def test_where_a_line_has_loads_of_its_own_nothing_moves() -> None:
    own = PTX.replace("\tret;", "\tld.global.b32 %r5, [%rd3];\n\tret;").replace("\t.loc\t1 9 5 ", "\t.loc\t1 9 6 ")
    assert righted_lines(LINES, own) == [9, 8, 9]


def test_lines_of_other_files_stay() -> None:
    assert righted_lines(LINES, PTX.replace("kernel.py", "other.py")) == [9, 8, 9]


def test_mended_ptx_has_no_locations_in_its_assembly_and_all_the_rest() -> None:
    kept = mended(PTX)
    assert kept.count(".loc") == 3
    assert [line for line in kept.split("\n") if ".loc" not in line] == [
        line for line in PTX.split("\n") if ".loc" not in line
    ]
    assert righted_lines(LINES, kept) == [9, 8, 9], "and so nothing is known to be wrong"


def test_a_kernel_is_read_with_its_ptx() -> None:
    resources = Resources(registers=32)
    code = Code(name="k", symbol="k", gpu=find("h200"), resources=resources, sass=sass(LINES), ptx=PTX)
    assert [each.places[0].line for each in read(code)] == [7, 8, 9]
