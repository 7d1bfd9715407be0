"""Limits around a process that runs somebody's code: processor time, memory, size of files, and no network.

The kernel refuses sockets, and where no other program is needed new processes and programs, by a seccomp filter that
cannot be taken off. Linux alone has one; Triton runs nowhere else.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sublight.errors import BadInput

FILE_BYTES = 64 * 2**20  # a compiler writes its intermediate files
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # prctl's names for them
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_CLONE_THREAD = 0x00010000
_NOT_A_THREAD = 0  # in place of flags to refuse: all clones without _CLONE_THREAD
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {  # numbers of system calls
    "x86_64": {"socket": 41, "socketpair": 53, "ptrace": 101, "io_uring_setup": 425,
               "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "clone3": 435,
               "process_vm_readv": 310, "process_vm_writev": 311, "kill": 62, "tkill": 200, "tgkill": 234,
               "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424},
    "aarch64": {"socket": 198, "socketpair": 199, "ptrace": 117, "io_uring_setup": 425,
                "clone": 220, "execve": 221, "execveat": 281, "clone3": 435,
                "process_vm_readv": 270, "process_vm_writev": 271, "kill": 129, "tkill": 130, "tgkill": 131,
                "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424},
}  # fmt: skip
_NEVER = (
    *("socket", "socketpair", "ptrace", "io_uring_setup", "process_vm_readv", "process_vm_writev"),
    *("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"),  # the grader is a process, too
)
_PROGRAMS = ("fork", "vfork", "execve", "execveat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a submission may use, beyond what its process used to get ready."""

    cpu_s: float = 10.0
    wall_s: float = 120.0  # by the parent's clock: for code that waits
    memory_bytes: int = 2**30


def confine(budget: Budget, *, programs: bool) -> None:
    """Put the limits on this process, for good; `programs` lets it start others, as a compiler must."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + budget.cpu_s)
    _limit(resource.RLIMIT_CPU, seconds, seconds + 1)  # first SIGXCPU, which says why, then SIGKILL
    _limit(resource.RLIMIT_DATA, _data_bytes() + budget.memory_bytes)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _filter(platform.machine(), programs=programs)


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """No higher than what somebody else allows already."""
    most = resource.getrlimit(which)[1]
    wanted = (soft, soft if hard is None else hard)
    resource.setrlimit(which, wanted if most == resource.RLIM_INFINITY else (min(soft, most), min(wanted[1], most)))


def _data_bytes() -> int:
    """Memory of its own that this process has now."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise BadInput("/proc/self/status has no VmData: submissions run on Linux alone")


def _filter(machine: str, *, programs: bool) -> None:
    if machine not in _CALLS:
        raise BadInput(f"no filter of system calls is known for {machine}: submissions run on x86_64 and aarch64")
    apply(filter_code(machine, programs=programs))


def apply(code: bytes) -> None:
    """Put a filter of system calls on this process and all that it starts."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    program = Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise BadInput(f"this system allows no filter of system calls (errno {ctypes.get_errno()}): nothing was run")


def filter_code(machine: str, *, programs: bool) -> bytes:
    """A submission's: refuse those listed, and where no program may start, clones that are no threads."""
    calls = _CALLS[machine]
    refused = [calls[name] for name in (*_NEVER, *(() if programs else _PROGRAMS)) if name in calls]
    return refusing(machine, refused, clone_flags=None if programs else _NOT_A_THREAD, ends=os.getpid())


def refusing(machine: str, numbers: Iterable[int], *, clone_flags: int | None, ends: int = 0) -> bytes:
    """A filter that refuses another architecture's calls, these, clones with any of these flags, and, where `ends` is
    a process, signals to threads of any other: to abort is a signal to oneself."""
    calls = _CALLS[machine]
    code = [_step(_LOAD, 4), _step(_JUMP_EQUAL, _AUDIT[machine], 1, 0), _step(_RETURN, _EPERM), _step(_LOAD, 0)]
    for number in numbers:
        code += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _EPERM)]
    if machine == "x86_64":  # numbers from 2**30 on are the same calls once more
        code += [_step(0x35, 0x40000000, 0, 1), _step(_RETURN, _EPERM)]
    if ends:
        code += [_step(_JUMP_EQUAL, calls["tgkill"], 0, 4), _step(_LOAD, 16), _step(_JUMP_EQUAL, ends, 1, 0)]
        code += [_step(_RETURN, _EPERM), _step(_RETURN, _ALLOW)]
    if clone_flags is not None:
        code += [_step(_JUMP_EQUAL, calls["clone3"], 0, 1), _step(_RETURN, _ENOSYS)]  # glibc then takes clone
        is_set, is_clear = (1, 0) if clone_flags == _NOT_A_THREAD else (0, 1)
        code += [_step(_JUMP_EQUAL, calls["clone"], 0, 3), _step(_LOAD, 16)]  # its first argument: flags
        wanted = _CLONE_THREAD if clone_flags == _NOT_A_THREAD else clone_flags
        code += [_step(_JUMP_SET, wanted, is_set, is_clear), _step(_RETURN, _EPERM)]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
