"""The temporary folder of one recording.

What is removed is what was made: files by their names, then the folder if it is empty. Nothing here goes through a
folder and deletes what it finds, and a path that comes from elsewhere is never the start of a removal.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

FILES = ("first.json", "steps.json", "marked.json", "trace.json")
_NAME = re.compile(r"sublight-(\d+)-[a-z0-9_]{8}")  # the process that made it, and what makes it unique


@dataclass(frozen=True, slots=True)
class Folder:
    """Made by `make`, and gone after `remove`."""

    path: Path

    @classmethod
    def make(cls) -> Folder:
        """A new one; those that a killed process of this user left behind go first."""
        for left in Path(tempfile.gettempdir()).iterdir():
            name = _NAME.fullmatch(left.name)
            if name and not is_alive(int(name[1])) and _is_ours(left):
                cls(left).remove()
        return cls(Path(tempfile.mkdtemp(prefix=f"sublight-{os.getpid()}-")))

    @property
    def trace(self) -> Path:
        return self.file("trace")

    def file(self, stem: str) -> Path:
        name = f"{stem}.json"
        if name not in FILES:
            raise ValueError(f"a recording has no {name}")
        return self.path / name

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # somebody else's file in it, or a folder that is gone already: let it be
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


def _is_ours(folder: Path) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except (OSError, AttributeError):  # gone meanwhile; or Windows, which has no users of this kind
        return False


def is_alive(process: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True
