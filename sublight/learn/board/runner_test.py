"""A small load: code that is honest, endless, forks, eats memory, fills the disk, ends its judge, or lies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from sublight.learn.board import processes, runner
from sublight.learn.board.fakes import END_THE_JUDGE
from sublight.learn.board.jail import Way
from sublight.learn.board.runner import Grader, Rules, Runner, Stopped, outcome_of
from sublight.learn.board.store import Account, Entry, Store
from sublight.learn.grade.sandbox import Budget

RULES = Rules(
    budget=Budget(cpu_s=5, wall_s=60, memory_bytes=2**28),
    wall_s=120,
    memory_bytes=150 * 2**20,
    scratch_bytes=8 * 2**20,
)
HOLD = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"  # something stays behind
LOAD = {  # code -> how it ends
    f"{HOLD}print(0.95)": ("verified", ""),
    f"{HOLD}os.fork(); x = b'x' * (80 * 2**20); time.sleep(600)": ("rejected", "of memory in all"),
    f"{HOLD}open('big', 'w').write('x' * 20 * 2**20); time.sleep(600)": ("rejected", "of files"),
    END_THE_JUDGE: ("rejected", "ended the grader"),
    "print(7.0)": ("rejected", "cannot be"),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "board.sqlite")


@pytest.fixture
def ann(store: Store) -> Account:
    account = store.account_of(store.add_account("ann"))
    assert account is not None
    return account


def ended(store: Store, who: Account, codes: Iterable[str], way: Way, folder: Path, rules: Rules) -> dict[str, Entry]:
    """What became of each, once all are graded; nothing is left of the runner."""
    numbers = [store.add_entry(who, "copy", "h200", code, {}, state="queued", reason="")[0] for code in codes]
    folder.mkdir(0o711)
    running = Runner(store, way, folder, graders=1, rules=rules)
    running.start()
    end_s = time.monotonic() + 240
    while store.counts().keys() & {"queued", "running"} and time.monotonic() < end_s:
        time.sleep(0.05)
    running.stop()
    assert not os.listdir(folder) and not processes.below(os.getpid())
    found = [store.entry(number) for number in numbers]
    return {entry.source: entry for entry in found if entry is not None}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRADER", "sublight.learn.board.fakes")


def test_every_entry_is_accounted_for_and_nothing_is_left(
    way: Way, home: Path, store: Store, ann: Account, stand_in: None
) -> None:
    found = ended(store, ann, LOAD, way, home / "load", RULES)
    assert {code: entry.state for code, entry in found.items()} == {code: state for code, (state, _) in LOAD.items()}
    assert [(code, found[code].reason) for code in LOAD if LOAD[code][1] not in found[code].reason] == []
    assert [entry.fraction for entry in store.ranking("copy", "h200")] == [0.95]


def test_what_never_ends_is_ended(way: Way, home: Path, store: Store, ann: Account, stand_in: None) -> None:
    code = f"{HOLD}time.sleep(600)"
    found = ended(store, ann, [code], way, home / "endless", replace(RULES, wall_s=0.5))
    assert found[code].state == "rejected" and "more than 0.5 s in all" in found[code].reason


def test_a_server_that_ends_puts_back_what_it_ran(
    way: Way, home: Path, store: Store, ann: Account, stand_in: None
) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        Grader(way, 0, home, RULES, stop)
    number, _ = store.add_entry(ann, "copy", "h200", "x", {}, state="queued", reason="")
    assert store.take()
    store.put_back(number)
    entry = store.entry(number)
    assert entry is not None and entry.state == "queued"
    assert not processes.below(os.getpid())


def test_a_grader_that_cannot_start_leaves_entries_unranked(store: Store, ann: Account, tmp_path: Path) -> None:
    running = Runner(store, "namespaces", tmp_path / "no folder", graders=1)
    number, _ = store.add_entry(ann, "copy", "h200", "x", {}, state="queued", reason="")
    running.start()
    end_s = time.monotonic() + 60
    while store.counts().keys() & {"queued", "running"} and time.monotonic() < end_s:
        time.sleep(0.02)
    running.stop()
    entry = store.entry(number)
    assert entry is not None and entry.state == "not_rerun" and "could not run it" in entry.reason


@pytest.mark.parametrize("fraction", [None, 1.03, 0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_figure_that_cannot_be_is_not_ranked(fraction: object) -> None:
    verdict = {"passed": True, "fraction_predicted": fraction, "faults": [], "cases": [], "kernels": [], "notes": []}
    found = outcome_of({**verdict, "gpu": "h200", "goal": None})
    assert found.state == "rejected" and found.fraction is None
