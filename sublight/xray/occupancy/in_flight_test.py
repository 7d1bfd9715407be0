"""Little's law agrees with a sweep over occupancy that others measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.errors import BadInput
from sublight.gpus import find, memory_peak
from sublight.xray.occupancy.blocks import Occupancy, occupancy
from sublight.xray.occupancy.in_flight import LATENCIES, MARGIN, bytes_in_flight, bytes_in_flight_needed, latency_of
from sublight.xray.record import Resources

H200, V100 = find("h200"), find("v100")

# README of github.com/te42kyfo/gpu-benches, cuda-stream on a V100 PCIe 16 GB: GB/s of a kernel whose threads have n
# loads of 8 bytes under way (sum1, sum2, sum4, sum8), by threads on the whole GPU.
LOADS = (1, 2, 4, 8)
SWEEP = {
    128: (3.0, 5.8, 10.1, 15.0),
    1024: (23.8, 45.7, 84.8, 118.3),
    8192: (182.5, 333.3, 546.9, 774.2),
    10240: (227.6, 404.7, 629.1, 800.1),
    20480: (418.6, 663.8, 823.7, 874.8),
    30720: (571.0, 788.1, 859.5, 881.9),
    40960: (680.6, 834.8, 871.9, 885.9),
    61440: (791.8, 868.8, 880.3, 888.0),
    81920: (833.5, 879.5, 883.9, 890.2),
    163840: (878.9, 888.4, 891.0, 884.5),
}


def alive(threads: int = 1024, registers: int = 32) -> Occupancy:
    resources = Resources(
        registers=registers,
        spill_bytes=0,
        stack_bytes=0,
        static_shared_bytes=0,
        dynamic_shared_bytes=0,
        barriers=1,
        threads=threads,
    )
    return occupancy(resources, H200)


def test_the_law_bounds_what_was_measured_and_twice_it_is_enough() -> None:
    need = bytes_in_flight_needed(V100)
    assert V100.sms is not None
    ratios = []
    for threads, rates in SWEEP.items():
        for loads, rate in zip(LOADS, rates, strict=True):
            ratio = threads * 8 * loads / V100.sms / need.bytes_per_sm
            reached = rate * 1e9 / memory_peak(V100).value
            ratios.append(ratio)
            assert reached <= min(1, ratio), (threads, loads)
            if ratio >= MARGIN:
                assert reached > 0.88, (threads, loads)
            if ratio < 1:
                assert reached < 0.75, (threads, loads)
    assert min(ratios) < 0.01
    assert sum(ratio >= MARGIN for ratio in ratios) > 10


def test_the_arithmetic() -> None:
    need = bytes_in_flight_needed(H200, latency_s=353e-9, bytes_per_s=4.8e12)
    assert need.bytes_per_sm == pytest.approx(4.8e12 * 353e-9 / 132)
    full = bytes_in_flight(alive(), H200, bytes_per_thread=16, latency_s=353e-9, bytes_per_s=4.8e12)
    assert full.bytes_per_sm == 64 * 32 * 16
    assert full.ratio == pytest.approx(32768 / 12836, rel=1e-3)
    assert full.verdict == "enough"
    assert full.warps_enough == 51  # 2 x 12836 / 512 = 50.1
    assert full.sentence.startswith("occupancy does not matter here: 51 warps an SM are enough (64 warps x 32 x 16 B")


@pytest.mark.parametrize(
    ("bytes_per_thread", "verdict"), [(2, "short"), (4, "short"), (8, "tight"), (16, "enough"), (64, "enough")]
)
def test_wider_loads_do_the_work_of_warps(bytes_per_thread: int, verdict: str) -> None:
    found = bytes_in_flight(alive(), H200, bytes_per_thread=bytes_per_thread)
    assert found.verdict == verdict
    enough = bytes_in_flight(replace(alive(), warps_per_sm=found.warps_enough), H200, bytes_per_thread=bytes_per_thread)
    assert enough.verdict == "enough"
    one_less = replace(alive(), warps_per_sm=found.warps_enough - 1)
    assert bytes_in_flight(one_less, H200, bytes_per_thread=bytes_per_thread).verdict != "enough"


def test_latencies_are_cited_and_plausible() -> None:
    for known in LATENCIES.values():
        assert 200e-9 < known.seconds < 800e-9
        assert "github.com/te42kyfo/gpu-benches" in known.source
    hopper = latency_of(H200)
    assert hopper is not None
    assert hopper.seconds == pytest.approx(353e-9, rel=0.05)  # benchmarks/h200.json, latency_hbm


def test_what_is_not_known_is_said() -> None:
    b200 = find("b200")
    assert latency_of(b200) is None
    with pytest.raises(BadInput, match=r"memory latency of B200 SXM is not known.*latency_s="):
        bytes_in_flight_needed(b200)
    assert bytes_in_flight_needed(b200, latency_s=500e-9).source == "given"
    with pytest.raises(BadInput, match="no memory bandwidth"):
        bytes_in_flight_needed(replace(H200, memory_bytes_per_s=None, memory_bus_bits=None))
    with pytest.raises(BadInput, match="above 0"):
        bytes_in_flight_needed(H200, latency_s=0)
    with pytest.raises(BadInput, match="at least 1"):
        bytes_in_flight(alive(), H200, bytes_per_thread=0)
    with pytest.raises(BadInput, match="number of SMs"):
        bytes_in_flight_needed(replace(H200, sms=None))
