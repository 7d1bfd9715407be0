"""Accounts and entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.learn.board.store import Account, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "board.sqlite")


def account(store: Store, name: str) -> Account:
    found = store.account_of(store.add_account(name))
    assert found is not None
    return found


def added(store: Store, who: Account, code: str, fraction: float | None = None) -> int:
    number, _ = store.add_entry(who, "copy", "h200", code, {"machine": "m"}, state="queued", reason="")
    if fraction:
        store.finish(number, "verified", fraction=fraction, reason="", verdict={})
    return number


def test_tokens_are_kept_as_hashes(store: Store) -> None:
    token = store.add_account("ann")
    found = store.account_of(token)
    assert found is not None and found.name == "ann" and store.account_of("other") is None
    assert token not in store.file.read_bytes().decode(errors="replace")
    for name in ("ann", "", "<b>", "a" * 41, "é"):
        with pytest.raises(BadInput):
            store.add_account(name)


def test_the_same_code_is_one_entry(store: Store) -> None:
    ann, bob = account(store, "ann"), account(store, "bob")
    first = added(store, ann, "code")
    assert store.add_entry(ann, "copy", "h200", "code", {}, state="queued", reason="") == (first, False)
    assert added(store, bob, "code") != first and store.counts() == {"queued": 2}
    assert store.recent(ann, 3600) == (1, 1) and store.recent(ann, -1) == (0, 1)


def test_the_ranking_has_the_best_of_each(store: Store) -> None:
    ann, bob = account(store, "ann"), account(store, "bob")
    for who, code, fraction in ((ann, "a", 0.9), (bob, "b", 0.95), (ann, "c", 0.95), (ann, "d", 0.92)):
        added(store, who, code, fraction)
    added(store, bob, "waits")
    rejected = added(store, bob, "wrong")
    store.finish(rejected, "rejected", fraction=None, reason="wrong", verdict={})
    assert [(each.account, each.source, each.fraction) for each in store.ranking("copy", "h200")] == [
        ("bob", "b", 0.95),
        ("ann", "c", 0.95),
    ]
    assert store.ranking("copy", "a100") == [] and store.gpus("copy") == ["h200"]
    assert store.has_passed(bob, "copy") and not store.has_passed(bob, "add")


def test_nobody_waits_behind_one_who_sends_much(store: Store) -> None:
    ann, bob = account(store, "ann"), account(store, "bob")
    for code in ("1", "2", "3"):
        added(store, ann, code)
    added(store, bob, "4")
    taken = [store.take() for _ in range(4)]
    assert [each.source for each in taken if each] == ["1", "4", "2", "3"] and store.take() is None


def test_after_a_crash_an_entry_is_tried_once_more(store: Store) -> None:
    number = added(store, account(store, "ann"), "code")
    for state in ("queued", "rejected"):
        assert store.take()
        again = Store(store.file)
        again.recover()
        entry = again.entry(number)
        assert entry is not None and entry.state == state
    assert "twice" in entry.reason


def test_a_file_that_is_no_board(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("no database " * 100)
    with pytest.raises(BadInput, match="--db"):
        Store(file)
