"""Several ranks: who is waited for, by its work or by coming late, and what of a collective is waiting."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from sublight.diagnose import explain, fakes
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.fakes import Machine
from sublight.diagnose.record import Finding
from sublight.diagnose.rules.exposed_communication import EXPOSED_COMMUNICATION
from sublight.diagnose.rules.rank_imbalance import RANK_IMBALANCE
from sublight.trace.load import load
from sublight.trace.read import chrome_fakes
from sublight.trace.record import Trace

SEND_US = 100.0


def rank(number: int, *, work_us: float = 1000.0, python_us: float = 0.0, last_us: float = 1000.0) -> Trace:
    """Work, then a collective that ends SEND_US after the last rank came to it."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.python(python_us)
            machine.lookups(10, us=work_us / 10, host=4.0)
            wait_us = max(last_us - max(work_us, python_us + work_us / 10), 0.0)
            machine.launch("ncclDevKernel_AllReduce", wait_us + SEND_US, stream=1, after=0)
            machine.free[0] = machine.free[1]
    return machine.trace(rank=number)


def found(rule: object, *traces: Trace) -> Finding | None:
    findings, _ = fakes.findings(fakes.case(*traces), [rule])  # type: ignore[list-item]
    return findings[0] if findings else None


def test_the_rank_with_more_work_is_named() -> None:
    finding = found(RANK_IMBALANCE, rank(0), *(rank(n, work_us=600.0) for n in (1, 2, 3)))
    assert finding is not None
    assert finding.title.startswith("Rank 0 computes 1.00 ms a step, the average rank 700 µs")
    assert finding.saving_s * 1e6 == pytest.approx(300, rel=0.02)


def test_a_rank_that_comes_late_is_named_by_who_waits_least() -> None:
    """All compute as much; rank 2 is held up on its host, and the others wait in the collective."""
    traces = [rank(n, work_us=500.0, last_us=2000.0, python_us=1950.0 if n == 2 else 0.0) for n in range(4)]
    finding = found(RANK_IMBALANCE, *traces)
    assert finding is not None
    assert finding.title.startswith("Rank 2 comes late to the collectives")
    assert finding.saving_s * 1e6 == pytest.approx(1500 * 3 / 4, rel=0.05)


def test_equal_ranks_are_no_finding() -> None:
    assert found(RANK_IMBALANCE, *(rank(n) for n in range(4))) is None


def test_waiting_for_a_slower_rank_is_no_communication_to_hide() -> None:
    """Rank 0 is in the collective for 500 µs, of which it waits 400; alone, nobody can tell."""
    fast, slow = rank(0, work_us=600.0), rank(1)
    alone, together = found(EXPOSED_COMMUNICATION, fast), found(EXPOSED_COMMUNICATION, fast, slow)
    assert alone is not None and alone.saving_s * 1e6 > 300
    assert together is None or together.saving_s * 1e6 <= SEND_US * 1.05


def test_a_folder_of_unequal_ranks(tmp_path: Path) -> None:
    for number, factor in enumerate((1, 3)):
        data = chrome_fakes.trace()
        data["distributedInfo"]["rank"] = number
        for event in data["traceEvents"]:
            if event.get("cat") == "kernel":
                event["dur"] *= factor
        (tmp_path / f"rank{number}.json.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    explanation = explain.explain(load(tmp_path))
    assert contradictions(explanation) == []
    (finding,) = [each for each in explanation.findings if each.id == "rank-imbalance"]
    assert finding.title.startswith("Rank 1 computes") and len(finding.evidence) == 2


def test_ranks_on_cpus_are_held_against_each_other() -> None:
    def on_cpu(number: int, work_us: float) -> Trace:
        machine = Machine()
        for _ in range(4):
            with machine.step():
                machine.work("aten::mm", (1000, 1000), (1000, 1000), us=work_us)
                with machine.range("gloo:all_reduce"):
                    machine.python(3000.0 - work_us)
        return machine.trace(rank=number)

    finding = found(RANK_IMBALANCE, on_cpu(0, 1000.0), on_cpu(1, 2500.0))
    assert finding is not None and finding.title.startswith("Rank 1 computes 2.50 ms")
    assert finding.saving_s * 1e6 == pytest.approx(750, rel=0.02)
    waits = found(EXPOSED_COMMUNICATION, on_cpu(0, 1000.0), on_cpu(1, 2500.0))
    assert waits is not None and waits.saving_s * 1e6 == pytest.approx(500, rel=0.02)  # what rank 1 is in it for
    slow = explain.explain([on_cpu(0, 2500.0), on_cpu(1, 1000.0)], gpu="h200")
    assert slow.fixed_floor_s == pytest.approx(0.7 * slow.floor_s, rel=0.01)  # it keeps 1.75 of 2.5 ms of its work
    unnamed = dataclasses.replace(on_cpu(0, 1000.0), rank=None)
    assert found(RANK_IMBALANCE, unnamed, on_cpu(1, 2500.0)) is not None
