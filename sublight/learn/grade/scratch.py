"""Files in a folder that a submission can write to, too: none of them is trusted to be what it was.

A submission that got past the scan could put a link in the place of a file, and the grader, which runs with more
rights, would read or overwrite what the link points to. So files are made anew or not at all, links are not followed,
and what is no plain file is not read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sublight.errors import BadInput


def made(file: Path, content: bytes) -> int:
    """The descriptor of a new file with this content."""
    file.unlink(missing_ok=True)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BadInput(f"the grader's file {file.name} cannot be made: {error.strerror}") from None
    with os.fdopen(os.dup(descriptor), "wb") as target:
        target.write(content)
    return descriptor


def tail(file: Path, size_bytes: int) -> bytes:
    """The end of a plain file; nothing of what is none, or is not there."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as source:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return b""
        source.seek(max(0, about.st_size - size_bytes))
        return source.read(size_bytes)
