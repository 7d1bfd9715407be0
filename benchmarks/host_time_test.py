"""The bars of host time are judged as they are written: planted rows on either side of each."""

from __future__ import annotations

import pytest

from benchmarks import host_time
from sublight.results import Result


def row(provider: str, host_us: float | None, device_us: float, direction: str = "fwd", ours: bool = False) -> Result:
    return Result(
        op="softmax",
        direction=direction,
        shape={"rows": 16, "cols": 4096},
        dtype="bfloat16",
        provider=provider,
        ours=ours,
        call_s=None if host_us is None else host_us * 1e-6,
        median_s=device_us * 1e-6,
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "direction", "misses"),
    [
        ((9.0, 3.0), (10.0, 5.0), "fwd", ""),
        ((11.4, 3.0), (10.0, 5.0), "fwd", ""),  # 14 % more, but within 1.5 µs
        ((11.6, 3.0), (10.0, 5.0), "fwd", "1.05 x"),
        ((90.0, 112.0), (100.0, 98.0), "bwd", "1.05 x"),  # the device decides
        ((16.0, 20.0), (10.0, 40.0), "fwd", "host 1.5 x"),
        ((16.0, 20.0), (10.0, 40.0), "bwd", ""),
        ((19.0, 20.0), (10.0, 40.0), "fwd+bwd", "host 1.8 x"),
    ],
)
def test_each_bar(ours: tuple[float, float], theirs: tuple[float, float], direction: str, misses: str) -> None:
    (pair,) = host_time.pairs([row("sublight", *ours, direction, ours=True), row("torch", *theirs, direction)])
    assert pair.misses == misses


def test_where_pytorch_runs_the_host_has_the_first_bar_alone() -> None:
    (pair,) = host_time.pairs([row("sublight", 16.0, 20.0), row("torch", 10.0, 40.0)])
    assert pair.misses == ""


def test_a_row_without_a_host_time_is_in_no_pair() -> None:
    assert host_time.pairs([row("sublight", None, 20.0), row("torch", 10.0, 40.0)]) == []
    assert host_time.pairs([row("sublight", 10.0, 20.0), row("liger", 10.0, 40.0)]) == []


def test_what_misses_a_bar_is_measured_first() -> None:
    def pair(host_us: float, device_us: float) -> object:
        return host_time.Pair(ours=row("sublight", host_us, device_us), theirs=row("torch", 10.0, 10.0))

    missed, hosted, device = pair(20.0, 3.0), pair(8.0, 3.0), pair(4.0, 9.0)
    assert host_time.in_order([device, hosted, missed]) == [missed, hosted, device]


def test_the_committed_results_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_time.main([]) == 0
    assert " cases: " in capsys.readouterr().out
