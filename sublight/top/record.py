"""A session in a file: one line of JSON a snapshot, so that what was written before a crash can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sublight.errors import BadInput, refuse_device
from sublight.health.record import Snapshot, from_json, to_json

HEAD = {"format": "sublight top", "version": 1}


class Writer:
    """Appends each snapshot at once."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}; name another file") from None
        self._line(HEAD)

    def add(self, snapshot: Snapshot) -> None:
        self._line(to_json(snapshot))

    def close(self) -> None:
        self._file.close()

    def _line(self, data: object) -> None:
        self._file.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def read(path: Path) -> list[Snapshot]:
    """All of a session; a last line that was cut off is left out."""
    refuse_device(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no session: make one with `sublight top --record FILE`") from None
    snapshots = list(_snapshots(path, lines))
    if not snapshots:
        raise BadInput(f"{path} holds no snapshot: record for longer")
    return snapshots


def _snapshots(path: Path, lines: list[str]) -> Iterator[Snapshot]:
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if number == 1:
                if data != HEAD:
                    raise ValueError("another format")
                continue
            yield from_json(Snapshot, data)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number == len(lines) > 1 and isinstance(error, json.JSONDecodeError):
                return  # whoever wrote it was stopped in the middle of a line
            if number == 1:
                raise BadInput(f"{path} is no session: make one with `sublight top --record FILE`") from None
            raise BadInput(f"{path}, line {number}: {str(error)[:80]}: another version of sublight wrote it") from None
