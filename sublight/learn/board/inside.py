"""The first thing that runs in a sandbox: limits for all of it, then a module, `python -m … .inside MODULE ARGUMENTS`.

What the kernel refuses here it refuses to everything inside, for good: new namespaces, mounts, keys, tracing, other
processes' memory. The grader's own filter comes on top of it, for each submission.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import runpy
import sys

from sublight.learn.grade.sandbox import apply, refusing

PROCESSES, OPEN_FILES, NICE = 64, 512, 10
_NAMESPACES = 0x7E020000  # of clone's flags: all kinds of new namespaces
_CALLS = {
    "x86_64": {"ptrace": 101, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "reboot": 169,
               "init_module": 175, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
               "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
               "process_vm_writev": 311, "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
               "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "pidfd_open": 434,
               "pidfd_getfd": 438, "mount_setattr": 442},
    "aarch64": {"ptrace": 117, "pivot_root": 41, "chroot": 51, "mount": 40, "umount2": 39, "reboot": 142,
                "init_module": 105, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97,
                "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
                "process_vm_writev": 271, "finit_module": 273, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
                "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "pidfd_open": 434,
                "pidfd_getfd": 438, "mount_setattr": 442},
}  # fmt: skip


def main() -> None:
    module, *arguments = sys.argv[1:]
    os.nice(NICE)  # the server answers first
    for which, most in ((resource.RLIMIT_NPROC, PROCESSES), (resource.RLIMIT_NOFILE, OPEN_FILES)):
        resource.setrlimit(which, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable: processes in here do not read each other through /proc
    apply(refusing(platform.machine(), _CALLS[platform.machine()].values(), clone_flags=_NAMESPACES))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
