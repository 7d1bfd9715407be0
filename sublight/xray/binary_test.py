"""What the tools are asked for is what a listing needs: also where an indirect branch leads."""

from __future__ import annotations

import pytest

from sublight.xray import binary
from sublight.xray.sass.instruction import parse

pytest.importorskip("triton")

BRANCHES = """.version 8.0
.target sm_90
.address_size 64
.visible .entry choose(.param .u32 way, .param .u64 out)
{
    .reg .u32 %way, %old;
    .reg .u64 %place;
    .reg .pred %is_other;
    ld.param.u32 %way, [way];
    ld.param.u64 %place, [out];
    setp.gt.u32 %is_other, %way, 2;
    @%is_other bra done;
    ways: .branchtargets first, second, third;
    brx.idx %way, ways;
first:
    st.global.u32 [%place], %way;
    bra done;
second:
    atom.global.add.u32 %old, [%place+4], 7;
    bra done;
third:
    bar.sync 0;
    st.global.u32 [%place+8], 5;
done:
    ret;
}
"""


def test_a_listing_says_where_an_indirect_branch_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs time, so nvdisasm looks for it only there; elsewhere the listing is the same without."""
    words: list[tuple[str, ...]] = []
    run = binary._run

    def watched(command: str, *options: str, file: bytes, suffix: str) -> str:
        words.append(options)
        return run(command, *options, file=file, suffix=suffix)

    monkeypatch.setattr(binary, "_run", watched)
    listing = binary.disassemble(binary.assemble(BRANCHES, 90))["choose"]
    (branch,) = (each for each in parse(listing) if each.opcode.startswith("BRX"))
    assert len(branch.targets) == 3 and "-ndf" not in words[-1]

    plain = BRANCHES.replace("brx.idx %way, ways;", "bra.uni second;")
    cubin = binary.assemble(plain.replace("    ways: .branchtargets first, second, third;\n", ""), 90)
    del words[:]
    listing = binary.disassemble(cubin)["choose"]
    assert [each for each in words if "-ndf" not in each] == []
    assert listing in run(binary.tool("nvdisasm"), "-gi", "-c", file=cubin, suffix=".cubin")
