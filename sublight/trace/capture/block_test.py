"""`profile`, `step` and `range` in a user's own code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from sublight.errors import BadInput
from sublight.trace.capture import profile as capture


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def _block(steps: int, mark: bool) -> None:
    weight = torch.randn(16, 16)
    for _ in range(steps):
        weight = (weight @ weight).tanh()
        if mark:
            capture.step()


def test_a_block_of_code() -> None:
    with capture.profile(warmup=1, timed=2, profiled=2) as p:
        _block(60, mark=True)
    assert p.captured is not None and p.captured.steps_from == "sublight.step() calls"
    assert p.trace is not None and sum(name.startswith("ProfilerStep#") for name in p.trace.names) == 2
    with pytest.raises(KeyError), capture.profile() as q:
        _block(2, mark=False)
        raise KeyError
    assert q.captured is not None and isinstance(q.captured.error, KeyError) and "aten::tanh" in q.trace.names
    with capture.profile(), pytest.raises(BadInput, match="already under way"), capture.profile():
        pass
    with pytest.raises(BadInput, match="unexpected keyword argument 'steps'"):
        capture.profile(steps=3)
    capture.step()  # nothing captures: nothing happens


def test_ranges_are_in_the_trace() -> None:
    @capture.range("whole function")
    def function() -> None:
        with capture.range("part"):
            torch.ones(2) + 1

    with capture.profile() as p:
        function()
        function()
    rows = [p.trace.name_of(row) for row in p.trace.rows_named(lambda name: name in ("part", "whole function"))]
    assert rows == ["whole function", "part"] * 2


def test_marks_cost_nothing_without_torch() -> None:
    code = (
        "import sys\nfrom sublight.trace.capture import profile\nprofile.step()\n"
        "with profile.range('a'): pass\n@profile.range('b')\ndef f(): return 5\n"
        "assert f() == 5 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
