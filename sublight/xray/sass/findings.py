"""What a kernel's instructions tell to mend: dots without tensor cores, narrow accesses, spills, and more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sublight.xray.record import Code, Finding, Place
from sublight.xray.sass.asm_lines import read
from sublight.xray.sass.instruction import Instruction, file_of
from sublight.xray.sass.kinds import Kind, bytes_per_thread, kind_of
from sublight.xray.sass.lanes import Lanes
from sublight.xray.sass.lines import lines_of_ttgir
from sublight.xray.sass.loops import Flow, flow
from sublight.xray.sass.mix import Mix, mix

NARROW_BYTES = 4  # below this a warp does not fill the 128 bytes that it could ask for at once
INTEGER_SHARE = 0.6  # of a loop's instructions, from which on they are worth a word
SMALL_LOOP = 16  # instructions: a loop that waits, or so short that its own counting is most of it

_INTEGER: tuple[Kind, ...] = ("integer", "logic", "move", "uniform", "constant load")
_DOT = re.compile(r"=\s*tt\.dot(?:_scaled)?\b.*->\s*tensor<(.+?), #blocked\w*>")
_DOT_INPUTS = re.compile(r"tensor<(?:\d+x)+(\w+), #ttg\.dot_op")
_ON_STACK = re.compile(r"\[R1(?:\+-?0x[0-9a-f]+)?\]")
_DOUBLES = re.compile(r"\b(?:ld|st)\.\S*\.f64\b|\.param\s+(?:\.\w+\s+\d+\s+)*\.f64\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A kernel's parts, read once for all rules."""

    code: Code
    file: str
    instructions: tuple[Instruction, ...]
    paths: Flow
    mix: Mix

    def place(self, instruction: Instruction) -> Place | None:
        return instruction.place(self.file)

    def finding(self, id: str, place: Place | None, detail: str, *, is_information: bool = False) -> Finding:
        return Finding(id=id, kernel=self.code.name, place=place, detail=detail, is_information=is_information)


def code_findings(code: Code) -> tuple[Finding, ...]:
    """Everything that the instructions tell, rule by rule."""
    instructions = read(code)
    view = _View(
        code=code,
        file=file_of(code, instructions),
        instructions=instructions,
        paths=flow(instructions),
        mix=mix(code),
    )
    return tuple(finding for rule in RULES for finding in rule(view))


# ------------------------------------------------------------------------------------------------ tensor cores


def _dots_on_cuda_cores(view: _View) -> Iterator[Finding]:
    """Triton gives a dot that it cannot put on tensor cores a blocked layout; the SASS of that line must agree."""
    on_tensor_cores = {view.place(each) for each in view.instructions if kind_of(each) == "tensor core"}
    seen: set[Place | None] = set()
    lines = view.code.ttgir.split("\n")
    for line, place in zip(lines, lines_of_ttgir(view.code.ttgir, view.file), strict=True):
        if not (dot := _DOT.search(line)) or place in seen or place in on_tensor_cores:
            continue
        seen.add(place)
        types = sorted(set(_DOT_INPUTS.findall(line))) or [dot[1]]
        yield view.finding(
            "dot-on-cuda-cores",
            place,
            f"this dot runs on CUDA cores, with {view.mix.counts.get('fp32', 0)} fp32 instructions and no tensor-core "
            f"one ({'/'.join(types)} on sm_{view.code.capability}){_faster(view.code, types)}",
        )


def _faster(code: Code, types: Sequence[str]) -> str:
    """What to write instead, and what it gains at best."""
    rates = code.gpu.flops_per_clock_per_sm
    for dtype, words in (("tf32", 'input_precision="tf32"'), ("fp16", "fp16 inputs")):
        ratio = rates.get(dtype, 0.0) / rates.get("fp32", float("inf"))
        if ratio > 1 and (dtype == "fp16" or types == ["f32"]):
            return f": {words} would take the tensor cores, {ratio:.0f} times as fast"
    return ": tensor cores want fp16, bf16 or fp8 inputs"


# ------------------------------------------------------------------------------------------------ narrow accesses


def _narrow_accesses(view: _View) -> Iterator[Finding]:
    """Loads and stores of under 4 bytes, by line, where a thread makes several of them or repeats one in a loop.

    One access outside a loop is left alone: a thread that has one value has nothing to join it with. So is one where
    all lanes have the same address: the program wants one value, however often.
    """
    in_loops = {index for loop in view.paths.loops for index in loop.members}
    lanes = Lanes(view.instructions)
    found: dict[tuple[Place | None, Kind, int], list[bool]] = {}  # -> of each, whether it is in a loop
    for index in view.paths.reached:
        each = view.instructions[index]
        kind, width = kind_of(each), bytes_per_thread(each)
        if kind in ("global load", "global store") and width < NARROW_BYTES and lanes.differ(index):
            found.setdefault((view.place(each), kind, width), []).append(index in in_loops)
    for (place, kind, width), loops in sorted(found.items(), key=lambda item: _order(item[0][0])):
        if len(loops) > 1 or any(loops):
            yield _narrow(view, place, kind.removeprefix("global "), width, loops)


