"""Verdicts: what counts as normal, and which cause a low figure is given."""

from __future__ import annotations

import dataclasses

import pytest

from sublight import gpus
from sublight.health.record import Clocks, Errors, GpuState, Link, Power, Process, Unavailable
from sublight.limits.verdict import judge
from sublight.results import Limit

GPU = gpus.Gpu(
    key="test", name="Test", memory_kind="HBM3e", reached={"hbm_copy": 4.0e12, "h2d_pinned": 50e9, "matmul_bf16": 7e14}
)
GDDR = dataclasses.replace(GPU, memory_kind="GDDR6")
HEALTHY = GpuState(
    index=0,
    name="Test",
    clocks=Clocks(sm_clock_hz=1.98e9, performance_state=0, slowed_by=()),
    power=Power(power_limit_w=700.0, power_default_w=700.0),
    errors=Errors(ecc_enabled=True),
    link=Link(pcie_generation=5, pcie_width=16, pcie_generation_max=5, pcie_width_max=16),
    processes=(),
)
NO_CAUSE = "no cause seen (clock 1.98 GHz)"


def with_(**changes: object) -> GpuState:
    """Changed inside, wherever the field is."""
    state = HEALTHY
    for name, value in changes.items():
        part = next((each for each in ("clocks", "power", "errors", "link") if hasattr(getattr(state, each), name)), "")
        inner = dataclasses.replace(getattr(state, part), **{name: value}) if part else value
        state = dataclasses.replace(state, **{part or name: inner})  # type: ignore[arg-type]
    return state


def others(count: int) -> GpuState:
    return with_(processes=tuple(Process(pid=-at, used_bytes=10**9, command="python train.py") for at in range(count)))


def verdict(
    name: str, value: float, *, spec: float | None = None, gpu: gpus.Gpu | None = GPU, state: GpuState | None = HEALTHY
) -> str:
    return judge(Limit(name=name, unit="B/s", value=value, spec=spec), gpu, state).verdict


@pytest.mark.parametrize(("share", "word"), [(1.1, "normal"), (1.0, "normal"), (0.951, "normal"), (0.949, "low")])
def test_normal_is_what_others_reached(share: float, word: str) -> None:
    assert verdict("hbm_copy", share * 4.0e12).split(":")[0] == word


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("hbm_write", 0.80),
        ("matmul_fp8", 0.60),
        ("vector_fp32", 0.75),
        ("h2d_pageable", 0.70),
        ("d2h_pinned", 0.70),
        ("peer_copy", 0.70),
        ("shared_read", 0.80),
    ],
)
def test_where_nobody_measured_the_vendors_figure_counts(name: str, least: float) -> None:
    assert verdict(name, 1.001 * least * 1e12, spec=1e12) == "normal"
    assert verdict(name, 0.999 * least * 1e12, spec=1e12).startswith("low: ")


def test_what_others_reached_counts_before_the_vendors_figure() -> None:
    assert verdict("hbm_copy", 3.9e12, spec=9e12) == "normal"
    assert verdict("hbm_copy", 3.7e12, spec=1e12).startswith("low: ")


THROTTLED = with_(slowed_by=("hardware thermal",), sm_clock_hz=9e8)
NARROW = with_(pcie_generation=3, pcie_width=8)


@pytest.mark.parametrize(
    ("name", "gpu", "state", "cause"),
    [
        ("hbm_copy", GPU, THROTTLED, "throttled (hardware thermal) to 900 MHz"),
        ("hbm_copy", GPU, with_(slowed_by=("power cap",)), "clock held at 1.98 GHz (power cap)"),
        ("hbm_copy", GPU, others(1), "another process on it (0 python; 1.00 GB)"),
        ("hbm_copy", GPU, others(3), "3 other processes on it (0 python, -1 python and 1 more; 3.00 GB)"),
        ("h2d_pinned", GPU, NARROW, "link runs at PCIe 3.0 x8, not PCIe 5.0 x16"),
        ("h2d_pinned", GPU, with_(pcie_width=8), "link runs at PCIe 5.0 x8, not PCIe 5.0 x16"),
        ("matmul_bf16", GPU, with_(power_limit_w=400.0), "power limit is 400 W, not 700 W"),
        ("hbm_copy", GDDR, HEALTHY, "ECC takes a share of the bandwidth of GDDR memory"),
        ("hbm_copy", GPU, HEALTHY, NO_CAUSE),
        ("hbm_copy", GPU, None, "the driver gives no reason (NVML is missing)"),
    ],
)
def test_low_names_its_cause(name: str, gpu: gpus.Gpu, state: GpuState | None, cause: str) -> None:
    assert verdict(name, 1e9, gpu=gpu, state=state) == f"low: {cause}"


@pytest.mark.parametrize(
    ("name", "gpu", "state"),
    [
        ("matmul_bf16", GPU, NARROW),  # the link has no part in a product
        ("hbm_copy", GDDR, with_(ecc_enabled=False)),
        ("hbm_copy", GDDR, with_(ecc_enabled=Unavailable("no ECC"))),
        ("matmul_bf16", GDDR, HEALTHY),  # nor has ECC
        ("hbm_copy", GPU, with_(power_limit_w=690.0)),  # set by a hair, not a cause
        ("hbm_copy", GPU, with_(power_limit_w=Unavailable("no limit"))),
        ("h2d_pinned", GPU, with_(pcie_width=Unavailable("no link"))),
    ],
)
def test_what_does_not_explain_it_is_not_blamed(name: str, gpu: gpus.Gpu, state: GpuState) -> None:
    assert verdict(name, 1e9, gpu=gpu, state=state) == f"low: {NO_CAUSE}"


def test_the_likeliest_cause_comes_first() -> None:
    cooled = dataclasses.replace(others(2), link=NARROW.link)
    everything = dataclasses.replace(cooled, clocks=THROTTLED.clocks)
    assert verdict("h2d_pinned", 1e9, gpu=GDDR, state=everything).startswith("low: throttled")
    assert verdict("h2d_pinned", 1e9, gpu=GDDR, state=cooled).startswith("low: 2 other processes")


@pytest.mark.parametrize(
    ("name", "gpu", "spec"),
    [("host_copy", None, None), ("hbm_write", GPU, None), ("hbm_write", None, None), ("disk_read", GPU, 1e9)],
)
def test_without_a_figure_to_compare_with_it_is_unjudged(name: str, gpu: gpus.Gpu | None, spec: float | None) -> None:
    assert verdict(name, 1.0, gpu=gpu, spec=spec) == "unjudged: no figure to compare with"


def test_a_probes_own_verdict_and_what_is_unavailable_stay() -> None:
    own = Limit(name="hbm_copy", unit="B/s", value=1.0, verdict="unjudged: the clock is locked")
    missing = Limit(name="hbm_copy", unit="B/s", unavailable="one GPU: no peer link")
    assert judge(own, GPU, HEALTHY) is own
    assert judge(missing, GPU, HEALTHY) is missing


def test_the_rest_of_the_limit_stays() -> None:
    limit = Limit(name="hbm_copy", unit="B/s", value=4e12, spec=4.8e12, spread=1e9, n=12, detail={"bytes": 5})
    assert dataclasses.replace(judge(limit, GPU, HEALTHY), verdict="") == limit


def test_ecc_on_a_gpu_whose_memory_is_not_known() -> None:
    unknown = dataclasses.replace(GPU, memory_kind=None)
    assert verdict("hbm_copy", 1e9, gpu=unknown) == f"low: {NO_CAUSE}"
