"""The roof over a kernel: what each of its resources allows at best, so that the largest names the reason for its time.

Each bound is for the launch that is known, from a few of its blocks that were followed. The floor is what its tensors
cost in device memory, each through it once; the others are what this very code asks for: sectors of the caches,
instructions of the schedulers, passes through shared memory, and answers of the memory. All are times that the launch
cannot go below: where something is not known, less is claimed, and the detail says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sublight import units
from sublight.gpus import Gpu, UnknownFigure, memory_peak
from sublight.results import Limit, Limits
from sublight.xray.occupancy.blocks import Occupancy
from sublight.xray.occupancy.in_flight import InFlight
from sublight.xray.occupancy.waves import Waves
from sublight.xray.ptx.accesses import Followed
from sublight.xray.ptx.moved import ELSEWHERE
from sublight.xray.ptx.transactions import SECTOR_BYTES
from sublight.xray.record import Access, Code
from sublight.xray.sass.mix import SCHEDULERS
from sublight.xray.sass.turns import Turns

L1_BYTES_PER_CLOCK = 128  # of an SM: CUDA's documents give the L1 the width of shared memory, which it is part of
L2_BYTES_PER_CLOCK = 64  # of an SM, from and to the L2: what the "Dissecting" papers measured from Volta to Hopper
WHOLE = 0.6  # of a tensor's bytes: where the blocks that were followed promise so much, all of them move all of it
EQUAL = 1.05
_NO_FIGURES = "the GPU's SMs or clock are not known"
_NO_GRID = "the grid is not known: record a launch with --record"
_NO_SIZES = "how large its tensors are is not known: record a launch with --record"

Name = Literal["floor", "issue", "transactions", "shared memory", "latency", "measured"]
_HOLDS: dict[Name, str] = {
    "issue": "issuing its instructions holds it back",
    "transactions": "its memory transactions hold it back",
    "shared memory": "shared memory holds it back",
    "latency": "waiting for memory holds it back",
}


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
        """For the reader, in one line."""
        times = {bound.name: bound.seconds for bound in self.bounds if bound.seconds}
        highest = self.highest
        if highest is None or not highest.seconds:
            return ""
        floor, measured = times.get("floor"), times.get("measured")
        at = f"{units.text(highest.seconds, 's')} at best"
        if highest.name == "floor":
            untold = any(bound.seconds is None for bound in self.bounds)
            words = f"device memory holds it back, as far as is known: {at}"
            words = words if untold else f"nothing but device memory holds it back: {at}"
        elif floor and highest.seconds < EQUAL * floor:
            words = f"device memory and {highest.name} hold it back equally: {at}"
        else:
            over = f", {_factor(highest.seconds / floor)} times its floor" if floor else ""
            words = f"{_HOLDS[highest.name]}: {at}{over}"
        if not floor:  # device memory may take longer than all that is known
            words = f"how long device memory takes is not known; of the rest, {words}"
        if not measured:
            return words
        beside = f"; measured {units.text(measured, 's')}"
        if highest.seconds > EQUAL * measured:
            return words + f"{beside}, which is less: a cache had its data"
        return words + f"{beside}, of which that explains {units.percent(min(1.0, highest.seconds / measured))}"


def _factor(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def roof_of(
    code: Code,
    *,
    turns: Turns,
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
    unknown = stopped or ("" if blocks else _NO_GRID)
    on_device = [access for access in accesses if access.space == "global"]
    untold = unknown or next((access.unknown for access in on_device if access.unknown), "")
    floor, read_bytes = _floor(code, followed, scale, unknown)
    bounds = [
        floor,
        _transactions(code, on_device, followed, scale, untold),
        _shared(code.gpu, accesses, followed.blocks, blocks, unknown),
        _issue(code.gpu, turns, occupancy, blocks),
        _latency(read_bytes, in_flight, waves, untold),
    ]
    if measured_s is not None:
        bounds.append(Bound(name="measured", seconds=measured_s, detail="the median, on this machine"))
    return Roof(bounds=tuple(bounds))


def _floor(code: Code, followed: Followed, scale: float, unknown: str) -> tuple[Bound, float]:
    """Each tensor that is read or written, once; and how much of it is read.

    Where data say what is read, as in a gather, blocks may read the same: that is counted as far as it was followed.
    """
    if unknown:
        return Bound(name="floor", seconds=None, detail=unknown), 0.0
    moved = followed.moved
    read, written, parts = 0.0, moved.written_bytes.get(ELSEWHERE, 0) * scale, []
    for name, value in _tensors(code).items():
        size, indirect = _bytes(value), moved.indirect_bytes.get(name, 0)
        direct = _of_whole((moved.read_bytes.get(name, 0) - indirect) * scale, size)
        written += _of_whole(moved.written_bytes.get(name, 0) * scale, size)
        read += min(size, direct + indirect)
        parts += [name] if indirect and direct < size else []
    if not read + written:
        moves = moved.read_bytes or moved.written_bytes
        none = _NO_SIZES if moves else "no argument is a tensor: nothing is known to move"
        return Bound(name="floor", seconds=None, detail=none), 0.0
    reached = [Limit(name=name, unit="B/s", value=rate) for name, rate in code.gpu.reached.items()]
    rate = Limits(device=code.gpu.name, kind="cuda", limits=tuple(reached)).memory_rate(read, written)
    whose = "reached" if rate else "theoretical"
    try:
        rate = rate or memory_peak(code.gpu).value
    except UnknownFigure as error:
        return Bound(name="floor", seconds=None, detail=str(error)), read
    words = (
        f"{units.text(read, 'B')} read and {units.text(written, 'B')} written, at {units.text(rate, 'B/s')} ({whose})"
    )
    if parts:
        words += f"; of {', '.join(parts)} data say what is read: counted where it was followed"
    if ELSEWHERE in followed.moved.read_bytes:
        words += "; what is read behind addresses in a table is not counted"
    return Bound(name="floor", seconds=(read + written) / rate, detail=words), read


def _of_whole(estimate: float, size: int) -> float:
    return size if estimate >= WHOLE * size else estimate


def _tensors(code: Code) -> dict[str, Any]:
    """By the names that memory goes by: the first argument of each storage, as it is followed."""
    flat: dict[str, Any] = {}
    for name, value in code.arguments.items():
        for index, one in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if hasattr(one, "nbytes"):
                flat[f"{name}.{index}" if isinstance(value, tuple | list) else name] = one
    return flat


def _bytes(tensor: Any) -> int:
    """A view that repeats its elements has no more of them than its storage, one with gaps fewer."""
    storage = tensor.untyped_storage().nbytes() if hasattr(tensor, "untyped_storage") else tensor.nbytes
    return int(min(tensor.nbytes, storage))


def _transactions(code: Code, on_device: Iterable[Access], followed: Followed, scale: float, unknown: str) -> Bound:
    """All sectors through the L1; through the L2 what the L1 cannot have: a block's first reads, and every write.

    Of what many blocks read, weights say, each SM fetches at least one.
    """
    gpu = code.gpu
    clock = gpu.clock_hz("fp32")
    if unknown or not gpu.sms or not clock:
        return Bound(name="transactions", seconds=None, detail=unknown or _NO_FIGURES)
    sizes = {name: _bytes(value) for name, value in _tensors(code).items()}
    read = sum(
        min(seen * scale, max(seen, sizes.get(name, math.inf) * gpu.sms))
        for name, seen in followed.moved.read_bytes.items()
    )
    through_l2 = read + sum(followed.moved.written_bytes.values()) * scale
    through_l1 = sum(access.sectors for access in on_device) * SECTOR_BYTES * scale
    l2_rate = gpu.reached.get("l2_read") or L2_BYTES_PER_CLOCK * gpu.sms * clock
    l1_rate = L1_BYTES_PER_CLOCK * gpu.sms * clock
    ways = [(through_l2 / l2_rate, through_l2, "L2", l2_rate), (through_l1 / l1_rate, through_l1, "L1", l1_rate)]
    seconds, moved, cache, rate = max(ways)
    words = f"{units.text(moved, 'B')} in sectors through the {cache} at {units.text(rate, 'B/s')}"
    return Bound(name="transactions", seconds=seconds, detail=words)


def _shared(gpu: Gpu, accesses: Iterable[Access], followed: int, blocks: int, unknown: str) -> Bound:
    known = [access for access in accesses if access.space == "shared"]
    unknown = unknown or next((access.unknown for access in known if access.unknown), "")
    clock = gpu.clock_hz("fp32")
    if unknown or not gpu.sms or not clock:
        return Bound(name="shared memory", seconds=None, detail=unknown or _NO_FIGURES)
    passes, ideal = (sum(getattr(access, name) for access in known) for name in ("wavefronts", "ideal_wavefronts"))
    on_busiest = math.ceil(blocks / gpu.sms) / followed  # of an SM, in followed blocks
    words = f"{passes * on_busiest:,.0f} passes on an SM, one a clock"
    if passes > ideal:
        lost = (passes - ideal) * on_busiest
        words += f"; {lost:,.0f} of them are bank conflicts and cost {units.text(lost / clock, 's')}"
    else:
        words += ", no bank conflict"
    words = words if passes else "none is used"
    return Bound(name="shared memory", seconds=passes * on_busiest / clock, detail=words)


def _issue(gpu: Gpu, turns: Turns, occupancy: Occupancy | None, blocks: int) -> Bound:
    """The SM with most blocks: its warps, shared out among its schedulers."""
    clock = gpu.clock_hz("fp32")
    if not (blocks and occupancy and gpu.sms and clock):
        return Bound(name="issue", seconds=None, detail="the launch is not known: record one with --record")
    on_busiest = math.ceil(blocks / gpu.sms)
    warps = math.ceil(on_busiest * occupancy.warps_per_block / SCHEDULERS)
    held = "1 warp" if warps == 1 else f"{warps:,} warps"
    words = f"{turns.clocks:,.0f} clocks a warp, {held} to each of the {SCHEDULERS} schedulers of an SM"
    if turns.limit and turns.limit != "issue":
        words += f"; the busiest pipe is {turns.limit}"
    if turns.unknown:
        words += f"; the {turns.unknown[0]} counts once, how often it turns is not known"
    return Bound(name="issue", seconds=turns.clocks * warps / clock, detail=words)


def _latency(read_bytes: float, in_flight: InFlight | None, waves: Waves | None, unknown: str) -> Bound:
    """At least one answer of the memory a wave; and Little's law over what is read from device memory."""
    if unknown or in_flight is None or waves is None:
        return Bound(name="latency", seconds=None, detail=unknown or "how much a thread asks for at once is not known")
    latency_s = in_flight.need.latency_s
    by_waves = waves.rounds * latency_s
    at_once = min(waves.blocks, waves.blocks_per_wave)
    by_bytes = read_bytes * latency_s / (in_flight.bytes_per_sm * waves.sms * at_once / waves.blocks_per_wave)
    if by_bytes > by_waves:
        fewer = f", with {waves.blocks_per_wave:,} blocks at a time; here are {at_once:,}"
        words = in_flight.arithmetic + (fewer if at_once < waves.blocks_per_wave else "")
        return Bound(name="latency", seconds=by_bytes, detail=words)
    count = "1 wave" if waves.rounds == 1 else f"{waves.rounds:,} waves"
    words = f"{count} of blocks, each at least one answer of the memory: {units.text(latency_s, 's')}"
    return Bound(name="latency", seconds=by_waves, detail=words)