def _narrow(view: _View, place: Place | None, verb: str, width: int, loops: Sequence[bool]) -> Finding:
    count = len(loops)
    turn = " a turn of the loop" if all(loops) else ", some in a loop" if any(loops) else ""
    bytes_ = "1 byte" if width == 1 else f"{width} bytes"
    many = f"these {verb}s are {bytes_} wide: {count} a thread{turn}, {count * width} bytes in all"
    one = f"this {verb} in a loop is {bytes_} wide"
    wider = "neighbouring values of a thread, contiguous and aligned to 16 bytes, would go together"
    return view.finding(f"narrow-{verb}", place, f"{many if count > 1 else one}; {wider}")


# ------------------------------------------------------------------------------------------------ local memory


def _local_memory(view: _View) -> Iterator[Finding]:
    """Spills are at fixed places of the stack; an array that is indexed at run time has an address in a register."""
    local = [
        index for index in view.paths.reached if kind_of(view.instructions[index]) in ("local load", "local store")
    ]
    if not local:
        if view.code.resources.stack_bytes:
            words = f"a stack of {view.code.resources.stack_bytes} bytes a thread that the kernel itself does not touch"
            yield view.finding("local-array", None, f"{words}: a function that it calls may", is_information=True)
        return
    at = [view.instructions[index] for index in local]
    indexed = [each for each in at if not any(_ON_STACK.fullmatch(operand) for operand in each.operands)]
    in_loops = {index for loop in view.paths.loops for index in loop.members}
    repeated = sum(index in in_loops for index in local)
    if indexed:
        place, _ = _most(map(view.place, indexed))
        yield view.finding(
            "local-array",
            place,
            f"an array of a thread is indexed at run time and so lies in local memory, which is device memory: "
            f"{view.code.resources.stack_bytes} bytes, {_loads_and_stores(at)}; unroll until its indices are constants",
        )
        return
    place, lines = _most(map(view.place, at))
    spilled = view.code.resources.spill_bytes or view.code.resources.stack_bytes
    loop = f", {repeated} of them in a loop" if repeated else ""
    yield view.finding(
        "spill",
        place,
        f"{spilled} bytes a thread do not fit in {view.code.resources.registers} registers and lie in local memory: "
        f"{_loads_and_stores(at)}{loop}{lines}; smaller blocks or more warps need fewer registers a thread",
    )


def _loads_and_stores(at: Sequence[Instruction]) -> str:
    stores = sum(kind_of(each) == "local store" for each in at)
    return f"{_plural(stores, 'store')} and {_plural(len(at) - stores, 'load')}"


def _most(places: Iterable[Place | None]) -> tuple[Place | None, str]:
    """The line with the most, and the three with the most in words."""
    counted = Counter(place for place in places if place)
    if not counted:
        return None, ""
    ranked = sorted(counted.items(), key=lambda item: (-item[1], _order(item[0])))
    first = ranked[0][0]
    lines = [str(place.line) for place, _ in ranked if place.file == first.file][:3]
    return first, f", most at line{'s' if len(lines) > 1 else ''} {', '.join(lines)}"


# ------------------------------------------------------------------------------------------------ arithmetic


def _fp64_arithmetic(view: _View) -> Iterator[Finding]:
    """Doubles where no argument is one: a constant without its f, or a function that works in double."""
    doubles = [view.instructions[index] for index in view.paths.reached]
    doubles = [each for each in doubles if kind_of(each) == "fp64"]
    if not doubles or _has_doubles(view.code):
        return
    place, lines = _most(map(view.place, doubles))
    rates = view.code.gpu.flops_per_clock_per_sm
    slow = f", {rates['fp32'] / rates['fp64']:.0f} times as slow as fp32 here" if {"fp32", "fp64"} <= set(rates) else ""
    words = f"{_plural(len(doubles), 'double-precision instruction')}{slow}, though no argument is a double{lines}"
    yield view.finding("fp64-arithmetic", place, words, is_information=True)


def _has_doubles(code: Code) -> bool:
    """Whether an argument is or holds 64-bit floats; where neither signature nor PTX says, it may."""
    if code.signature:
        return any(kind.removeprefix("*") in ("fp64", "f64") for kind in code.signature.values())
    return bool(_DOUBLES.search(code.ptx)) if code.ptx else True


def _integer_overhead(view: _View) -> Iterator[Finding]:
    for region in view.mix.loops:
        integers = sum(region.counts.get(kind, 0) for kind in _INTEGER)
        share = integers / region.instructions if region.instructions else 0.0
        is_held_up = region.limit in ("issue", "integer", "imad") and not region.counts.get("tensor core")
        if region.instructions >= SMALL_LOOP and share >= INTEGER_SHARE and is_held_up:
            yield view.finding(
                "integer-overhead",
                region.place,
                f"{integers} of this loop's {region.instructions} instructions ({share:.0%}) are integers, logic and "
                f"moves, and to issue them is what a turn takes: {region.clocks_per_turn:.0f} clocks a warp",
                is_information=True,
            )


RULES = (_dots_on_cuda_cores, _narrow_accesses, _local_memory, _fp64_arithmetic, _integer_overhead)


def _order(place: Place | None) -> tuple[str, int]:
    return (place.file, place.line) if place else ("", 0)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def by_line(code: Code) -> Mapping[int, Counter[Kind]]:
    """How many instructions of each kind a line of the author's file has: which lines are hot, for a listing."""
    instructions = read(code)
    file = file_of(code, instructions)
    counted: dict[int, Counter[Kind]] = {}
    for each in instructions:
        if place := each.place(file):
            counted.setdefault(place.line, Counter())[kind_of(each)] += 1
    return counted
