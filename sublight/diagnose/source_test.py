"""The user's lines behind a finding: the file's own text, what it could be, and nothing that is not sure."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from sublight.diagnose import source
from sublight.diagnose.explain import explain
from sublight.diagnose.fakes import Machine
from sublight.trace.attribute import attribute
from sublight.trace.record import Kind, Trace

SCRIPT = """\
for step in range(10):
    loss = model(x)
    total += loss.item()
    loss.backward()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def traced() -> Trace:
    """Two steps with an .item() at line 3 of train.py each."""
    machine = Machine()
    for _ in range(2):
        with machine.step():
            machine.lookups(10)
            with machine.range("train.py(3): <module>", Kind.PYTHON):
                machine.item()
            machine.python(90.0)
    return machine.trace()


def found(trace: Trace, finding: str = "host-sync") -> tuple[source.SourceLine, ...]:
    rows = np.sort(trace.rows_named(lambda name: name == "cudaStreamSynchronize"))
    return source.lines(attribute(trace), rows, 2, finding)


def test_the_line_and_those_around_it(script: Path) -> None:
    (line,) = found(traced())
    assert (line.place, line.number, line.count) == ("train.py:3", 3, 1.0)
    assert line.before == "    total += loss.item()" and line.after == "    total += loss.detach()"
    assert line.above == ("    loss = model(x)",) and line.below == ("    loss.backward()",)


def test_where_more_than_a_word_must_change_there_is_no_other_line(script: Path) -> None:
    assert found(traced(), "host-bound")[0].after == ""


def test_a_file_that_is_not_here_leaves_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = found(traced())
    assert line.place == "train.py:3" and not line.before and not line.after


def test_a_file_that_was_changed_since_is_not_shown(script: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "trace.json"
    recorded.write_text("{}")
    trace = dataclasses.replace(traced(), source=str(recorded))
    os.utime(script, (1, 1))
    assert found(trace)[0].before
    os.utime(recorded, (0, 0))
    assert not found(trace)[0].before


@pytest.mark.parametrize(("way", "after"), [("HtoD", "x = x.to(there, non_blocking=True)"), ("DtoH", "")])
def test_a_copy_back_goes_on_waiting(script: Path, way: str, after: str) -> None:
    """Without the wait, what reads the result would read it too early."""
    script.write_text("x = x.to(there)\n")
    machine = Machine()
    for _ in range(2):
        with machine.step(), machine.range("train.py(1): <module>", Kind.PYTHON):
            machine.copy(900.0, 10_000_000, way=way, blocking=True)
    trace = machine.trace()
    (line,) = source.lines(attribute(trace), trace.device_rows, 2, "pageable-copy")
    assert line.before == "x = x.to(there)" and line.after == after


def test_an_explanation_carries_them(script: Path) -> None:
    (finding,) = [each for each in explain([traced()]).findings if each.id == "host-sync"]
    assert finding.sources[0].place == "train.py:3"
    assert finding.to_json()["sources"] == [{"place": "train.py:3", "count": 1.0, "share": ""}]
