"""Ranks meet, wait for each other with a limit, and take no other run's traces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sublight.cli import ranks
from sublight.cli.interrupt_test import PACKAGE
from sublight.cli.ranks import Rank, this_rank
from sublight.diagnose import fakes
from sublight.results import write_json

RUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize("change", [{"RANK": ""}, {"WORLD_SIZE": "1"}, {"RANK": "2"}, {"RANK": "-1"}])
def test_one_process_is_no_rank(tmp_path: Path, change: dict[str, str]) -> None:
    assert this_rank(str(tmp_path), {**RUN, **change}) is None
    assert this_rank(str(tmp_path), {}) is None


def test_ranks_of_a_run_meet_and_others_do_not(tmp_path: Path) -> None:
    one, other = (this_rank(str(tmp_path), {**RUN, "RANK": number}) for number in "01")
    assert one is not None and other is not None and one.folder == other.folder and one.is_first
    restarted = this_rank(str(tmp_path), {**RUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted is not None and restarted.folder != one.folder


def wait(rank: Rank, seen: list[list[int]] | None = None, wait_s: float = 0.0) -> dict[int, str]:
    return rank.wait(waiting=(seen if seen is not None else []).append, wait_s=wait_s)


def test_what_became_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    monkeypatch.setattr(ranks, "is_alive", lambda process: process == os.getpid())
    first, *others = (Rank(number=number, world=6, folder=tmp_path / "meeting") for number in range(6))
    for rank in (first, *others[:4]):
        rank.begin()
    (tmp_path / "trace.json").write_text("{}")
    others[0].end(tmp_path / "trace.json")
    others[1].end(None, "the script ran no torch op")
    others[2].file("pid").write_text(f"{__import__('socket').gethostname()} 1")
    seen: list[list[int]] = []
    assert wait(first, seen) == {
        2: "the script ran no torch op",
        3: "it died",
        4: "it was not done 0 s after rank 0",
        5: "nothing was heard of it: it ran on another machine, or died at once",
    }
    assert list(first.traces()) == [1] and first.traces()[1].read_text() == "{}"
    (first.folder / "somebody's.txt").write_text("stays")
    first.remove()
    assert [file.name for file in first.folder.iterdir()] == ["somebody's.txt"]


def test_a_trace_of_another_run_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    old = Rank(number=1, world=2, folder=tmp_path)
    old.begin()
    (tmp_path / "trace").write_text("old")
    old.end(tmp_path / "trace")
    first = Rank(number=0, world=2, folder=tmp_path, since_s=time.time() + 3600)
    assert list(wait(first)) == [1] and first.traces() == {}
    Rank(number=1, world=2, folder=tmp_path).begin()  # it begins again, and has no trace yet
    assert not old.file("json").exists()


def test_who_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (Rank(number=number, world=2, folder=tmp_path) for number in range(2))
    other.begin()
    seen: list[list[int]] = []

    def ends(ranks: list[int]) -> None:
        seen.append(ranks)
        other.end(None, "done")

    assert first.wait(waiting=ends) == {1: "done"} and seen == [[1]]


DISTRIBUTED = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

main()
"""


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    write_json(fakes.limits("cpu").to_json(), tmp_path / "limits.json")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sublight", "explain"]
    words += ["--limits", "limits.json", "--json", "found.json", "--trace", "kept.json.gz", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    both = {f"explain-train.rank{n}.html" for n in (0, 1)} | {f"found.rank{n}.json" for n in (0, 1)}
    kept = {f"kept.rank{n}.json.gz" for n in (0, 1)}
    assert {file.name for file in tmp_path.iterdir()} == both | kept | {
        "train.py",
        "limits.json",
        "found.json",
        "explain-train.html",
    }
    assert done.stdout.count("Ops by device time") == 1 and "2 ranks were read" in done.stdout
