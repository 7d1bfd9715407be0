"""The table's arithmetic gives the vendors' peaks, every figure has a source, and names resolve."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from sublight import gpus
from sublight.limits import LIMITS as PROBES

TOLERANCE = 0.015  # vendors print two or three digits
ASKED = ("p4", "v100", "t4", "a100", "a10040", "a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090")
ASKED += ("h100", "h100pcie", "h200", "gh200", "b200", "mi300x", "mi250x", "mi325x", "mi355x", "pvc", "b580")
DTYPES = ("fp64", "fp64_tensor", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int32")
DTYPES += ("fp16_acc16", "fp8_acc16")
LIMITS = {name for probe in PROBES for name in probe.names}
TABLES = ("peak_flops", "flops_per_clock_per_sm", "reached")
H200 = {
    "name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "sms": 132,
    "clock_hz": 1.98e9,
    "memory_bytes": 141 << 30,
    "l2_bytes": 60 << 20,
    "memory_clock_hz": 3.201e9,
    "bus_bits": 6016,
}
DEVICE_NAMES = {
    "NVIDIA H200": "h200",
    "h-200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a10040",
    "A100-SXM4-40GB": "a10040",
    "NVIDIA A10": "a10",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100pcie",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "rtx 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v10032",
    "Tesla T4": "t4",
    "Tesla P4": "p4",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi355x",
    "Intel(R) Data Center GPU Max 1550": "pvc",
    "Intel(R) Arc(TM) B580 Graphics": "b580",
}
OTHER_CARDS = [  # near in name, far in figures
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA H100 NVL",
    "NVIDIA H200 MIG 1g.18gb",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "",
]


def figures(gpu: gpus.Gpu) -> dict[str, float]:
    """Every number of the record by the name that `sources` uses."""
    alone = {f.name: getattr(gpu, f.name) for f in fields(gpu) if isinstance(getattr(gpu, f.name), int | float)}
    return alone | {f"{table}.{key}": value for table in TABLES for key, value in getattr(gpu, table).items()}


def test_table_holds_what_was_asked() -> None:
    assert set(ASKED) <= {gpu.key for gpu in gpus.all_gpus()}


@pytest.mark.parametrize("gpu", gpus.all_gpus(), ids=lambda gpu: gpu.key)
class TestEveryGpu:
    def test_arithmetic_gives_the_vendor_peaks(self, gpu: gpus.Gpu) -> None:
        vendor = {d: v for d, v in gpu.peak_flops.items() if not gpu.sources[f"peak_flops.{d}"].startswith("derived")}
        assert "fp32" in vendor
        for dtype, value in vendor.items():
            off = abs(gpus.theoretical_peak(gpu, dtype).value / value - 1)
            assert off < TOLERANCE or f"peak_flops.{dtype}" in gpu.notes, f"{dtype} is off by {off:.1%}, unexplained"
            assert off < 2 * TOLERANCE, dtype

    def test_memory_arithmetic_gives_the_vendor_bandwidth(self, gpu: gpus.Gpu) -> None:
        assert gpu.memory_bytes_per_s is not None
        off = abs(gpus.memory_peak(gpu).value / gpu.memory_bytes_per_s - 1)
        assert off < TOLERANCE or "memory_bytes_per_s" in gpu.notes, f"off by {off:.1%}, unexplained"
        assert off < 2 * TOLERANCE

    def test_every_figure_has_a_source(self, gpu: gpus.Gpu) -> None:
        assert set(figures(gpu)) <= set(gpu.sources)
        assert all(len(citation) > 10 for citation in gpu.sources.values())

    def test_notes_name_figures(self, gpu: gpus.Gpu) -> None:
        assert set(gpu.notes) <= set(figures(gpu))

    def test_figures_are_si_and_positive(self, gpu: gpus.Gpu) -> None:
        assert all(value > 0 for name, value in figures(gpu).items() if name != "encoders")
        for name, low, high in (
            ("boost_clock_hz", 1e9, 3e9),
            ("memory_bytes", 8 << 30, 1 << 39),
            ("memory_bytes_per_s", 1e11, 1e13),
            ("pcie_bytes_per_s", 15e9, 64e9),
            ("nvlink_bytes_per_s", 50e9, 1e12),
            ("peak_flops.fp32", 5e12, 2e14),
        ):
            assert low <= figures(gpu).get(name, low) <= high, name
        assert gpu.memory_bytes is not None and gpu.memory_bytes % (1 << 30) == 0

    def test_names_of_types_and_limits(self, gpu: gpus.Gpu) -> None:
        assert set(gpu.peak_flops) == set(gpu.flops_per_clock_per_sm) <= set(DTYPES)
        assert set(gpu.reached) <= set(LIMITS)

    def test_reached_is_below_the_peak(self, gpu: gpus.Gpu) -> None:
        for limit, value in gpu.reached.items():
            kind, _, what = limit.partition("_")
            peaks = {"hbm": gpu.memory_bytes_per_s, "h2d": gpu.pcie_bytes_per_s, "d2h": gpu.pcie_bytes_per_s}
            peaks["both"] = 2 * (gpu.pcie_bytes_per_s or 0)
            if kind in ("l2", "shared"):
                continue  # no vendor says what these could reach
            unit = "fp64_tensor" if limit == "matmul_fp64" else what
            peak = gpu.peak_flops[unit] if kind in ("matmul", "vector") else peaks[kind]
            assert peak is not None and 0.4 * peak < value < peak, limit

    def test_names_resolve(self, gpu: gpus.Gpu) -> None:
        for name in (gpu.key, gpu.name, gpu.key.upper(), f"{gpu.vendor} {gpu.name}", *gpu.aliases):
            assert gpus.find(name) is gpu, name


def test_h200_peak_shows_its_clock() -> None:
    h200 = gpus.find("h200")
    assert gpus.theoretical_peak(h200, "bf16").arithmetic == "132 SMs x 4096 FLOP/clock/SM x 1.830 GHz = 989.4 TFLOP/s"
    assert gpus.theoretical_peak(h200, "fp32").arithmetic == "132 SMs x 256 FLOP/clock/SM x 1.980 GHz = 66.9 TFLOP/s"
    assert h200.reached["hbm_copy"] == 4.25e12
    assert "sublight limits" in h200.sources["reached.hbm_copy"]


def test_geforce_halves_fp32_accumulation_and_others_do_not() -> None:
    rtx4090, l40s = gpus.find("rtx4090"), gpus.find("l40s")
    assert rtx4090.flops_per_clock_per_sm["fp16"] * 2 == rtx4090.flops_per_clock_per_sm["fp16_acc16"]
    assert l40s.flops_per_clock_per_sm["fp16"] == 2 * rtx4090.flops_per_clock_per_sm["fp16"]
    assert "fp16_acc16" not in l40s.flops_per_clock_per_sm


def test_amd_counts_compute_units_and_int8_counts_operations() -> None:
    arithmetic = gpus.theoretical_peak(gpus.find("mi300x"), "int8").arithmetic
    assert arithmetic == "304 CUs x 4096 OP/clock/CU x 2.100 GHz = 2614.9 TOP/s"


@pytest.mark.parametrize(("key", "whole"), [("mi250x", 47.9e12), ("pvc", 52e12)])
def test_a_card_of_two_dies_is_half_of_what_the_vendor_says(key: str, whole: float) -> None:
    """torch counts each die as a GPU: with the card's figures every limit would be twice too high."""
    gpu = gpus.find(key)
    assert 2 * gpu.peak_flops["fp32"] == pytest.approx(whole)
    assert "of one" in gpu.notes["sms"]


