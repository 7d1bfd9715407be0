from __future__ import annotations

import dataclasses

import pytest

from sublight import gpus
from sublight.limits.verdict import judge
from sublight.nvml import Health, State
from sublight.results import Limit

GPU = gpus.Gpu(
    key="test", name="Test", memory_kind="HBM3e", reached={"hbm_copy": 4.0e12, "h2d_pinned": 50e9, "matmul_bf16": 7e14}
)
GDDR = dataclasses.replace(GPU, memory_kind="GDDR6")
HEALTHY = Health(
    uuid="GPU-0",
    driver="570.1",
    others=0,
    used_by_others_bytes=0,
    pcie=(5, 16),
    pcie_max=(5, 16),
    ecc=True,
    power_limit_w=700.0,
    power_default_w=700.0,
    state=State(clock_mhz=1980, throttle=()),
)


def with_(**changes: object) -> Health:
    return dataclasses.replace(HEALTHY, **changes)  # type: ignore[arg-type]


def verdict(
    name: str, value: float, *, spec: float | None = None, gpu: gpus.Gpu | None = GPU, health: Health | None = HEALTHY
) -> str:
    return judge(Limit(name=name, unit="B/s", value=value, spec=spec), gpu, health).verdict


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


THROTTLED = with_(state=State(clock_mhz=900, throttle=("power cap", "hardware thermal")))
NARROW = with_(pcie=(3, 8))
CAPPED = with_(power_limit_w=400.0)


@pytest.mark.parametrize(
    ("name", "gpu", "health", "cause"),
    [
        ("hbm_copy", GPU, THROTTLED, "throttled (power cap, hardware thermal)"),
        ("hbm_copy", GPU, with_(others=1), "shared with 1 other process"),
        ("hbm_copy", GPU, with_(others=3), "shared with 3 other processes"),
        ("h2d_pinned", GPU, NARROW, "link runs at PCIe 3.0 x8, not PCIe 5.0 x16"),
        ("h2d_pinned", GPU, with_(pcie=(5, 8)), "link runs at PCIe 5.0 x8, not PCIe 5.0 x16"),
        ("matmul_bf16", GPU, CAPPED, "power limit is 400 W, not 700 W"),
        ("hbm_copy", GDDR, HEALTHY, "ECC takes a share of the bandwidth of GDDR memory"),
        ("hbm_copy", GPU, HEALTHY, "no cause seen (clock 1980 MHz)"),
        ("hbm_copy", GPU, None, "the driver gives no reason (NVML is missing)"),
    ],
)
def test_low_names_its_cause(name: str, gpu: gpus.Gpu, health: Health | None, cause: str) -> None:
    assert verdict(name, 1e9, gpu=gpu, health=health) == f"low: {cause}"


@pytest.mark.parametrize(
    ("name", "gpu", "health"),
    [
        ("matmul_bf16", GPU, NARROW),  # the link has no part in a product
        ("hbm_copy", GDDR, with_(ecc=False)),
        ("hbm_copy", GDDR, with_(ecc=None)),
        ("matmul_bf16", GDDR, HEALTHY),  # nor has ECC
        ("hbm_copy", GPU, with_(power_limit_w=690.0)),  # set by a hair, not a cause
        ("hbm_copy", GPU, with_(power_limit_w=None)),
        ("h2d_pinned", GPU, with_(pcie=None)),
    ],
)
def test_what_does_not_explain_it_is_not_blamed(name: str, gpu: gpus.Gpu, health: Health) -> None:
    assert verdict(name, 1e9, gpu=gpu, health=health) == "low: no cause seen (clock 1980 MHz)"


def test_the_likeliest_cause_comes_first() -> None:
    everything = with_(state=THROTTLED.state, others=2, pcie=(3, 8), power_limit_w=400.0)
    cooled = dataclasses.replace(everything, state=HEALTHY.state)
    assert verdict("h2d_pinned", 1e9, gpu=GDDR, health=everything).startswith("low: throttled")
    assert verdict("h2d_pinned", 1e9, gpu=GDDR, health=cooled).startswith("low: shared")


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
    assert verdict("hbm_copy", 1e9, gpu=unknown) == "low: no cause seen (clock 1980 MHz)"
