"""Is a measured figure normal for this device, and if it is low, what is the likely cause?"""

from __future__ import annotations

import dataclasses

from sublight import units
from sublight.gpus import Gpu
from sublight.health import check
from sublight.health.record import GpuState, known
from sublight.results import Limit

NORMAL_SHARE_OF_REACHED = 0.95  # share of what others reached on this GPU
NORMAL_SHARE_OF_SPEC = {  # healthy devices reach at least this much of the vendor's figure
    "hbm": 0.80,
    "matmul": 0.60,
    "vector": 0.75,
    "d2d": 0.75,
    "h2d": 0.70,
    "d2h": 0.70,
    "peer": 0.70,
    "shared": 0.80,
}
CAUSES: tuple[check.Kind, ...] = ("lost", "throttled", "power-cap", "clocks", "shared", "link", "power-limit")


def judge(limit: Limit, gpu: Gpu | None, state: GpuState | None) -> Limit:
    """The limit with its verdict: normal, low with the likely cause, or unjudged with the reason."""
    if limit.unavailable is not None or limit.verdict:
        return limit
    expected = _expected(limit, gpu)
    if expected is None:
        return dataclasses.replace(limit, verdict="unjudged: no figure to compare with")
    if limit.value is not None and limit.value >= expected:
        return dataclasses.replace(limit, verdict="normal")
    return dataclasses.replace(limit, verdict=f"low: {_cause(limit.name, gpu, state)}")


def _expected(limit: Limit, gpu: Gpu | None) -> float | None:
    reached = gpu.reached.get(limit.name) if gpu else None
    if reached:
        return NORMAL_SHARE_OF_REACHED * reached
    share = NORMAL_SHARE_OF_SPEC.get(limit.name.split("_")[0])
    return share * limit.spec if share and limit.spec else None


def _cause(name: str, gpu: Gpu | None, state: GpuState | None) -> str:
    """The likely cause, checked from the likeliest on. A slow link cannot explain a figure of the GPU alone."""
    if state is None:
        return "the driver gives no reason (NVML is missing)"
    problems = {problem.kind: problem for problem in check.of_gpu(state)}
    for kind in CAUSES:
        if kind in problems and (kind != "link" or name.startswith(("h2d", "d2h"))):
            return problems[kind].words
    if (
        name.startswith("hbm")
        and known(state.errors.ecc_enabled)
        and gpu
        and (gpu.memory_kind or "").startswith("GDDR")
    ):
        return "ECC takes a share of the bandwidth of GDDR memory"
    return f"no cause seen (clock {units.text(known(state.clocks.sm_clock_hz), 'Hz')})"
