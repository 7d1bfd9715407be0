"""A script in a process of its own: timed and compared, and what goes wrong there is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublight.fix.cure.run import run

pytest.importorskip("torch")
TRAIN = """\
import sys
import torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if len(sys.argv) > 2 and step > 3 and optimizer.param_groups[0]["fused"]:
        raise ValueError("it is fused")
open("end", "w")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_a_run_is_timed_compared_and_ended(here: Path) -> None:
    first = run("train.py", ["100000"], [], module=False, folder=str(here))
    again = run("train", ["100000"], ["fused optimizer"], module=True, folder=str(here))
    assert first.error == again.error == "" and not (here / "end").exists()
    assert first.step_s is not None and 0 < first.step_s < 1 and first.steps_from == "optimizer steps"
    assert first.figures_of == "losses" and first.figures == pytest.approx(again.figures)  # it sets no seed: we do
    assert again.did == {"fused optimizer": "SGD: fused=True"}
    assert [(Path(edit.file).name, edit.line) for edit in again.edits] == [("train.py", 4)]


def test_a_script_that_fails_under_a_cure(here: Path) -> None:
    outcome = run("train.py", ["100", "fails"], ["fused optimizer"], module=False, folder=str(here))
    assert outcome.step_s is None and outcome.error == "ValueError: it is fused"


def test_a_script_that_ends_too_early(here: Path) -> None:
    outcome = run("train.py", ["4"], [], module=False, folder=str(here))
    assert outcome.step_s is None and "too few to time" in outcome.error


def test_a_process_that_does_not_come_to_the_script(here: Path) -> None:
    outcome = run("gone.py", [], [], module=False, folder=str(here))
    assert outcome.step_s is None and "gone.py" in outcome.error
