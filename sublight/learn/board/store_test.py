"""Accounts and entries."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.learn.board.store import Account, Store


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "sqlite":
        return Store(tmp_path / "board.sqlite")
    return Store(request.getfixturevalue("postgres_url"))


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
    if isinstance(store.place, Path):
        assert token not in store.place.read_bytes().decode(errors="replace")
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


def test_what_was_timed_here_comes_before_what_was_not(store: Store) -> None:
    names = ("ann", "bob", "cid")
    timings = (None, {"fraction": 0.5, "seconds": 1.0}, {"fraction": 0.6, "seconds": 1.0})
    for name, timed in zip(names, timings, strict=True):
        number = added(store, account(store, name), name)
        store.finish(number, "verified", fraction=0.99, reason="", verdict={"timed": timed})
    assert [each.account for each in store.ranking("copy", "h200")] == ["cid", "bob", "ann"]


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
        again = Store(store.place)
        again.recover()
        entry = again.entry(number)
        assert entry is not None and entry.state == state
    assert "twice" in entry.reason


def test_a_file_that_is_no_board(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("no database " * 100)
    with pytest.raises(BadInput, match="--db"):
        Store(file)


def test_several_at_once_take_no_entry_twice(store: Store) -> None:
    ann = account(store, "ann")
    numbers = [added(store, ann, str(code)) for code in range(12)]
    with ThreadPoolExecutor(4) as pool:
        taken = [each.id for each in pool.map(lambda _: store.take(), range(14)) if each]
    assert sorted(taken) == numbers


def test_what_was_begun_and_failed_is_not_kept(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store._open() as session:
        session.execute("INSERT INTO accounts (name, token, at) VALUES (?, ?, ?)", ("ann", "t", "now"))
        raise ZeroDivisionError
    store.add_account("ann")


def test_a_zero_byte_in_a_reason_is_kept_as_something(store: Store) -> None:
    number = added(store, account(store, "ann"), "code")
    store.finish(number, "rejected", fraction=None, reason="a\0b", verdict={"text": "\0"})
    entry = store.entry(number)
    assert entry is not None and entry.state == "rejected" and entry.verdict == {"text": "\0"}


def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(BadInput, match=r"postgresql://ann@127.0.0.1:1/board: .*--db") as caught:
        Store("postgresql://ann:secret@127.0.0.1:1/board")
    assert "secret" not in str(caught.value)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(BadInput, match=r"pip install 'sublight\[postgres\]'"):
        Store("postgresql://ann@db.example/board")
