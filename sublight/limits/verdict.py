"""Is a measured figure normal for this device, and if it is low, what is the likely cause?"""

from __future__ import annotations

import dataclasses

from sublight.gpus import Gpu
from sublight.nvml import Health
from sublight.results import Limit

NORMAL_SHARE_OF_REACHED = 0.95  # of what others reached on this GPU
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


def judge(limit: Limit, gpu: Gpu | None, health: Health | None) -> Limit:
    """The limit with its verdict: normal, low with the likely cause, or unjudged with the reason."""
    if limit.unavailable is not None or limit.verdict:
        return limit
    expected = _expected(limit, gpu)
    if expected is None:
        return dataclasses.replace(limit, verdict="unjudged: no figure to compare with")
    if limit.value is not None and limit.value >= expected:
        return dataclasses.replace(limit, verdict="normal")
    return dataclasses.replace(limit, verdict=f"low: {_cause(limit.name, gpu, health)}")


def _expected(limit: Limit, gpu: Gpu | None) -> float | None:
    reached = gpu.reached.get(limit.name) if gpu else None
    if reached:
        return NORMAL_SHARE_OF_REACHED * reached
    share = NORMAL_SHARE_OF_SPEC.get(limit.name.split("_")[0])
    return share * limit.spec if share and limit.spec else None


def _cause(name: str, gpu: Gpu | None, health: Health | None) -> str:
    if health is None:
        return "the driver gives no reason (NVML is missing)"
    if health.state.throttle:
        return f"throttled ({', '.join(health.state.throttle)})"
    if health.others:
        return f"shared with {health.others} other process{'es' if health.others > 1 else ''}"
    if name.startswith(("h2d", "d2h")) and health.pcie and health.pcie_max and health.pcie < health.pcie_max:
        now, most = ("PCIe {}.0 x{}".format(*link) for link in (health.pcie, health.pcie_max))
        return f"link runs at {now}, not {most}"
    if health.power_limit_w and health.power_default_w and health.power_limit_w < 0.95 * health.power_default_w:
        return f"power limit is {health.power_limit_w:.0f} W, not {health.power_default_w:.0f} W"
    if name.startswith("hbm") and health.ecc and gpu and (gpu.memory_kind or "").startswith("GDDR"):
        return "ECC takes a share of the bandwidth of GDDR memory"
    return f"no cause seen (clock {health.state.clock_mhz} MHz)"
