"""What a kernel's instructions are, by loop, and how long an SM needs to issue them if nothing else holds it up.

The model. An SM has four schedulers; each issues one warp instruction a clock to its pipes. A pipe that takes n lanes a
clock and SM is busy with one warp instruction for 128 / n clocks of its scheduler. One turn of a loop then takes a warp
the clocks of its busiest pipe, or of the issuing itself. Latency, memory and bank conflicts are not in it, so it is a
floor for code without branches; the instructions of every branch are counted, taken or not.

Lanes a clock and SM are those of "Throughput of native arithmetic instructions" in the CUDA C++ Best Practices Guide 13
(before: the Programming Guide). fp32, fp64 and the tensor cores take their rates from gpus.toml. Where the table counts
results, an instruction on two fp16 values is half as many lanes. Not in the table: the load and store pipe moves 128
bytes a clock (the width of shared memory), F2FP and I2FP run on the integer pipe, and mma.sync on Hopper, which reaches
about two thirds of wgmma's rate, is given the whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sublight.gpus import Gpu
from sublight.xray.record import Code, Place
from sublight.xray.sass.asm_lines import read
from sublight.xray.sass.instruction import Instruction, file_of, parse
from sublight.xray.sass.kinds import KINDS, Kind, bytes_per_thread, kind_of, tensor_core_of
from sublight.xray.sass.loops import flow

Pipe = Literal["issue", "tensor core", "load and store", "special functions", "fp64", "fp32", "fp16", "imad", "integer"]

SCHEDULERS = 4  # of an SM: each issues one instruction of one warp a clock
LANES = 32 * SCHEDULERS  # that one clock of all schedulers could feed
SHARED_BYTES_PER_CLOCK = 128  # and SM
SPECIAL_LANES = 16  # MUFU, and conversions that go the same way
INTEGER_LANES = 64
SHUFFLE_LANES = 32
REDUX_LANES = 16
# Capability -> lanes that HFMA2 and its like take; a bf16 pair on sm_80 is half as fast.
_FP16_LANES = {75: 64, 80: 128, 86: 64, 87: 64, 89: 64, 90: 128, 100: 64, 103: 64, 120: 64, 121: 64}
_ADD_LANES = {120: 128, 121: 128}  # elsewhere as other integer instructions
_SPECIAL = ("MUFU", "F2F", "F2I", "I2F", "I2I", "FRND", "POPC", "FLO", "BREV", "FCHK")
_FP32_PAIRS = ("FADD2", "FMUL2", "FFMA2")
_ON_INTEGER_PIPE = ("FMNMX", "FMNMX3", "HMNMX2", "VHMNMX", "F2FP", "I2FP", "F2IP", "I2IP")
_MMA_SHAPE = re.compile(r"(16|8)(8)(\d+)")  # 16816 is 16 by 8 by 16
_GMMA_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
_MMA_TYPES = {"BF16": "bf16", "TF32": "tf32", "E4M3": "fp8", "E5M2": "fp8", "E2M1": "fp4", "S8": "int8", "U8": "int8"}
_MMA_DEFAULTS = {"H": "fp16", "I": "int8", "D": "fp64_tensor", "Q": "fp8", "O": "fp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One loop's own instructions, or what lies in no loop."""

    place: Place | None  # of the loop
    depth: int  # 0: in no loop
    counts: Mapping[Kind, int]
    clocks: Mapping[Pipe, float]  # of a scheduler, for one warp and one turn
    widths: Mapping[tuple[Kind, int], int]  # kind of access, bytes a thread -> instructions
    untimed: tuple[str, ...] = ()  # instructions that the model has no rate for

    @property
    def instructions(self) -> int:
        return sum(self.counts.values())

    @property
    def limit(self) -> Pipe | None:
        """The pipe that a turn waits for; `issue` where all have room. None: there is nothing."""
        most = max(self.clocks.values(), default=0.0)
        return next((pipe for pipe, taken in self.clocks.items() if taken == most), None)

    @property
    def clocks_per_turn(self) -> float:
        """A scheduler's clocks for one turn of one warp."""
        return max(self.clocks.values(), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "line": self.place.line if self.place else None,
            "depth": self.depth,
            "instructions": self.instructions,
            "counts": dict(self.counts),
            "widths": [{"kind": kind, "bytes": width, "count": n} for (kind, width), n in self.widths.items()],
            "clocks": dict(self.clocks),
            "limit": self.limit,
            "clocks_per_turn": self.clocks_per_turn,
            "untimed": list(self.untimed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The instructions of a kernel."""

    counts: Mapping[Kind, int]  # of all that a warp can reach
    tensor_core: str | None  # HGMMA, HMMA, …
    outside: Region
    loops: tuple[Region, ...]  # an outer loop before those in it

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "tensor_core": self.tensor_core,
            "outside": self.outside.to_json(),
            "loops": [loop.to_json() for loop in self.loops],
        }


def mix(code: Code) -> Mix:
    """Count and time a kernel's instructions, for the whole and by loop."""
    instructions = read(code)
    paths, file = flow(instructions), file_of(code, instructions)
    reached = [instructions[index] for index in paths.reached]
    outside = [instructions[index] for index in paths.outside]
    return Mix(
        counts=_counts(reached),
        tensor_core=tensor_core_of(reached),
        outside=_region(code, outside, place=None, depth=0),
        loops=tuple(
            _region(
                code,
                [instructions[index] for index in loop.own],
                place=loop.place(instructions, file),
                depth=loop.depth,
            )
            for loop in paths.loops
        ),
    )


def tensor_core(code: Code) -> str | None:
    """HGMMA, HMMA, UTCHMMA …: which tensor-core instructions a kernel has; None where it has none."""
    return tensor_core_of(parse(code.sass))


def _region(code: Code, instructions: Sequence[Instruction], *, place: Place | None, depth: int) -> Region:
    clocks: Counter[Pipe] = Counter()
    untimed: set[str] = set()
    widths: Counter[tuple[Kind, int]] = Counter()
    for each in instructions:
        busy = pipes_of(each, code.gpu, code.capability)
        for pipe, taken in busy.items():
            clocks[pipe] += taken  # type: ignore[assignment]
        kind = kind_of(each)
        if kind == "bulk copy" or (kind == "tensor core" and "tensor core" not in busy):
            untimed.add(each.opcode)
        if width := bytes_per_thread(each):
            widths[kind, width] += 1
    return Region(
        place=place,
        depth=depth,
        counts=_counts(instructions),
        clocks=dict(clocks),
        widths=dict(sorted(widths.items())),
        untimed=tuple(sorted(untimed)),
    )


def _counts(instructions: Iterable[Instruction]) -> dict[Kind, int]:
    counted = Counter(map(kind_of, instructions))
    return {kind: counted[kind] for kind in KINDS if counted[kind]}


def pipes_of(instruction: Instruction, gpu: Gpu, capability: int) -> dict[Pipe, float]:
    """The clocks of a scheduler for which one warp instruction keeps each pipe busy."""
    return {"issue": 1.0, **_work(instruction, gpu, capability)}


def _work(instruction: Instruction, gpu: Gpu, capability: int) -> dict[Pipe, float]:
    kind, opcode = kind_of(instruction), instruction.opcode
    if kind == "tensor core":
        taken = _tensor_core_clocks(instruction, gpu)
        return {"tensor core": taken} if taken else {}
    if width := bytes_per_thread(instruction):
        return {"load and store": max(32.0 * width, SHARED_BYTES_PER_CLOCK) / SHARED_BYTES_PER_CLOCK * SCHEDULERS}
    if kind == "shuffle":
        return {"load and store": LANES / (SHUFFLE_LANES if opcode in ("SHFL", "MOVM") else REDUX_LANES)}
    if kind == "fp64":
        return {"fp64": LANES / _lanes(gpu, "fp64", 2)}
    if opcode in _SPECIAL:
        doubles = "F64" in instruction.modifiers
        return {"special functions": LANES / min(SPECIAL_LANES, _lanes(gpu, "fp64", 2) if doubles else SPECIAL_LANES)}
    return _arithmetic(instruction, kind, gpu, capability)


def _arithmetic(instruction: Instruction, kind: Kind, gpu: Gpu, capability: int) -> dict[Pipe, float]:
    opcode = instruction.opcode
    fp32 = LANES / _lanes(gpu, "fp32", 64 if capability in (75, 80) else 128)
    if opcode in _ON_INTEGER_PIPE:
        return {"integer": LANES / INTEGER_LANES}
    if opcode.startswith(("IMAD", "IMUL", "IDP")):  # on half of the fp32 pipe, and so in its way
        return {"imad": LANES / INTEGER_LANES, "fp32": fp32}
    if opcode.startswith("HFMA2") or kind == "fp16":
        lanes = _FP16_LANES.get(capability, 64)
        return {"fp16": LANES / (64 if capability == 80 and "BF16_V2" in instruction.modifiers else lanes)}
    if kind == "fp32":
        return {"fp32": fp32 * (2 if opcode in _FP32_PAIRS else 1)}
    if kind in ("integer", "logic", "conversion") or opcode.startswith("MOV"):
        is_add = opcode.startswith(("IADD", "VIADD"))
        return {"integer": LANES / (_ADD_LANES.get(capability, INTEGER_LANES) if is_add else INTEGER_LANES)}
    return {}  # constants, uniform, barriers, control: their issue is all that is counted


def _lanes(gpu: Gpu, dtype: str, otherwise: int) -> float:
    """Multiply-adds a clock and SM, of which each is two operations."""
    known = gpu.flops_per_clock_per_sm.get(dtype)
    return known / 2 if known else otherwise


def _tensor_core_clocks(instruction: Instruction, gpu: Gpu) -> float | None:
    """From the shape in its name; tcgen05's (UTCHMMA) is in a descriptor in registers: not known."""
    shape = next((found for word in instruction.modifiers if (found := _shape(word))), None)
    rate = gpu.flops_per_clock_per_sm.get(_mma_type(instruction, gpu))
    if not shape or not rate:
        return None
    m, n, k = shape
    warps = 4 if "GMMA" in instruction.opcode else 1  # four warps share one wgmma
    sparse = 2 if "SP" in instruction.modifiers else 1  # its k counts the zeros, which cost nothing
    return 2.0 * m * n * k / warps / sparse / (rate / SCHEDULERS)


def _shape(word: str) -> tuple[int, int, int] | None:
    """
    >>> _shape("16816"), _shape("1688"), _shape("64x128x16"), _shape("F32")
    ((16, 8, 16), (16, 8, 8), (64, 128, 16), None)
    """
    match = _MMA_SHAPE.fullmatch(word) or _GMMA_SHAPE.fullmatch(word)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _mma_type(instruction: Instruction, gpu: Gpu) -> str:
    """The data type that gpus.toml gives its rate for."""
    named = next((_MMA_TYPES[word] for word in instruction.modifiers if word in _MMA_TYPES), None)
    dtype = named or _MMA_DEFAULTS.get(instruction.opcode[0], "")
    halved = dtype == "fp16" and "F16" in instruction.modifiers and "F32" not in instruction.modifiers
    return "fp16_acc16" if halved and "fp16_acc16" in gpu.flops_per_clock_per_sm else dtype
