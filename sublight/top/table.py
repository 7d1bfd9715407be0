"""A session as CSV: a row for each GPU at each look, the host's columns behind it; one row a look without a GPU."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from sublight.errors import BadInput
from sublight.health.record import GpuState, Host, Snapshot, Unavailable, leaves

_GPU = tuple(name for name, _ in leaves(GpuState(index=0, name="")))
_HOST = tuple(name for name, _ in leaves(Host()))
COLUMNS = ("time", *(f"gpu_{name}" if name in ("index", "name", "uuid") else name for name in _GPU), *_HOST)


class Writer:
    """Appends each look at once; what is not available is an empty cell."""

    def __init__(self, name: str) -> None:
        """`name`: of the file; - is the standard output."""
        try:
            self._file: TextIO = sys.stdout if name == "-" else open(name, "w", encoding="utf-8", newline="")  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"cannot write {name}: {error.strerror}; name another file") from None
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(COLUMNS)

    def add(self, snapshot: Snapshot) -> None:
        self._rows.writerows(rows(snapshot))
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()


def rows(snapshot: Snapshot) -> Iterator[list[Any]]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(snapshot.time_s)) + f"{snapshot.time_s % 1:.3f}"[1:] + "Z"
    host = [_cell(value) for _, value in leaves(snapshot.host)]
    for gpu in snapshot.gpus or (None,):
        cells = [_cell(value) for _, value in leaves(gpu)] if gpu else [""] * len(_GPU)
        yield [at, *cells, *host]


def _cell(value: Any) -> Any:
    return "" if isinstance(value, Unavailable) else value
