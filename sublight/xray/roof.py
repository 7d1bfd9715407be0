"""The roof over a kernel: what each of its resources allows at best, so that the largest names the reason for its time.

Each bound is for the launch that was followed. The floor is what its tensors cost in device memory, each through it
once; the others are what this very code asks for: sectors of the L2, instructions of the schedulers, passes through
shared memory, and bytes in flight against the memory's latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sublight import units
from sublight.gpus import Gpu, UnknownFigure, memory_peak
from sublight.xray.occupancy.blocks import Occupancy
from sublight.xray.occupancy.in_flight import InFlight
from sublight.xray.occupancy.waves import Waves
from sublight.xray.ptx.accesses import Followed
from sublight.xray.ptx.transactions import SECTOR_BYTES
from sublight.xray.record import Access, Code, Place
from sublight.xray.sass.instruction import Instruction
from sublight.xray.sass.kinds import kind_of
from sublight.xray.sass.loops import Flow
from sublight.xray.sass.mix import Mix, Region

SCHEDULERS = 4  # of an SM: each issues one instruction of one warp a clock
L2_BYTES_PER_CLOCK = 64  # of an SM, from and to the L2: NVIDIA, "Dissecting" papers of Volta to Hopper measure as much
_NO_FIGURES = "the GPU's SMs or clock are not known"
_MOVES = ("global load", "global store", "global atomic", "async copy", "shared load", "shared store", "matrix load")

Name = Literal["floor", "issue", "transactions", "shared memory", "latency", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A time below which this resource does not let the launch go, and its arithmetic."""

    name: Name
    seconds: float | None  # None: not known, and `detail` says why
    detail: str

    @property
    def kind(self) -> Literal["floor", "allows", "measured"]:
        return self.name if self.name in ("floor", "measured") else "allows"  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """All bounds, the floor first, and what follows."""

    bounds: tuple[Bound, ...]

    @property
    def highest(self) -> Bound | None:
        """What holds this code back most, among all that is known but the measured time itself."""
        known = [bound for bound in self.bounds if bound.seconds is not None and bound.name != "measured"]
        return max(known, key=lambda bound: bound.seconds or 0.0, default=None)

    @property
    def sentence(self) -> str:
        times = {bound.name: bound.seconds for bound in self.bounds if bound.seconds}
        highest = self.highest
        if highest is None or not highest.seconds:
            return ""
        floor, measured = times.get("floor"), times.get("measured")
        at = units.text(highest.seconds, "s")
        if highest.name == "floor":
            words = f"nothing but device memory holds it back: {at} at best"
        elif floor and highest.seconds < 1.05 * floor:
            words = f"device memory and {highest.name} hold it back equally: {at} at best"
        else:
            over = f", {highest.seconds / floor:.2g} times its floor" if floor else ""
            words = f"{highest.name} holds it back: {at} at best{over}"
        if measured:
            share = highest.seconds / measured
            words += f"; measured {units.text(measured, 's')}, of which that explains {units.percent(min(1.0, share))}"
        return words


def roof_of(
    code: Code,
    *,
    mix: Mix,
    turns: Sequence[float | None],
    accesses: Sequence[Access],
    followed: Followed,
    occupancy: Occupancy | None,
    waves: Waves | None,
    in_flight: InFlight | None,
    measured_s: float | None = None,
) -> Roof:
    """Every bound that can be told for the launch in `code`."""
    blocks = math.prod(code.grid) if code.grid else 0
    scale = blocks / followed.blocks if followed.blocks else 0.0
    stopped = followed.problem or next((stop.reason for stop in followed.stops), "")
    unknown = stopped or ("" if blocks else "the grid is not known: record a launch with --record")
    on_device = [access for access in accesses if access.space == "global"]
    untold = unknown or next((access.unknown for access in on_device if access.unknown), "")
    moved_bytes = sum(access.sectors for access in on_device) * SECTOR_BYTES * scale
    bounds = [
        _floor(code, followed, unknown),
        _transactions(code.gpu, moved_bytes, untold),
        _shared(code.gpu, accesses, scale, unknown),
        _issue(code.gpu, mix, turns, occupancy, blocks),
        _latency(moved_bytes, in_flight, waves, untold),
    ]
    if measured_s is not None:
        bounds.append(Bound(name="measured", seconds=measured_s, detail="the median, on this machine"))
    return Roof(bounds=tuple(bounds))


def turns_of(
    instructions: Sequence[Instruction], flow: Flow, file: str, accesses: Iterable[Access], warps: int
) -> tuple[float | None, ...]:
    """How often a warp goes round each loop, from how often it made the loop's memory accesses.

    The SASS may hold several turns of the source's loop at once; its instructions at a line against the requests of
    that line count this in. None: the loop has no access that was followed.
    """
    requests: dict[Place | None, int] = {}
    for access in accesses:
        requests[access.place] = requests.get(access.place, 0) + access.requests
    found: list[float | None] = []
    for loop in flow.loops:
        held: dict[Place | None, int] = {}
        for index in loop.own:
            if kind_of(instructions[index]) in _MOVES:
                place = instructions[index].place(file)
                held[place] = held.get(place, 0) + 1
        counted = [requests[place] / (count * warps) for place, count in held.items() if requests.get(place) and warps]
        found.append(max(counted) if counted else None)
    return tuple(found)


