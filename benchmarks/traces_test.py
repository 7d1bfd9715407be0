"""The generator gives the same trace for a seed, one that loads and makes sense; and explaining it does not grow."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import pytest

from benchmarks import traces
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.explain import explain
from sublight.trace import cut, steps
from sublight.trace.load import load
from sublight.trace.record import Kind

MB = 1_000_000


def test_a_seed_gives_one_trace_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    assert traces.write(first, 2 * MB, seed=1) == traces.write(second, 2 * MB, seed=1)
    traces.write(other, 2 * MB, seed=2)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert 2 * MB <= first.stat().st_size < 3.2 * MB  # whole steps


def test_it_is_a_training_step_with_hundreds_of_kernels(tmp_path: Path) -> None:
    steps = traces.write(tmp_path / "a.json", 4 * MB)
    (trace,) = load(tmp_path / "a.json")
    assert trace.lost == () and steps > 3
    kernels = len(trace.of_kind(Kind.KERNEL)) / steps
    assert 400 < kernels < 1000
    found = explain([trace])
    assert contradictions(found) == [] and found.steps == steps
    assert {row.family for row in found.ops} >= {"matmul", "pointwise", "norm", "dropout"}


def calls(path: Path) -> tuple[int, int]:
    """Functions called to load a trace, and to explain it: what the machine does besides does not matter."""
    counts = []
    profile = cProfile.Profile()
    made = profile.runcall(load, path)
    counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    profile = cProfile.Profile()
    profile.runcall(explain, made)
    counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    return counts[0], counts[1]


def test_a_longer_trace_is_read_longer_and_explained_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "MOST_ROWS", 8_000)
    monkeypatch.setattr(cut.typical, "__defaults__", (8_000,))
    traces.write(tmp_path / "short.json", 5 * MB)
    traces.write(tmp_path / "long.json", 20 * MB)
    (short_load, short), (long_load, long) = calls(tmp_path / "short.json"), calls(tmp_path / "long.json")
    assert long_load < 5 * short_load
    assert long < 1.3 * short


def test_the_steps_that_are_explained_are_typical(tmp_path: Path) -> None:
    traces.write(tmp_path / "a.json", 10 * MB)
    (trace,) = load(tmp_path / "a.json")
    found = steps.find(trace)
    chosen = cut.typical(trace, found, 8_000)
    assert cut.LEAST_STEPS <= chosen.count < found.count
    mean = [sum(end - start for start, end in each.spans_ns) / each.count for each in (found, chosen)]
    assert mean[1] == pytest.approx(mean[0], rel=0.02)
    part = cut.cut(trace, chosen.spans_ns[0][0], chosen.spans_ns[-1][1])
    whole, some = explain([trace]), explain([part])
    assert len(part) < 0.6 * len(trace)
    assert some.step_s == pytest.approx(whole.step_s, rel=0.02) and some.verdict == whole.verdict
    for name, seconds in whole.breakdown.items():
        assert some.breakdown[name] == pytest.approx(seconds, abs=0.02 * whole.step_s), name
