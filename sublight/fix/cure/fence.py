"""Refuse what a trial run would write outside of its scratch copy, and note it: an audit hook in each Python process.

`sitecustomize` loads this file by its path at the start of every Python process of the run, the script's Python
children included, so it imports the standard library alone. What Python does not open itself, the hook does not see:
the kernel refuses that where it can (`landlock.py`).
"""

from __future__ import annotations

import os
import sys
from typing import Any

VARIABLE = "SUBLIGHT_FENCE"  # the settings, as JSON
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# events by what they change: the name itself (a link is not followed), or what the name leads to
NAMES = {"os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)}
NAMES |= {"os.mkdir": (0,), "shutil.rmtree": (0,)}
CONTENTS = ("os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr")
FOLDER_FD = {  # where an event says what its names are relative to
    "os.remove": (1,),
    "os.rmdir": (1,),
    "os.mkdir": (2,),
    "os.rename": (2, 3),
    "os.link": (3,),
    "os.symlink": (2,),
    "shutil.rmtree": (1,),
}


class Fence:
    """What may be written: anything below `roots`; below `temporary`, what no file was before the run."""

    def __init__(self, *, roots: list[str], temporary: list[str], protected: str, log: str, began_s: float) -> None:
        self.roots = tuple(map(os.path.realpath, roots))
        self.protected = os.path.realpath(protected)  # the user's folder, wherever it lies
        shared = map(os.path.realpath, temporary)  # one that holds the user's folder holds more that is the user's
        self.temporary = tuple(root for root in shared if not _is_below(self.protected, (root,)))
        self.log, self.began_s = log, began_s
        self._is_busy = False  # writing the log is an event, too

    def start(self) -> None:
        """Start the fence for the rest of the process: an audit hook cannot be removed."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & WRITES:
                self.check(path)
        elif event in NAMES:
            folders = FOLDER_FD[event]
            for at, place in enumerate(NAMES[event]):
                fd = args[folders[min(at, len(folders) - 1)]] if len(args) > max(folders) else None
                self.check(args[place], is_name=True, folder_fd=fd, is_mkdir=event == "os.mkdir")
        elif event in CONTENTS:
            self.check(args[0])

    def check(self, path: Any, *, is_name: bool = False, folder_fd: Any = None, is_mkdir: bool = False) -> None:
        """PermissionError where a write there is refused."""
        if self._is_busy or not isinstance(path, (str, bytes, os.PathLike)):
            return  # a file descriptor: it was opened by its name before
        where = _real(os.fsdecode(path), is_name, folder_fd)
        if self.allows(where) or (is_mkdir and os.path.isdir(where)):
            return
        if os.path.basename(os.path.dirname(where)) == "__pycache__" or os.path.basename(where) == "__pycache__":
            raise PermissionError(13, "not kept in a trial run", where)  # Python goes on without, and nobody misses it
        self._note(where)
        raise PermissionError(13, "refused by sublight explain --fix: outside of the scratch copy", where)

    def allows(self, where: str) -> bool:
        if _is_below(where, (self.protected,)):
            return False
        if _is_below(where, self.roots):
            return True
        if not _is_below(where, self.temporary):
            return False
        try:  # a temporary folder is everybody's: what lay there before is somebody's
            return os.lstat(where).st_ctime >= self.began_s
        except OSError:
            return True

    def _note(self, where: str) -> None:
        self._is_busy = True
        try:
            with open(self.log, "a", encoding="utf-8", errors="surrogateescape") as log:
                log.write(where.replace("\n", "?") + "\n")
        except OSError:
            pass
        finally:
            self._is_busy = False


def _real(path: str, is_name: bool, folder_fd: Any) -> str:
    if isinstance(folder_fd, int) and folder_fd >= 0 and os.path.exists(folder := f"/proc/self/fd/{folder_fd}"):
        path = os.path.join(os.path.realpath(folder), path)  # a whole path stays one
    if not is_name:
        return os.path.realpath(path)
    path = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _is_below(where: str, roots: tuple[str, ...]) -> bool:
    return any(where == root or where.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


def started() -> Fence | None:
    """The fence that the environment describes; None where this is no trial run."""
    import json

    settings = os.environ.get(VARIABLE)
    if not settings:
        return None
    fence = Fence(**json.loads(settings))
    fence.start()
    return fence
