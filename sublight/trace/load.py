"""A trace file of any kind, or a folder of them with one a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sublight.errors import BadInput
from sublight.trace.read import chrome, nsight
from sublight.trace.record import Trace

ENDINGS = (".json", ".json.gz", ".sqlite", ".nsys-rep")
_SQLITE = b"SQLite format 3\x00"


def is_trace(path: Path) -> bool:
    """Whether this is for loading rather than for running: by its name, else by its first bytes."""
    if path.is_dir() or path.name.endswith((*ENDINGS, ".gz")):
        return True
    if path.suffix == ".py" or not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(64)
    return first.startswith((_SQLITE, b"\x1f\x8b")) or first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def load(path: Path) -> list[Trace]:
    """The traces of a file or a folder; of a folder, those that can be read, unless none can."""
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise BadInput(f"there is no file {path}")
    return _file(path)


def _file(path: Path) -> list[Trace]:
    try:
        with path.open("rb") as file:
            database = file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if database or path.name.endswith((".sqlite", ".nsys-rep")):
        return nsight.load(path)
    return [chrome.load(path)]


def _folder(path: Path) -> list[Trace]:
    files = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not files:
        raise BadInput(f"{path} holds no trace: none of its files ends in {', '.join(ENDINGS)}")
    traces: list[Trace] = []
    errors: list[str] = []
    for file in files:
        try:
            traces += _file(file)
        except BadInput as error:
            errors.append(str(error))
    if not traces:
        raise BadInput(f"no trace of {path} can be read: {errors[0]}")
    first = traces[0]
    return [replace(first, lost=(*first.lost, *(f"{error}." for error in errors))), *traces[1:]]
