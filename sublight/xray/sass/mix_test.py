"""Clocks that are worked out by hand from the rates of the guide and of gpus.toml."""

from __future__ import annotations

import pytest

from sublight.gpus import find
from sublight.xray.record import Code, Resources
from sublight.xray.sass.instruction import Instruction, parse
from sublight.xray.sass.mix import mix, pipes_of, tensor_core

RESOURCES = Resources(registers=32)
GPUS = {75: "t4", 80: "a100", 86: "a10", 89: "rtx4090", 90: "h200", 100: "b200", 120: "rtx5090"}


def one(words: str) -> Instruction:
    return parse(f"        /*0000*/   {words} ;\n        /*0010*/   EXIT ;")[0]


def code(text: str, gpu: str = "h200") -> Code:
    lines = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        lines.append(line if line.endswith(":") else f"        /*{16 * number:04x}*/   {line} ;")
    return Code(name="k", symbol="k", gpu=find(gpu), resources=RESOURCES, sass="\n".join(lines))


@pytest.mark.parametrize(
    ("words", "capability", "pipe", "clocks"),
    [
        # 128 lanes could be fed in a clock; a pipe of n lanes takes 128 / n
        ("FFMA R0, R1, R2, R3", 80, "fp32", 2.0),
        ("FFMA R0, R1, R2, R3", 90, "fp32", 1.0),
        ("FFMA2 R0, R2, R4, R6", 100, "fp32", 2.0),
        ("MUFU.EX2 R0, R1", 90, "special functions", 8.0),
        ("F2I.FTZ.U32.TRUNC.NTZ R0, R1", 90, "special functions", 8.0),
        ("F2F.F32.F64 R5, R4", 89, "special functions", 64.0),
        ("F2F.F32.F64 R5, R4", 90, "special functions", 8.0),
        ("F2FP.BF16.F32.PACK_AB R0, R1, R2", 90, "integer", 2.0),
        ("IADD3 R0, R1, R2, RZ", 90, "integer", 2.0),
        ("IADD3 R0, R1, R2, RZ", 120, "integer", 1.0),
        ("LOP3.LUT R0, R0, 0x1, RZ, 0xc0, !PT", 120, "integer", 2.0),
        ("IMAD R0, R1, R2, R3", 90, "imad", 2.0),
        ("IMAD R0, R1, R2, R3", 90, "fp32", 1.0),
        ("HFMA2 R0, R1, R2, R3", 80, "fp16", 1.0),
        ("HFMA2.BF16_V2 R0, R1, R2, R3", 80, "fp16", 2.0),
        ("HFMA2.BF16_V2 R0, R1, R2, R3", 90, "fp16", 1.0),
        ("DFMA R0, R2, R4, R6", 90, "fp64", 2.0),
        ("DFMA R0, R2, R4, R6", 89, "fp64", 64.0),
        ("SHFL.BFLY PT, R3, R2, 0x10, 0x1f", 90, "load and store", 4.0),
        ("LDG.E.U16 R2, desc[UR4][R2.64]", 90, "load and store", 4.0),
        ("LDS R4, [R2]", 90, "load and store", 4.0),
        ("LDS.128 R4, [R2]", 90, "load and store", 16.0),
        # 2 m n k operations over a quarter of the SM's rate
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 80, "tensor core", 8.0),  # 4096 / 512
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 80, "tensor core", 8.0),  # 2048 / 256
        ("HMMA.SP.16832.F32.BF16 R4, R8, R12, R4, R1, 0x0", 80, "tensor core", 8.0),
        ("HMMA.16816.F16 R4, R8, R12, R4", 89, "tensor core", 16.0),  # 4096 / 256, with fp16 accumulation
        ("HMMA.16816.F32 R4, R8, R12, R4", 89, "tensor core", 32.0),
        ("IMMA.16832.S8.S8 R4, R8, R12, R4", 80, "tensor core", 8.0),  # 8192 / 1024
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", 90, "tensor core", 32.0),  # 131072 / 4 warps / 1024
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", 90, "tensor core", 64.0),
        ("DMMA.884 R4, R2, R6, R4", 80, "tensor core", 16.0),  # 512 / 32
    ],
)
def test_clocks(words: str, capability: int, pipe: str, clocks: float) -> None:
    busy = pipes_of(one(words), find(GPUS[capability]), capability)
    assert busy[pipe] == clocks  # type: ignore[index]
    assert busy["issue"] == 1.0


@pytest.mark.parametrize(
    "words", ["BRA `(.L)", "UIADD3 UR4, UR4, 0x1, URZ", "BAR.SYNC 0x0", "LDC R1, c[0x0][0x28]", "NOP"]
)
def test_what_only_takes_its_issue(words: str) -> None:
    assert pipes_of(one(words), find("h200"), 90) == {"issue": 1.0}


LOOP = """
    MOV R0, RZ
    LDG.E.64 R8, desc[UR4][R2.64]
    .L:
    LDG.E.128 R4, desc[UR4][R2.64]
    MUFU.EX2 R4, R4
    MUFU.EX2 R5, R5
    MUFU.EX2 R6, R6
    FFMA R4, R5, R6, R4
    @P0 BRA `(.L)
    EXIT
"""


def test_counts_and_clocks_by_loop() -> None:
    found = mix(code(LOOP))
    assert found.counts == {"global load": 2, "special function": 3, "fp32": 1, "move": 1, "control": 2}
    assert found.tensor_core is None
    assert found.outside.counts == {"global load": 1, "move": 1, "control": 1}
    assert found.outside.depth == 0
    (loop,) = found.loops
    assert loop.counts == {"global load": 1, "special function": 3, "fp32": 1, "control": 1}
    assert loop.clocks == {"issue": 6.0, "load and store": 16.0, "special functions": 24.0, "fp32": 1.0}
    assert (loop.limit, loop.clocks_per_turn, loop.instructions) == ("special functions", 24.0, 6)
    assert loop.widths == {("global load", 16): 1} and found.outside.widths == {("global load", 8): 1}


def test_where_no_pipe_is_full_the_issue_is_the_limit() -> None:
    (loop,) = mix(code(".L:\n FFMA R4, R5, R6, R4\n UMOV UR4, 0x1\n @P0 BRA `(.L)\n EXIT")).loops
    assert (loop.limit, loop.clocks_per_turn) == ("issue", 3.0)


def test_what_has_no_rate_is_named_and_not_timed() -> None:
    mma = "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR9], tmem[UR16], idesc[UR17], UPT"
    (loop,) = mix(code(f".L:\n {mma}\n UTMALDG.2D [UR8], [UR4]\n @P0 BRA `(.L)\n EXIT", "b200")).loops
    assert loop.untimed == ("UTCHMMA", "UTMALDG")
    assert loop.clocks == {"issue": 3.0}


def test_the_tensor_core_instructions_are_named() -> None:
    assert tensor_core(code("FFMA R4, R5, R6, R4\n EXIT")) is None
    assert tensor_core(code("HMMA.16816.F32.BF16 R4, R8, R12, R4\n HMMA.1688.F32 R4, R8, R12, R4")) == "HMMA"


def test_json_has_names_and_numbers_only() -> None:
    result = mix(code(LOOP)).to_json()
    assert result["loops"][0]["limit"] == "special functions"
    assert result["loops"][0]["widths"] == [{"kind": "global load", "bytes": 16, "count": 1}]
    assert result["outside"]["instructions"] == 3


def test_an_empty_listing_has_an_empty_mix() -> None:
    found = mix(code(""))
    assert (found.counts, found.loops, found.outside.limit, found.outside.clocks_per_turn) == ({}, (), None, 0.0)
