"""Accounts and entries in a database. Every entry is in exactly one state, from its first moment on."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sublight.errors import BadInput
from sublight.learn.board.database import database_of

State = Literal[
    "queued",
    "running",
    "verified",  # the server has run it, and it has passed: it is ranked
    "rejected",  # the server has run it, and it has not passed, or it broke a limit
    "not_rerun",  # the server could not run it: what the sender says of it is shown as such
]
TRIES = 2  # of an entry whose grader died
NAME = re.compile(r"[\w.-]{1,40}", re.ASCII)
_TABLES = """
CREATE TABLE IF NOT EXISTS accounts (id {number}, name TEXT UNIQUE NOT NULL, token TEXT UNIQUE NOT NULL,
    at TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (id {number}, account BIGINT NOT NULL REFERENCES accounts (id),
    exercise TEXT NOT NULL, gpu TEXT NOT NULL, source TEXT NOT NULL, code_hash TEXT NOT NULL, claim TEXT NOT NULL,
    at TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'queued', tries INTEGER NOT NULL DEFAULT 0, fraction DOUBLE PRECISION,
    reason TEXT NOT NULL DEFAULT '', verdict TEXT NOT NULL DEFAULT '{{}}', graded_at TEXT,
    UNIQUE (account, exercise, gpu, code_hash));
CREATE INDEX IF NOT EXISTS by_state ON entries (state, id);
CREATE INDEX IF NOT EXISTS by_exercise ON entries (exercise, gpu, state, fraction);
"""
_COLUMNS = (
    "entries.id, accounts.name, exercise, gpu, source, code_hash, claim, entries.at, state, fraction, reason, verdict"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    id: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One submission; `claim` is what its sender says: machine, versions, fraction."""

    id: int
    account: str
    exercise: str
    gpu: str
    source: str
    code_hash: str
    claim: dict[str, Any]
    at: str
    state: State
    fraction: float | None  # by the server's own run: what its code allows
    reason: str
    verdict: dict[str, Any]

    @property
    def timed(self) -> dict[str, Any] | None:
        """Seconds and fraction on the server's own GPU; None where it could not be timed there."""
        return self.verdict.get("timed")

    @property
    def rank(self) -> tuple[bool, float, int]:
        """The smallest is the first: what was timed here before what was not, the higher fraction, then the older."""
        fraction = self.timed["fraction"] if self.timed else self.fraction or 0.0
        return (self.timed is None, -fraction, self.id)

    def to_json(self) -> dict[str, Any]:
        """Without the code and without what the check says of it, which only some may see."""
        names = ("id", "account", "exercise", "gpu", "code_hash", "claim", "at", "state", "fraction", "timed", "reason")
        return {name: getattr(self, name) for name in names}


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadInput(f"{name!r} is no name: use 1 to 40 letters, digits, dots, dashes")


class Store:
    """The board's rows, in a SQLite file or in PostgreSQL by URL; requests and graders come from several threads."""

    def __init__(self, place: str | Path) -> None:
        self.place = place
        database = database_of(place)
        database.prepare(_TABLES.format(number=database.number))
        self._open = database.transaction

    # ------------------------------------------------------------------------------------------------ accounts

    def add_account(self, name: str) -> str:
        """Make an account; returns its token, of which only a hash is kept."""
        check_name(name)
        token = secrets.token_urlsafe(24)
        with self._open() as connection:
            if connection.execute("SELECT 1 FROM accounts WHERE name = ?", (name,)).fetchone():
                raise BadInput(f"there is a {name} already: choose another name")
            row = (name, _hash(token), _now())
            connection.execute("INSERT INTO accounts (name, token, at) VALUES (?, ?, ?)", row)
        return token

    def account_of(self, token: str) -> Account | None:
        with self._open() as connection:
            row = connection.execute("SELECT id, name FROM accounts WHERE token = ?", (_hash(token),)).fetchone()
        return Account(id=row[0], name=row[1]) if row else None

    # ------------------------------------------------------------------------------------------------ entries

    def add_entry(
        self,
        account: Account,
        exercise: str,
        gpu: str,
        source: str,
        claim: dict[str, Any],
        *,
        state: State,
        reason: str,
    ) -> tuple[int, bool]:
        """Add an entry; returns its number and whether it is new: the same code by the same person is one entry."""
        digest = hashlib.sha256(source.encode()).hexdigest()
        key = (account.id, exercise, gpu, digest)
        with self._open() as connection:
            query = "SELECT id FROM entries WHERE account = ? AND exercise = ? AND gpu = ? AND code_hash = ?"
            if row := connection.execute(query, key).fetchone():
                return int(row[0]), False
            (number,) = connection.execute(
                "INSERT INTO entries (account, exercise, gpu, code_hash, source, claim, at, state, reason) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
                (*key, source, json.dumps(claim), _now(), state, reason),
            ).fetchone()
            return int(number), True

    def recent(self, account: Account, seconds: float) -> tuple[int, int]:
        """How many entries an account made lately, and how many of its entries wait."""
        since = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)).isoformat(
            timespec="microseconds"
        )
        with self._open() as connection:
            made = connection.execute(
                "SELECT COUNT(*) FROM entries WHERE account = ? AND at > ?", (account.id, since)
            ).fetchone()[0]
            waiting = connection.execute(
                "SELECT COUNT(*) FROM entries WHERE account = ? AND state IN ('queued', 'running')", (account.id,)
            ).fetchone()[0]
        return int(made), int(waiting)

    def take(self) -> Entry | None:
        """The oldest that waits, which is now running; of people who have none running first."""
        with self._open() as connection:
            row = connection.execute(
                "SELECT id FROM entries WHERE state = 'queued' ORDER BY account IN "
                "(SELECT account FROM entries WHERE state = 'running'), id LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            connection.execute("UPDATE entries SET state = 'running', tries = tries + 1 WHERE id = ?", row)
        return self.entry(int(row[0]))

    def finish(self, entry: int, state: State, *, fraction: float | None, reason: str, verdict: dict[str, Any]) -> None:
        with self._open() as connection:
            connection.execute(
                "UPDATE entries SET state = ?, fraction = ?, reason = ?, verdict = ?, graded_at = ? WHERE id = ?",
                (state, fraction, reason, json.dumps(verdict), _now(), entry),
            )

    def put_back(self, entry: int) -> None:
        """Let an entry wait again, since the server ended while it ran."""
        with self._open() as connection:
            connection.execute("UPDATE entries SET state = 'queued', tries = tries - 1 WHERE id = ?", (entry,))

    def recover(self) -> int:
        """After a crash: what was running waits again, unless it was tried often enough; how many there were."""
        with self._open() as connection:
            connection.execute(
                "UPDATE entries SET state = 'rejected', reason = 'the server ended while it ran, twice', graded_at = ? "
                "WHERE state = 'running' AND tries >= ?",
                (_now(), TRIES),
            )
            done = connection.execute("UPDATE entries SET state = 'queued' WHERE state = 'running'")
            return int(done.rowcount)

    def entry(self, number: int) -> Entry | None:
        found = self._entries("entries.id = ?", (number,))
        return found[0] if found else None

    def ranking(self, exercise: str, gpu: str) -> list[Entry]:
        """The best verified entry of each account, the best first."""
        best: dict[str, Entry] = {}
        entries = self._entries("exercise = ? AND gpu = ? AND state = 'verified'", (exercise, gpu))
        for entry in sorted(entries, key=lambda each: each.rank):
            best.setdefault(entry.account, entry)
        return list(best.values())

    def unranked(self, exercise: str, gpu: str, most: int = 50) -> list[Entry]:
        """The latest that the server could not run."""
        where = "exercise = ? AND gpu = ? AND state = 'not_rerun' ORDER BY entries.id DESC LIMIT ?"
        return self._entries(where, (exercise, gpu, most))

    def has_passed(self, account: Account, exercise: str) -> bool:
        """Whether an exercise was passed in the server's own run."""
        query = "SELECT 1 FROM entries WHERE account = ? AND exercise = ? AND state = 'verified'"
        with self._open() as connection:
            return connection.execute(query, (account.id, exercise)).fetchone() is not None

    def gpus(self, exercise: str) -> list[str]:
        with self._open() as connection:
            query = "SELECT gpu FROM entries WHERE exercise = ? GROUP BY gpu ORDER BY COUNT(*) DESC, gpu"
            return [row[0] for row in connection.execute(query, (exercise,))]

    def counts(self, exercise: str = "") -> dict[str, int]:
        """Entries by state."""
        with self._open() as connection:
            query = "SELECT state, COUNT(*) FROM entries WHERE ? IN ('', exercise) GROUP BY state"
            return dict(connection.execute(query, (exercise,)).fetchall())

    def _entries(self, where: str, values: tuple[Any, ...]) -> list[Entry]:
        names = [each.name for each in fields(Entry)]
        with self._open() as connection:
            query = f"SELECT {_COLUMNS} FROM entries JOIN accounts ON accounts.id = account WHERE {where}"
            rows = [dict(zip(names, row, strict=True)) for row in connection.execute(query, values)]
        return [
            Entry(**{**row, "claim": json.loads(row["claim"]), "verdict": json.loads(row["verdict"])}) for row in rows
        ]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()  # of 192 random bits: no salt is needed


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