def test_like_takes_over_figures_but_nothing_measured() -> None:
    a100, a10040 = gpus.find("a100"), gpus.find("a10040")
    assert a10040.peak_flops == a100.peak_flops
    assert a10040.memory_bytes == 40 << 30
    assert a100.reached and not a10040.reached


@pytest.mark.parametrize(("name", "key"), DEVICE_NAMES.items())
def test_device_names_resolve(name: str, key: str) -> None:
    assert gpus.find(name).key == key


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_other_cards_do_not_pass_for_known_ones(name: str) -> None:
    with pytest.raises(gpus.UnknownGpu):
        gpus.find(name)


def test_unknown_name_says_the_nearest_in_one_line() -> None:
    with pytest.raises(gpus.UnknownGpu, match="unknown GPU 'h300\\\\n': nearest are h200, h100,") as caught:
        gpus.find("h300\n")
    assert "\n" not in str(caught.value)
    with pytest.raises(gpus.UnknownGpu, match=r"unknown GPU 'zzzzzz': `sublight gpus` lists every known one$"):
        gpus.find("zzzzzz")  # nothing is near: a list of all is no help


def test_unknown_type_says_which_are_known() -> None:
    with pytest.raises(gpus.UnknownFigure, match=r"no fp8 peak is known for A10: known are .*bf16"):
        gpus.theoretical_peak(gpus.find("a10"), "fp8")