def _floor(code: Code, followed: Followed, unknown: str) -> Bound:
    moved = {name: directions for name, directions in followed.touched.items() if name in code.arguments}
    if unknown or not moved:
        return Bound(name="floor", seconds=None, detail=unknown or "no argument is a tensor: nothing is known to move")
    total = sum(_bytes(code.arguments[name]) * len(directions) for name, directions in moved.items())
    try:
        rate = code.gpu.reached.get("hbm_copy") or memory_peak(code.gpu).value
    except UnknownFigure as error:
        return Bound(name="floor", seconds=None, detail=str(error))
    whose = "reached" if "hbm_copy" in code.gpu.reached else "theoretical"
    words = f"{units.text(total, 'B')} of tensors at {units.text(rate, 'B/s')} ({whose})"
    return Bound(name="floor", seconds=total / rate, detail=words)


def _bytes(tensor: object) -> int:
    return int(getattr(tensor, "nbytes", 0))


def _transactions(gpu: Gpu, moved_bytes: float, unknown: str) -> Bound:
    if unknown:
        return Bound(name="transactions", seconds=None, detail=unknown)
    rate = gpu.reached.get("l2_read") or L2_BYTES_PER_CLOCK * (gpu.sms or 0) * (gpu.clock_hz("fp32") or 0.0)
    if not rate:
        return Bound(name="transactions", seconds=None, detail=_NO_FIGURES)
    words = f"{units.text(moved_bytes, 'B')} in sectors through the L2 at {units.text(rate, 'B/s')}"
    return Bound(name="transactions", seconds=moved_bytes / rate, detail=words)


def _shared(gpu: Gpu, accesses: Iterable[Access], scale: float, unknown: str) -> Bound:
    known = [access for access in accesses if access.space == "shared"]
    unknown = unknown or next((access.unknown for access in known if access.unknown), "")
    clock = gpu.clock_hz("fp32")
    if unknown or not gpu.sms or not clock:
        return Bound(name="shared memory", seconds=None, detail=unknown or _NO_FIGURES)
    passes, ideal = (
        sum(getattr(access, name) for access in known) * scale for name in ("wavefronts", "ideal_wavefronts")
    )
    cost = units.text((passes - ideal) / gpu.sms / clock, "s") if passes > ideal else ""
    words = f"{passes:,.0f} passes, one a clock and SM"
    words += (
        f"; {passes - ideal:,.0f} of them are bank conflicts and cost {cost}"
        if cost
        else ", no bank conflict" * bool(passes)
    )
    return Bound(name="shared memory", seconds=passes / gpu.sms / clock, detail=words if passes else "none is used")


def _issue(gpu: Gpu, mix: Mix, turns: Sequence[float | None], occupancy: Occupancy | None, blocks: int) -> Bound:
    clock = gpu.clock_hz("fp32")
    if not (blocks and occupancy and gpu.sms and clock):
        return Bound(name="issue", seconds=None, detail="the launch is not known: record one with --record")
    if any(turn is None for turn in turns):
        lines = [_line(loop) for loop, turn in zip(mix.loops, turns, strict=True) if turn is None]
        return Bound(name="issue", seconds=None, detail=f"how often the {lines[0]} turns is not known")
    clocks = mix.outside.clocks_per_turn
    clocks += sum(loop.clocks_per_turn * (turn or 0.0) for loop, turn in zip(mix.loops, turns, strict=True))
    warps = blocks * occupancy.warps_per_block
    seconds = clocks * warps / (SCHEDULERS * gpu.sms * clock)
    words = f"{clocks:,.0f} clocks a warp of a scheduler, {warps:,} warps over {gpu.sms} SMs of {SCHEDULERS}"
    return Bound(name="issue", seconds=seconds, detail=words)


def _line(loop: Region) -> str:
    return f"loop at line {loop.place.line}" if loop.place else "loop without a line"


def _latency(moved_bytes: float, in_flight: InFlight | None, waves: Waves | None, unknown: str) -> Bound:
    """At least one answer of the memory a wave; and Little's law over all that is asked for."""
    if unknown or in_flight is None or waves is None:
        return Bound(name="latency", seconds=None, detail=unknown or "no load that a thread waits for is known")
    latency_s = in_flight.need.latency_s
    by_waves = waves.rounds * latency_s
    by_bytes = moved_bytes * latency_s / (in_flight.bytes_per_sm * waves.sms)
    if by_bytes > by_waves:
        return Bound(name="latency", seconds=by_bytes, detail=in_flight.arithmetic)
    count = "1 wave" if waves.rounds == 1 else f"{waves.rounds} waves"
    words = f"{count} of blocks, each at least one answer of the memory: {units.text(latency_s, 's')}"
    return Bound(name="latency", seconds=by_waves, detail=words)
