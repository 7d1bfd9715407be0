"""The memory of a timed run; `timed_test.py` shows that a child maps it."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from sublight.errors import BadInput
from sublight.learn.grade import arena
from sublight.learn.grade.arena import Arena


def test_the_environment_may_name_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublight.learn.grade.gpu_memory.best_way", lambda: "ipc")
    monkeypatch.delenv(arena.WAY, raising=False)
    assert arena._way() == "ipc"
    monkeypatch.setenv(arena.WAY, "descriptor")
    assert arena._way() == "descriptor"
    monkeypatch.setenv(arena.WAY, "file")
    with pytest.raises(BadInput, match="descriptor or ipc"):
        arena._way()


def test_times_say_where_memory_may_be_slower() -> None:
    assert Arena(pages=None, size_bytes=1).method == ""
    assert "CUDA IPC" in Arena(pages=None, size_bytes=1, handle="00").method


def test_a_child_sees_the_same_pages_and_no_descriptor_stays() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours = Arena.on_cpu(5000)
    theirs = arena.opened(ours.order, [os.dup(each) for each in ours.descriptors], "cpu")
    ours.sent()
    ours.poison()
    assert theirs.tolist() == [255] * 5000
    ours.close()
    del ours, theirs
    assert len(os.listdir("/proc/self/fd")) == before
