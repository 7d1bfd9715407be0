"""Where text comes from: a file, a folder, or the sources of Python's own library, which every machine has."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sublight.errors import BadInput, refuse_device

SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".cu", ".js", ".ts", ".html", ".css", ".json", ".tex")
PASSED_OVER = ("site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "encodings")
MOST_BYTES = 4 << 30  # of text; more is for a .bin file


def read_texts(path: Path | None, *, most_bytes: int | None = None) -> list[str]:
    """Every text, in the order of their names; `most_bytes` stops early."""
    texts, size = [], 0
    for file in files(path):
        text = _read(file, is_named=path is not None and path.is_file())
        texts += [text] if text else []
        size += len(text)
        if most_bytes and size >= most_bytes:
            break
        if size > MOST_BYTES:
            raise BadInput(
                f"{path} holds more than 4 GiB of text: write its tokens as uint16 to a .bin file, and name that"
            )
    if not texts:
        raise BadInput(f"{path} holds no text: name a text file, a folder of them, or a .bin file")
    return texts


def files(path: Path | None) -> Iterator[Path]:
    if path is None:
        for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
            inner[:] = sorted(set(inner) - set(PASSED_OVER))  # never goes in: site-packages may hold a whole world
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    elif path.is_dir():
        found = (file for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and file.is_file())
        yield from (file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    elif path.exists():
        refuse_device(path)
        yield path
    else:
        raise BadInput(
            f"there is no {path}: name a text file, a folder or a .bin file; without a name Python's library is read"
        )


def _read(file: Path, *, is_named: bool) -> str:
    """A file of a folder that is no text is passed over; one that was named is not."""
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        if is_named:
            raise BadInput(f"{file} is no UTF-8 text: name a text, or a .bin file of uint16 tokens") from None
        return ""
