"""How long a warp keeps its scheduler: the clocks of its way through the code, each loop as often as it turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sublight.xray.record import Access, Code, Place
from sublight.xray.sass.instruction import Instruction
from sublight.xray.sass.kinds import Kind, kind_of
from sublight.xray.sass.loops import Flow
from sublight.xray.sass.mix import Pipe, pipes_of
from sublight.xray.sass.path import MOVES, path_outside

_COUNTED: tuple[Kind, ...] = (*MOVES, "shared load", "shared store", "shared atomic", "matrix load", "matrix store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What one warp issues from its first instruction to its last."""

    clocks: float  # of a scheduler: where pipes have work, of the busiest
    limit: Pipe | None  # that pipe, in the part that takes longest
    loops: tuple[float | None, ...]  # how often each turns; None: not known, and counted once
    unknown: tuple[str, ...] = ()  # those loops: loop at line 40


def turns_of(
    code: Code,
    instructions: Sequence[Instruction],
    flow: Flow,
    file: str,
    accesses: Iterable[Access],
    warps: int,
) -> Turns:
    """The loops' turns, from how often the followed warps made their accesses (0: none was followed to its end)."""
    requests = _requests(accesses)
    turns = _turns(instructions, flow, file, requests, warps)
    way = path_outside(instructions, flow, _outside(instructions, flow, file, requests, warps) if warps else None)
    parts = [(way, 1.0)]
    parts += [(loop.own, 1.0 if turn is None else turn) for loop, turn in zip(flow.loops, turns, strict=True)]
    total, longest, limit = 0.0, 0.0, None
    for indices, times in parts:
        clocks: Counter[Pipe] = Counter()
        for index in indices:
            for pipe, taken in pipes_of(instructions[index], code.gpu, code.capability).items():
                clocks[pipe] += taken  # type: ignore[assignment]
        if clocks and times:
            pipe = max(clocks, key=lambda name: clocks[name])
            total += clocks[pipe] * times
            if clocks[pipe] * times > longest:
                longest, limit = clocks[pipe] * times, pipe
    lost = [loop.place(instructions, file) for loop, turn in zip(flow.loops, turns, strict=True) if turn is None]
    unknown = tuple(f"loop at line {place.line}" if place else "loop without a line" for place in lost)
    return Turns(clocks=total, limit=limit, loops=turns, unknown=unknown)


def _requests(accesses: Iterable[Access]) -> dict[Place | None, int]:
    """How often the warps issued the instructions of each line that load or store.

    A `matrix operand` is read by a product, which is neither. An asynchronous copy is one instruction with two
    accesses, to global and to shared memory: the half with more requests counts (lanes that are off fetch nothing from
    global memory, and still write zeros to shared memory).
    """
    by_line: dict[tuple[Place | None, str], int] = {}
    for access in accesses:
        if access.kind != "matrix operand":
            half = access.space if access.kind == "async copy" else ""
            by_line[access.place, half] = by_line.get((access.place, half), 0) + access.requests
    found: dict[Place | None, int] = {}
    for place in {place for place, _ in by_line}:
        copies = max(by_line.get((place, space), 0) for space in ("global", "shared"))
        found[place] = by_line.get((place, ""), 0) + copies
    return found


def _turns(
    instructions: Sequence[Instruction], flow: Flow, file: str, requests: dict[Place | None, int], warps: int
) -> tuple[float | None, ...]:
    """Requests of a line over its instructions in the loop, less those before and behind.

    The SASS may hold several turns of the source's loop at once, and a second loop for the turns that remain: all of a
    line's requests are taken to be made by the loop with most of its instructions.
    """
    held = [_held(instructions, loop.own, file, _COUNTED) for loop in flow.loops]
    outside = _held(instructions, flow.outside, file, _COUNTED)
    found: list[float | None] = []
    for counts in held:
        if not counts or not warps:
            found.append(None)
            continue
        own = [place for place in counts if _is_first(place, counts, held)]
        made = [max(0.0, requests.get(place, 0) / warps - outside[place]) / counts[place] for place in own]
        found.append(max(made, default=0.0))
    return tuple(found)


def _is_first(place: Place | None, counts: Counter[Place | None], held: Sequence[Counter[Place | None]]) -> bool:
    return next(each for each in held if each[place] == max(other[place] for other in held)) is counts


def _held(
    instructions: Sequence[Instruction], indices: Iterable[int], file: str, kinds: tuple[Kind, ...]
) -> Counter[Place | None]:
    return Counter(instructions[index].place(file) for index in indices if kind_of(instructions[index]) in kinds)


def _outside(
    instructions: Sequence[Instruction], flow: Flow, file: str, requests: dict[Place | None, int], warps: int
) -> float:
    """Accesses that a warp made outside of loops: of a line no more than there are, the rest was in a loop."""
    held = _held(instructions, flow.outside, file, MOVES)
    return sum(min(count, requests.get(place, 0) / warps) for place, count in held.items())