def test_derive_from_h200_properties_gives_its_peaks() -> None:
    derived, h200 = gpus.derive(**H200), gpus.find("h200")
    assert derived.peak_flops.keys() == h200.peak_flops.keys()
    for dtype, peak in derived.peak_flops.items():
        assert peak == pytest.approx(h200.peak_flops[dtype], rel=0.02), dtype
    assert derived.peak_flops["bf16"] == pytest.approx(989.4e12, rel=1e-3)
    assert (derived.max_clock_hz, derived.tensor_core_generation) == (1.98e9, 4)
    assert derived.sources["sms"] == "derived from device properties"
    assert set(figures(derived)) <= set(derived.sources)
    assert derived.memory_bytes_per_s == pytest.approx(h200.memory_bytes_per_s, rel=TOLERANCE)
    assert derived.power_w is None


def test_memory_peak_takes_the_vendor_figure_where_the_bus_is_not_known() -> None:
    peak = gpus.memory_peak(replace(gpus.find("h200"), memory_bus_bits=None))
    assert peak.value == 4.8e12
    assert peak.arithmetic == "4.800 TB/s (NVIDIA H200 Tensor Core GPU datasheet, 2024)"


def test_derive_halves_geforce_rates() -> None:
    laptop = gpus.derive("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76, 2.04e9, 16 << 30)
    assert laptop.flops_per_clock_per_sm["bf16"] == 512


def test_derive_of_an_unknown_architecture_leaves_figures_absent() -> None:
    unknown = gpus.derive("NVIDIA X1", (99, 1), 100, 2e9, 64 << 30, 1 << 20)
    assert (unknown.compute_capability, unknown.architecture, unknown.peak_flops) == ((99, 1), None, {})
    assert (unknown.sms, unknown.shared_bytes_per_sm) == (100, None)
    for ask in (lambda: gpus.theoretical_peak(unknown, "bf16"), lambda: gpus.memory_peak(unknown)):
        with pytest.raises(gpus.UnknownFigure, match="known for NVIDIA X1"):
            ask()


def test_derive_without_a_clock_knows_no_peak() -> None:
    assert gpus.derive(**{**H200, "clock_hz": None}).peak_flops == {}


def fake_torch(patch: pytest.MonkeyPatch, *, available: bool = True, hip: str | None = None, **device: object) -> None:
    cuda = SimpleNamespace(is_available=lambda: available, get_device_properties=lambda _: SimpleNamespace(**device))
    patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))


def test_detect_knows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, name="NVIDIA H200")
    assert gpus.detect() is gpus.find("h200")


def test_detect_derives_what_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"major": 9, "minor": 0, "multi_processor_count": 16, "total_memory": 18 << 30, "clock_rate": 1_980_000}
    fake_torch(monkeypatch, name="NVIDIA H200 MIG 1g.18gb", regs_per_multiprocessor=65536, **size)
    slice_ = gpus.detect()
    assert slice_ is not None and slice_.register_bytes_per_sm == 262_144
    assert slice_.peak_flops["bf16"] == pytest.approx(989.4e12 * 16 / 132, rel=1e-3)


def test_detect_derives_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"multi_processor_count": 304, "total_memory": 256 << 30, "clock_rate": 2_100_000}
    fake_torch(monkeypatch, name="AMD Instinct of the future", hip="7.0", gcnArchName="gfx942:sramecc+:xnack-", **size)
    future = gpus.detect()
    assert future is not None and (future.vendor, future.gfx, future.compute_capability) == ("AMD", "gfx942", None)
    assert future.peak_flops["bf16"] == pytest.approx(1307.4e12, rel=1e-3)


def test_detect_without_torch_or_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, available=False)
    assert gpus.detect() is None
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    assert gpus.detect() is None


def test_import_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from sublight import gpus\n"
        "print(gpus.find('h200').key, gpus.detect(), 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["h200", "None", "False"]
