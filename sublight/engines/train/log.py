"""The log: a JSON object a line, a line a step, beside those of evaluations. A resumed run cuts what comes again."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

from sublight.errors import BadInput
from sublight.results import write_file

NAME = "log.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a process that was killed may have left half of one."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class Log:
    """Appends; each line is handed to the system at once."""

    def __init__(self, path: Path, *, from_step: int) -> None:
        """Lines of `from_step` and later are dropped: they come again."""
        self.path = path
        kept = [row for row in read(path) if row["step"] < from_step]
        write_file("".join(json.dumps(row) + "\n" for row in kept), path)
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115, held for as long as the run

    @classmethod
    def silent(cls) -> Log:
        """A log that writes nothing, for a process that leaves writing to another."""
        found = cls.__new__(cls)
        found.path, found._file = Path(os.devnull), open(os.devnull, "a", encoding="utf-8")  # noqa: SIM115
        return found

    def add(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise BadInput(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take `add` has told
            self._file.close()
