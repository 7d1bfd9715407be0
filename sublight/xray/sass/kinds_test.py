"""The kind and the width of instructions as nvdisasm writes them, over the architectures."""

from __future__ import annotations

import pytest

from sublight.xray.sass.instruction import Instruction, parse
from sublight.xray.sass.kinds import KINDS, bytes_per_thread, kind_of, tensor_core_of


def one(words: str) -> Instruction:
    return parse(f"        /*0000*/   {words} ;\n        /*0010*/   EXIT ;")[0]


@pytest.mark.parametrize(
    ("words", "kind", "width"),
    [
        ("LDG.E.U16 R2, desc[UR4][R2.64]", "global load", 2),
        ("LDG.E.U8.CONSTANT R2, desc[UR4][R2.64]", "global load", 1),
        ("LDG.E R2, desc[UR4][R2.64]", "global load", 4),
        ("LDG.E.EF.128 R2, desc[UR4][R2.64]", "global load", 16),
        ("LDG.E.128.SYS R2, [R2]", "global load", 16),
        ("LDG.E.LTC128B.64 R2, desc[UR4][R2.64]", "global load", 8),  # the cache hint is no width
        ("LDG.E.ENL2.256 R2, R6, desc[UR4][R2.64]", "global load", 32),
        ("STG.E.U16 desc[UR4][R2.64], R5", "global store", 2),
        ("STG.E.128 desc[UR4][R2.64], R4", "global store", 16),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5", "global atomic", 4),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR4][R2.64]", "async copy", 16),
        ("UTMALDG.2D [UR8], [UR4]", "bulk copy", 0),
        ("LDS.U.128 R4, [R2]", "shared load", 16),
        ("STS.64 [R2], R4", "shared store", 8),
        ("LDSM.16.MT88.4 R4, [R2]", "matrix load", 16),
        ("LDSM.16.M88 R4, [R2]", "matrix load", 4),
        ("STSM.16.M88.4 [R2], R4", "matrix store", 16),
        ("LDL.LU.64 R4, [R1+0x8]", "local load", 8),
        ("STL [R1], R4", "local store", 4),
        ("LDC.64 R2, c[0x0][0x210]", "constant load", 0),
        ("ULDC.64 UR4, c[0x0][0x208]", "constant load", 0),
        ("SHFL.BFLY PT, R3, R2, 0x10, 0x1f", "shuffle", 0),
        ("MUFU.EX2 R3, R2", "special function", 0),
        ("DFMA R2, R4, R6, R8", "fp64", 0),
        ("FFMA2.FTZ R2, R4, R6, R8", "fp32", 0),
        ("HFMA2.BF16_V2 R2, R4, R6, R8", "fp16", 0),
        ("HFMA2.MMA R3, -RZ, RZ, 0, 2.384185791015625e-07", "move", 0),
        ("F2FP.BF16.F32.PACK_AB R2, R3, R4", "conversion", 0),
        ("IMAD.WIDE.U32 R2, R5, 0x4, R2", "integer", 0),
        ("IMAD.MOV.U32 R2, RZ, RZ, R5", "move", 0),
        ("LOP3.LUT R0, R0, 0x3f8, RZ, 0xc0, !PT", "logic", 0),
        ("ISETP.GE.AND P0, PT, R0, UR5, PT", "logic", 0),
        ("UIADD3 UR4, UR4, 0x1, URZ", "uniform", 0),
        ("VOTEU.ANY UP0, P0", "uniform", 0),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barrier", 0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR24], R14", "barrier", 0),
        ("BRA `(.L_x_0)", "control", 0),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "tensor core", 0),
        ("QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "tensor core", 0),
        ("UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR9], tmem[UR16], idesc[UR17], UPT", "tensor core", 0),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R12, R4, R2, R3, URZ", "tensor core", 0),
        ("LDTM.x32 R4, tmem[UR4]", "tensor memory", 0),
        ("@!PT LDS RZ, [RZ]", "nop", 0),
        ("NOP", "nop", 0),
        ("FROBNICATE R0", "other", 0),
    ],
)
def test_kind_and_width(words: str, kind: str, width: int) -> None:
    assert kind_of(one(words)) == kind
    assert bytes_per_thread(one(words)) == width
    assert kind in KINDS


def test_several_kinds_of_tensor_core_instructions_are_joined() -> None:
    integers, halves = one("IMMA.16832.S8.S8 R4, R8, R12, R4"), one("HMMA.16816.F32 R4, R8, R12, R4")
    assert tensor_core_of([integers, halves, halves]) == "HMMA+IMMA"
    assert tensor_core_of([one("FFMA R4, R5, R6, R4")]) is None
