"""Have the kernel refuse writes outside of some folders, for this process and all it starts: Linux's Landlock.

It holds for compiled code and for other programs, too, where an audit hook hears nothing. Reading stays free.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls; the same numbers on every architecture
VERSION_FLAG, PATH_BENEATH, NO_NEW_PRIVILEGES = 1, 1, 38
LEAST_VERSION = 2  # before it, no file could be moved from one folder to another
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))  # files, folders, links, sockets, pipes, devices
OF_A_FILE = WRITE_FILE | TRUNCATE  # what a rule for a single file may hold


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """The version of the kernel's Landlock; 0 where it has none that serves."""
    if not sys.platform.startswith("linux"):
        return 0
    found = _call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG))
    return found if found >= LEAST_VERSION else 0


def restrict(roots: Iterable[str]) -> bool:
    """From now on nothing outside of these folders is written; whether the kernel does that. There is no way back."""
    known = version()
    if not known:
        return False
    rights = WRITE_FILE | MAKE_AND_REMOVE | REFER | (TRUNCATE if known >= 3 else 0)
    ruleset = _call(
        CREATE_RULESET,
        ctypes.byref(_Ruleset(rights)),
        ctypes.c_size_t(ctypes.sizeof(_Ruleset)),
        ctypes.c_uint32(0),
    )
    if ruleset < 0:
        return False
    try:
        for root in roots:
            _allow(ruleset, root, rights)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            return False
        return _call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, root: str, rights: int) -> None:
    try:
        folder = os.open(root, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        rule = _Beneath(rights if os.path.isdir(root) else rights & OF_A_FILE, folder)
        _call(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(folder)


def _call(number: int, *args: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *args))
