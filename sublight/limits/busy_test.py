"""Figures that were measured beside others are marked, give way to those of a quiet machine, and are measured again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sublight import bench
from sublight.limits import busy, run
from sublight.results import BUSY, Limit, Limits


def stat(path: Path, busy_ticks: int) -> None:
    lines = [f"cpu{number} {busy_ticks} 0 0 999 0 0 0 0" for number in sorted(busy.processors())]
    path.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8", *lines, "intr 3"]))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Machine:
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path))
    return run.Machine(kind="cpu", device="made up", uuid="u", driver="d", gpu=None)


def keep(machine: run.Machine, value: float, share: float, *, quick: bool = True) -> float | None:
    detail = {BUSY: share} if share else {}
    limit = Limit(name="host_copy", unit="B/s", value=value, detail=detail)
    limits = Limits(device="made up", kind="cpu", date="2026-11-15", limits=(limit,))
    run._keep(limits, machine.cache_path, quick=quick)
    cached = run.cached(machine)
    return cached.value("host_copy") if cached else None


@pytest.mark.parametrize(
    ("own", "others", "share"), [(0.0, 2.0, 1.0), (2.0, 0.0, 0.0), (1.0, 0.5, 0.25), (0.0, 99.0, 1.0)]
)
def test_what_others_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: float, others: float, share: float
) -> None:
    """Two seconds, in which each of our processors worked for so long."""
    now = [100.0]
    monkeypatch.setattr(busy, "STAT", tmp_path / "stat")
    monkeypatch.setattr(busy.time, "monotonic", lambda: now[0])
    ticks = busy.os.sysconf("SC_CLK_TCK")
    spent = [0.0]
    monkeypatch.setattr(busy, "_own_s", lambda: spent[0])
    stat(tmp_path / "stat", 7 * ticks)
    watch = busy.Watch()
    now[0] += 2.0
    spent[0] = own * len(busy.processors())
    stat(tmp_path / "stat", 7 * ticks + round((own + others) * ticks))
    assert watch.share() == pytest.approx(share)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(busy, "STAT", tmp_path / "gone")
    assert busy.Watch().share() is None


def test_figures_of_a_quiet_machine_stay_and_come_back(machine: run.Machine) -> None:
    assert keep(machine, 25.0, 0.8) == 25.0  # better than none
    assert keep(machine, 20.0, 0.9) == 25.0
    assert keep(machine, 24.0, 0.0) == 24.0  # quiet: true, though lower
    assert keep(machine, 20.0, 0.8, quick=False) == 24.0
    assert keep(machine, 192.0, 0.5) == 192.0  # so much was reached, whoever else was there


@pytest.mark.parametrize(("quiet", "missing"), [(True, ["host_copy"]), (False, [])])
def test_marked_figures_are_measured_again_when_it_is_quiet(
    machine: run.Machine, monkeypatch: pytest.MonkeyPatch, quiet: bool, missing: list[str]
) -> None:
    keep(machine, 25.0, 0.8)
    monkeypatch.setattr(busy, "is_quiet", lambda: quiet)
    assert bench.missing_limits(machine, ("host_copy",)) == missing
    keep(machine, 30.0, 0.0)
    assert bench.missing_limits(machine, ("host_copy",)) == []


def test_the_host_is_marked_not_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy.Watch, "share", lambda self: 0.5)
    limits = [Limit(name=name, unit="B/s", value=1.0) for name in ("hbm_copy", "launch_eager")]
    assert [bool(limit.detail) for limit in run._marked(limits, "cuda")] == [False, True]
    assert [limit.detail for limit in run._marked(limits, "cpu")] == [{BUSY: 0.5}] * 2
    monkeypatch.setattr(busy.Watch, "share", lambda self: 0.05)
    assert [limit.detail for limit in run._marked(limits, "cpu")] == [{}, {}]


def test_the_cache_knows_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {run.this_machine("cpu", threads=count).cache_path for count in (1, 2, 3)}
    assert len(places) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run.this_machine("cpu") == run.this_machine("cpu", threads=3)
    assert dataclasses.replace(run.this_machine("cpu"), uuid="") == dataclasses.replace(
        run.this_machine("cpu", threads=1), uuid=""
    )
