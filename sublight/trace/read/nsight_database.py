"""An SQLite file of any schema and any soundness, read a table at a time into columns: what cannot be read is noted."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from sublight.errors import BadInput
from sublight.trace.record import NONE, Ints

MAGIC = b"SQLite format 3\x00"
CHUNK_ROWS = 65_536  # as Python objects at one time: the rest of a table is already in arrays
DAMAGE = (sqlite3.Error, ValueError)  # the second: a message or a name in a damaged file that is no text
LEAST_ROW_BYTES = 4  # a damaged file may name a page twice; a table of more rows than fit is one that goes in circles


class Database:
    """The tables of a file; every one of them and every column may be missing. Close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        self._most_rows = _size_bytes(path) // LEAST_ROW_BYTES
        self._connection, self.lost = _open(path)
        try:
            rows = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            self.columns: Mapping[str, frozenset[str]] = {
                name: frozenset(row[1] for row in self._connection.execute(f"PRAGMA table_info({_quoted(name)})"))
                for (name,) in rows
                if isinstance(name, str)
            }
        except DAMAGE as error:
            self._connection.close()
            raise BadInput(f"{path} cannot be read: {_why(error)}") from None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def integers(self, table: str, *columns: str) -> dict[str, Ints]:
        """The columns of a table, in order of the file; NONE where the value, or the whole column, is not there."""
        return self.read(table, columns, ())[0]

    def texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """The texts of a table by an integer."""
        numbers, words = self.read(table, (key,), (value,))
        return {number: word for number, word in zip(numbers[key].tolist(), words[value], strict=True) if word}

    def read(
        self, table: str, integers: Sequence[str], texts: Sequence[str], where: str = ""
    ) -> tuple[dict[str, Ints], dict[str, list[str]]]:
        """Columns of integers, and of texts: "" where there is none. `where` is applied to a table that is there."""
        chunks: list[Ints] = [np.empty((0, len(integers)), dtype=np.int64)]
        words: list[tuple[str, ...]] = []
        count = 0
        if table in self.columns:
            there = self.columns[table]
            fields = [_value(name, there, "integer", str(NONE)) for name in integers]
            fields += [_value(name, there, "text", "''") for name in texts]
            rows: list[tuple[int | str, ...]] = []
            try:
                cursor = self._connection.execute(f"SELECT {', '.join(fields)} FROM {_quoted(table)} {where}")
                while count <= self._most_rows:
                    rows = []
                    rows.extend(itertools.islice(cursor, CHUNK_ROWS))  # keeps what came before an error
                    if not rows:
                        break
                    count += _store(rows, len(integers), chunks, words)
                else:
                    self.lost.append(f"{table} goes in circles: the file is damaged.")
            except DAMAGE as error:
                count += _store(rows, len(integers), chunks, words)
                self.lost.append(f"{table} could be read up to its row {count} only: {_why(error)}.")
        matrix = np.concatenate(chunks)
        columns = {name: np.ascontiguousarray(matrix[:, at]) for at, name in enumerate(integers)}
        return columns, {name: [row[at] for row in words] for at, name in enumerate(texts)}


def _store(rows: Sequence[tuple[int | str, ...]], width: int, chunks: list[Ints], words: list[tuple[str, ...]]) -> int:
    chunks.append(np.array([row[:width] for row in rows], dtype=np.int64).reshape(len(rows), width))
    words.extend(row[width:] for row in rows)  # type: ignore[misc]  # the query made them texts
    return len(rows)


def _value(name: str, there: frozenset[str], kind: str, otherwise: str) -> str:
    """An expression that is of this type in every row, whatever a file's cells hold."""
    if name not in there:
        return otherwise
    return f"CASE typeof({_quoted(name)}) WHEN '{kind}' THEN {_quoted(name)} ELSE {otherwise} END"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _size_bytes(path: Path) -> int:
    """The size of a file, which must begin as an SQLite database does."""
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    if head != MAGIC:
        raise BadInput(f"{path} is not an SQLite file: export the report with `nsys export --type sqlite`")
    return size


def _open(path: Path) -> tuple[sqlite3.Connection, list[str]]:
    """Read-only, and what is to be said of the file.

    Where a lock or shared memory cannot be made (a folder that is read-only), as a file at rest; where the file is cut
    off, with SQLite's pardon, which it gives to those who may write its schema (nobody writes here).
    """
    why = ""
    for how, pardon in (("mode=ro", False), ("immutable=1", False), ("immutable=1", True)):
        try:
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)
        except DAMAGE as error:
            why = why or _why(error)
            continue
        try:
            connection.execute("PRAGMA cell_size_check = ON")  # finds damage before it is read as data
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute(f"PRAGMA writable_schema = {'ON' if pardon else 'OFF'}")
            connection.text_factory = _text
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection, ["The file is cut off or damaged: what is whole of it was read."] if pardon else []
        except DAMAGE as error:
            why = why or _why(error)
            connection.close()
    raise BadInput(f"{path} cannot be read: {why}")


def _why(error: Exception) -> str:
    """SQLite's error as one line: it quotes what it could not understand."""
    return " ".join(str(error).split()) if isinstance(error, sqlite3.Error) else "the file is damaged"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
