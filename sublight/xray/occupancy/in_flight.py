"""Bytes in flight: where enough loads are under way to hide the memory's latency, more occupancy brings nothing.

Little's law: to move B bytes a second with an answer after L seconds, B x L bytes must be asked for at every moment.
An SM asks for its warps x 32 x the bytes that one thread asks for before it must wait, so wide or unrolled loads do the
work of more warps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sublight.errors import BadInput
from sublight.gpus import Gpu, UnknownFigure, memory_peak
from sublight.units import text
from sublight.xray.occupancy.blocks import Occupancy
from sublight.xray.occupancy.sm import WARP

# Latency rises as the memory fills up, so B x L with the idle latency reaches about 70 % of the bandwidth only. Twice
# as much reaches about 90 %: the occupancy sweep of gpu-benches on a V100 (README of github.com/te42kyfo/gpu-benches,
# cuda-stream), which a test here compares with.
MARGIN = 2.0

Verdict = Literal["enough", "tight", "short"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long an idle GPU takes to answer a load from device memory."""

    seconds: float
    source: str


def _chase(gpu: str, cycles: float, clock_hz: float) -> Latency:
    source = f"gpu-benches, gpu-latency on a {gpu}: {cycles:.1f} cycles at {clock_hz / 1e6:.0f} MHz"
    return Latency(seconds=cycles / clock_hz, source=f"{source} (github.com/te42kyfo/gpu-benches)")


# A pointer chase by one warp through more than the L2 holds, by compute capability. What is not here is not known.
LATENCIES: Mapping[int, Latency] = {
    70: _chase("V100 PCIe", 436.0, 1380e6),
    80: _chase("A100 80 GB", 549.5, 1410e6),
    86: _chase("A40", 554.6, 1740e6),
    89: _chase("L40", 631.9, 2490e6),
    90: _chase("GH200", 678.6, 1980e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What every SM must have asked for at every moment."""

    bytes_per_sm: float
    bytes_per_s: float  # of the whole GPU
    latency_s: float
    source: str  # of the latency
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What an SM asks for at a time, next to what it should."""

    bytes_per_sm: int
    need: Need
    warps_enough: int  # an SM: from there on more bring nothing
    arithmetic: str

    @property
    def ratio(self) -> float:
        return self.bytes_per_sm / self.need.bytes_per_sm

    @property
    def verdict(self) -> Verdict:
        """enough: about 90 % of the bandwidth can be reached; tight: less; short: latency sets the time."""
        return "enough" if self.ratio >= MARGIN else "tight" if self.ratio >= 1 else "short"

    @property
    def sentence(self) -> str:
        """For the reader, in one line."""
        says = {
            "enough": f"occupancy does not matter here: {self.warps_enough} warps an SM are enough",
            "tight": f"occupancy matters a little: {self.warps_enough} warps an SM would be enough",
            "short": f"too few bytes in flight: {self.warps_enough} warps an SM, or wider loads, would be enough",
        }
        return f"{says[self.verdict]} ({self.arithmetic})"


def latency_of(gpu: Gpu) -> Latency | None:
    """The published latency of this GPU's generation; None where none is known."""
    major, minor = gpu.compute_capability or (0, 0)
    return LATENCIES.get(10 * major + minor)


def bytes_in_flight_needed(gpu: Gpu, *, latency_s: float | None = None, bytes_per_s: float | None = None) -> Need:
    """Bandwidth x latency, shared out among the SMs.

    `latency_s`: what `sublight limits` measured as `latency_hbm`, else the published figure of the generation.
    `bytes_per_s`: what it measured (`hbm_read`), else the theoretical peak.

    >>> from sublight.gpus import find
    >>> bytes_in_flight_needed(find("h200"), latency_s=353e-9).arithmetic
    '4.81 TB/s x 353 ns / 132 SMs = 12.9 kB an SM'
    """
    known = latency_of(gpu) if latency_s is None else Latency(seconds=latency_s, source="given")
    if known is None:
        raise BadInput(
            f"the memory latency of {gpu.name} is not known: give latency_hbm of `sublight limits`, latency_s="
        )
    if not gpu.sms:
        raise BadInput(f"the number of SMs of {gpu.name} is not known: name a GPU of `sublight gpus`")
    if bytes_per_s is None:
        try:
            bytes_per_s = memory_peak(gpu).value
        except UnknownFigure as error:
            raise BadInput(str(error)) from error
    if not (known.seconds > 0 and bytes_per_s > 0):
        raise BadInput(f"{bytes_per_s:g} B/s and {known.seconds:g} s: bandwidth and latency are above 0")
    share = bytes_per_s * known.seconds / gpu.sms
    factors = f"{text(bytes_per_s, 'B/s')} x {text(known.seconds, 's')} / {gpu.sms} SMs"
    return Need(
        bytes_per_sm=share,
        bytes_per_s=bytes_per_s,
        latency_s=known.seconds,
        source=known.source,
        arithmetic=f"{factors} = {text(share, 'B')} an SM",
    )


def bytes_in_flight(
    occupancy: Occupancy,
    gpu: Gpu,
    *,
    bytes_per_thread: int,
    latency_s: float | None = None,
    bytes_per_s: float | None = None,
) -> InFlight:
    """Whether so many warps, each thread with so many bytes under way, hide the latency.

    `bytes_per_thread`: of the loads from device memory that a thread issues before it must wait for one of them.
    """
    if bytes_per_thread < 1:
        raise BadInput(f"{bytes_per_thread} bytes a thread in flight: give at least 1")
    need = bytes_in_flight_needed(gpu, latency_s=latency_s, bytes_per_s=bytes_per_s)
    per_warp = WARP * bytes_per_thread
    have = occupancy.warps_per_sm * per_warp
    factors = f"{occupancy.warps_per_sm} warps x {WARP} x {bytes_per_thread} B = {text(have, 'B')} in flight an SM"
    return InFlight(
        bytes_per_sm=have,
        need=need,
        warps_enough=math.ceil(MARGIN * need.bytes_per_sm / per_warp),
        arithmetic=f"{factors}; {need.arithmetic}, twice that is enough",
    )
