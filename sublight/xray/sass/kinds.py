"""What an instruction is for, by its opcode: the names of SASS in words, with the bytes that it moves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, get_args

from sublight.xray.sass.instruction import Instruction

Kind = Literal[
    "tensor core",
    "global load",
    "global store",
    "global atomic",
    "async copy",  # LDGSTS: global to shared memory, past the registers
    "bulk copy",  # TMA: one thread asks for a whole tile
    "shared load",
    "shared store",
    "shared atomic",
    "matrix load",
    "matrix store",
    "tensor memory",
    "local load",
    "local store",
    "constant load",
    "shuffle",
    "special function",
    "fp64",
    "fp32",
    "fp16",
    "conversion",
    "integer",
    "logic",
    "move",
    "uniform",
    "barrier",
    "control",
    "nop",
    "other",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TENSOR_CORE = re.compile(r"[A-Z]G?MMA|UTC[A-Z]*MMA")  # HMMA, HGMMA, QMMA, OMMA, UTCHMMA, UTCQMMA, …
_UNIFORM = re.compile(r"U[A-Z]\w*|VOTEU")  # one for the whole warp, on a datapath of its own
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_MATRICES = {"2": 2, "4": 4}  # of 8 by 8 values of 16 bit: 4 bytes a lane each

# The opcodes of sm_75 to sm_120 as the CUDA Binary Utilities document and nvdisasm name them.
_OPCODES: dict[Kind, str] = {
    "global load": "LDG LD LDGMC",
    "global store": "STG ST",
    "global atomic": "ATOM ATOMG RED REDG",
    "async copy": "LDGSTS",
    "bulk copy": "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF",
    "shared load": "LDS",
    "shared store": "STS STAS",
    "shared atomic": "ATOMS REDAS",
    "matrix load": "LDSM",
    "matrix store": "STSM",
    "tensor memory": "LDTM STTM LDT STT UTCCP UTCSHIFT UTCATOMSWS",
    "local load": "LDL",
    "local store": "STL",
    "constant load": "LDC LDCU ULDC",
    "shuffle": "SHFL REDUX CREDUX MOVM",
    "special function": "MUFU",
    "fp64": "DADD DMUL DFMA DMNMX DSETP",
    "fp32": "FADD FADD2 FADD32I FMUL FMUL2 FMUL32I FFMA FFMA2 FFMA32I FHADD FHFMA FMNMX FMNMX3 FSWZADD FCHK",
    "fp16": "HADD2 HADD2_32I HMUL2 HMUL2_32I HFMA2 HFMA2_32I HMNMX2 VHMNMX",
    "conversion": "F2F F2I I2F I2I F2FP I2FP I2IP F2IP FRND",
    "integer": "IADD IADD3 IADD32I IMAD IMUL IMUL32I IMNMX LEA SHF SHL SHR ISCADD ISCADD32I IABS POPC FLO BREV SGXT "
    "BMSK IDP IDP4A VIADD VIADDMNMX VIMNMX VIMNMX3 VABSDIFF VABSDIFF4 PRMT LEPC QSPC",
    "logic": "LOP LOP3 LOP32I PLOP3 PSETP ISETP FSETP HSETP2 FSET HSET2 SEL FSEL VOTE P2R R2P MATCH",
    "move": "MOV MOV32I S2R CS2R S2UR R2UR B2R RPCMOV GETLMEMBASE SETLMEMBASE",
    "barrier": "BAR DEPBAR MEMBAR FENCE ERRBAR CGAERRBAR LDGDEPBAR WARPSYNC WARPGROUP WARPGROUPSET SYNCS UTCBAR "
    "UCGABAR_ARV UCGABAR_WAIT CCTL CCTLL CCTLT NANOSLEEP ACQBULK PREEXIT USETMAXREG ENDCOLLECTIVE",
    "control": "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSSY BSYNC BREAK BMOV KILL YIELD BPT ELECT PMTRIG SETCTAID "
    "UVIRTCOUNT UGETNEXTWORKID",
    "nop": "NOP",
}
_KIND_OF: dict[str, Kind] = {opcode: kind for kind, opcodes in _OPCODES.items() for opcode in opcodes.split()}


def kind_of(instruction: Instruction) -> Kind:
    """The kind of one instruction.

    >>> [kind_of(Instruction(address=0, opcode=name)) for name in ("LDG", "HGMMA", "UTCHMMA", "UIADD3", "MUFU")]
    ['global load', 'tensor core', 'tensor core', 'uniform', 'special function']
    """
    opcode = instruction.opcode
    if instruction.predicate in ("!PT", "!UPT"):
        return "nop"  # issued, never executed: ptxas puts such loads where it wants a wait
    if _TENSOR_CORE.fullmatch(opcode):
        return "tensor core"
    if is_move(instruction):
        return "move"
    known = _KIND_OF.get(opcode)
    if known:
        return known
    return "uniform" if _UNIFORM.fullmatch(opcode) else "other"


def is_move(instruction: Instruction) -> bool:
    """Arithmetic that only copies: IMAD.MOV and HFMA2 with -RZ and RZ, by which ptxas spreads moves over the pipes."""
    if instruction.opcode == "IMAD":
        return "MOV" in instruction.modifiers
    return instruction.opcode == "HFMA2" and instruction.operands[1:3] == ("-RZ", "RZ")


def bytes_per_thread(instruction: Instruction) -> int:
    """What one lane moves; 0 where it is no load, store or copy by lanes.

    >>> bytes_per_thread(Instruction(address=0, opcode="LDG", modifiers=("E", "U16", "SYS")))
    2
    """
    kind = kind_of(instruction)
    if kind in ("matrix load", "matrix store"):
        return 4 * next((_MATRICES[word] for word in instruction.modifiers if word in _MATRICES), 1)
    if kind.partition(" ")[0] not in ("global", "shared", "local", "async"):
        return 0
    return next((_WIDTHS[word] for word in instruction.modifiers if word in _WIDTHS), 4)


def tensor_core_of(instructions: Iterable[Instruction]) -> str | None:
    """The kind of tensor-core instruction that is used: HGMMA, HMMA, UTCHMMA …; several are joined with a +."""
    names = {each.opcode for each in instructions if kind_of(each) == "tensor core"}
    return "+".join(sorted(names)) or None
