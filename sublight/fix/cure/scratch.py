"""A scratch copy of the working folder for each trial run: what a run writes there, nobody misses.

A run that is ended in its middle must not leave its checkpoint where that of a finished run was. What is large and
only read (version control, environments, what the user excludes) is no part of the copy: a link stands for it, which
can be read through, and not written through.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sublight import units
from sublight.errors import BadInput
from sublight.fix.cure import landlock

MOST_BYTES = 10**9
CACHES = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".tox", ".nox")
LINKED = (".git", ".hg", ".svn", "node_modules")
ENVIRONMENT = "pyvenv.cfg"  # what a folder holds that is a virtual environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """What a copy holds; decided, and checked, before anything runs."""

    folder: str  # the user's, its real path
    exclude: tuple[str, ...] = ()  # patterns of names, or of paths from the folder
    allow: tuple[str, ...] = ()  # where a run may write, beside its copy
    total_bytes: int = 0

    def is_linked(self, path: str) -> bool:
        name, from_folder = os.path.basename(path), os.path.relpath(path, self.folder)
        if any(fnmatch(name, pattern) or fnmatch(from_folder, pattern) for pattern in self.exclude):
            return True
        return os.path.isdir(path) and (name in LINKED or os.path.exists(os.path.join(path, ENVIRONMENT)))

    @contextlib.contextmanager
    def copied(self) -> Iterator[str]:
        """A fresh copy, which is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="sublight-fix-", ignore_cleanup_errors=True) as home:
            copy = os.path.join(os.path.realpath(home), os.path.basename(self.folder) or "folder")
            self._copy(self.folder, copy, copy)
            if landlock.version() > 0:
                self._link_siblings(copy)
            yield copy

    def _link_siblings(self, copy: str) -> None:
        """What lies beside the folder lies beside its copy: `../data` can be read. Without the kernel's fence other
        programs could write through such a link, so there is none.
        """
        with contextlib.suppress(OSError), os.scandir(os.path.dirname(self.folder)) as entries:
            for entry in entries:
                there = os.path.join(os.path.dirname(copy), entry.name)
                if not os.path.lexists(there):
                    os.symlink(entry.path, there)

    def _copy(self, source: str, target: str, root: str) -> None:
        os.mkdir(target)
        with os.scandir(source) as entries:
            for entry in entries:
                there = os.path.join(target, entry.name)
                if entry.name in CACHES and entry.is_dir():
                    continue
                if entry.is_symlink():
                    os.symlink(self._link_target(entry.path, root), there)
                elif self.is_linked(entry.path):
                    os.symlink(entry.path, there)
                elif entry.is_dir():
                    self._copy(entry.path, there, root)
                elif stat.S_ISREG(entry.stat().st_mode) and os.access(entry.path, os.R_OK):
                    shutil.copy2(entry.path, there)
        shutil.copystat(source, target)
        os.chmod(target, os.stat(target).st_mode | stat.S_IRWXU)  # what is read-only there must be gone afterwards

    def _link_target(self, link: str, root: str) -> str:
        """A whole path into the folder leads into the copy; a relative one out of it still leads where it did."""
        target = os.readlink(link)
        if os.path.isabs(target):
            return self.into(target, root)
        whole = os.path.normpath(os.path.join(os.path.dirname(link), target))
        leads_out = landlock.version() > 0 and not is_below(whole, self.folder)
        return whole if leads_out else target

    def into(self, path: str, copy: str) -> str:
        """The copy's path for one inside of the folder; any other as it is."""
        whole = os.path.realpath(path) if os.path.isabs(path) else path
        return os.path.join(copy, os.path.relpath(whole, self.folder)) if is_below(whole, self.folder) else path

    def out_of(self, path: str, copy: str) -> str:
        """The file of the folder that this one is the copy of; any other as it is."""
        return os.path.join(self.folder, os.path.relpath(path, copy)) if is_below(path, copy) else path

    def arguments(self, words: Sequence[str], copy: str) -> list[str]:
        """With whole paths into the folder as those of the copy: `/home/me/run/out` and `--out=/home/me/run/out`."""
        return [self._argument(word, copy) for word in words]

    def _argument(self, word: str, copy: str) -> str:
        flag, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
        return flag + sign + self.into(value, copy) if os.path.isabs(value) else word


def plan(folder: str, target: str, *, module: bool, exclude: Sequence[str] = (), allow: Sequence[str] = ()) -> Scratch:
    """What a copy will hold; one line where it cannot be made."""
    folder = os.path.realpath(folder)
    if not module and not is_below(os.path.realpath(os.path.join(folder, target)), folder):
        raise BadInput(
            f"--fix tries cures in a copy of the working folder, and {target} lies outside of it: cd to its folder"
        )
    if is_below(os.path.realpath(tempfile.gettempdir()), folder):
        raise BadInput("--fix copies the working folder, and TMPDIR lies in it: set TMPDIR to another folder")
    if inside := next((path for path in allow if is_below(os.path.realpath(path), folder)), None):
        raise BadInput(f"--scratch-allow {inside} lies in the working folder, which is not written to: leave it out")
    if lost := next((path for path in allow if not os.path.exists(path)), None):
        raise BadInput(f"--scratch-allow {lost}: there is no such file or folder")
    scratch = Scratch(
        folder=folder, exclude=tuple(path.rstrip(os.sep) for path in exclude), allow=tuple(map(os.path.realpath, allow))
    )
    if not module and (left := _left_out(scratch, os.path.join(folder, target))):
        raise BadInput(f"--scratch-exclude leaves {os.path.relpath(left, folder)} out, and the script lies there")
    sizes = _sizes(scratch)
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise BadInput(
            f"--fix tries cures in copies of the working folder, which holds {units.text(total, 'B')}, and copies "
            f"{units.text(MOST_BYTES, 'B')} at most: --scratch-exclude {largest} "
            f"({units.text(sizes[largest], 'B')}) lets it be read where it lies, or start from a smaller folder"
        )
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if total > free // 2:
        raise BadInput(
            f"--fix tries cures in copies of the working folder ({units.text(total, 'B')}), and "
            f"{tempfile.gettempdir()} has {units.text(free, 'B')} free: set TMPDIR to another folder"
        )
    return Scratch(folder=scratch.folder, exclude=scratch.exclude, allow=scratch.allow, total_bytes=total)


def _left_out(scratch: Scratch, script: str) -> str:
    """The part of the script's path that is no part of a copy."""
    path = script
    while is_below(path, scratch.folder) and path != scratch.folder:
        if scratch.is_linked(path):
            return path
        path = os.path.dirname(path)
    return ""


def _sizes(scratch: Scratch) -> dict[str, int]:
    """Bytes to copy, by the names in the folder."""
    sizes = dict.fromkeys(("",), 0)
    for at, folders, files in os.walk(scratch.folder):
        paths = [os.path.join(at, name) for name in folders if name not in CACHES]
        folders[:] = [os.path.basename(path) for path in paths if not scratch.is_linked(path)]
        for file in files:
            path = os.path.join(at, file)
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and not scratch.is_linked(path):
                    first = Path(path).relative_to(scratch.folder).parts[0]
                    sizes[first] = sizes.get(first, 0) + found.st_size
    return sizes


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
