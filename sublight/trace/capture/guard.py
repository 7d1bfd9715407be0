"""What keeps a capture out of the script's way: its own profilers, its memory, its children."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from sublight.backend import private

WATCH_S = 0.25
GROWTH_BYTES = 2 << 30  # about 1.5 million events, and what CUDA and its libraries take
MOST_RANGES = 64  # closed ones are let go of from here on
LEAST_CPU_S = 1.0  # the profiler cannot have recorded that many in less
_STARTERS = ("_prepare_profiler", "_enable_profiler")  # through which every torch profiler begins


class Guard:
    """Stands aside when the script starts a profiler of its own: two cannot run on one thread."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._originals: dict[str, Any] = {}
        self._ours = False

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        before, self._ours = self._ours, True
        try:
            yield
        finally:
            self._ours = before

    def install(self) -> None:
        from torch.autograd import profiler

        for name in _STARTERS:
            if original := getattr(profiler, name, None):
                self._originals[name] = original
                setattr(profiler, name, self._watched(original))

    def remove(self) -> None:
        from torch.autograd import profiler

        for name, original in self._originals.items():
            setattr(profiler, name, original)
        self._originals = {}

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            if not self._ours:
                self._give_way()
            return original(*args, **kwargs)

        return start


class OpenRanges:
    """The script's own ranges that are open when a profiler stops are closed first, from `begin` to `end` of a profile.

    PyTorch writes a range's end into the profile where it began: were another profile running by then, into memory that
    is no longer its own. To close a range twice is nothing.
    """

    def __init__(self) -> None:
        self._enter: Any = None
        self._open: list[weakref.ref[Any]] = []

    def begin(self) -> None:
        from torch.autograd.profiler import record_function

        thread, original = threading.get_ident(), record_function.__enter__

        def enter(opened: Any) -> Any:
            if threading.get_ident() == thread:
                if len(self._open) >= MOST_RANGES:
                    self._open = [one for one in self._open if one() is not None]
                self._open.append(weakref.ref(opened))
            return original(opened)

        self._enter = original
        record_function.__enter__ = enter  # type: ignore[method-assign]

    def end(self) -> None:
        from torch.autograd.profiler import record_function

        if self._enter is not None:
            record_function.__enter__ = self._enter  # type: ignore[method-assign]
            self._enter = None
        for reference in reversed(self._open):
            if (opened := reference()) is not None:
                opened.__exit__(None, None, None)
        self._open = []


class ProcessGroups:
    """Keeps the script's process groups from ending inside the script: `kept` holds them until the report is out.

    A gloo group joins its threads when it ends, and each of them needs the interpreter's lock once more, to free the
    gradients that it sent last. A script that destroys its groups and drops its DistributedDataParallel holds that
    lock meanwhile: then neither goes on. Plain scripts win this race nearly always, those that are sampled do not.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._original: Any = None

    def install(self) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            return
        from torch.distributed import distributed_c10d

        original = self._original = distributed_c10d.destroy_process_group

        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(AttributeError):
                self.kept += list(private.loaded("world").pg_map)
            return original(*args, **kwargs)

        functools.update_wrapper(destroy_process_group, original)
        self._put(destroy_process_group)

    def remove(self) -> None:
        if self._original is not None:
            self._put(self._original)
            self._original = None

    @staticmethod
    def _put(function: Any) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        distributed_c10d.destroy_process_group = dist.destroy_process_group = function


class Watch:
    """Bounds a profile that no boundary ends: `expire` runs on the main thread, between two of the script's bytecodes.

    A profiler can only be stopped by the thread that started it, so a timer's thread cannot do it itself.
    """

    _kept: ClassVar[list[Any]] = []  # C holds these calls by address, and may run one after its watch has ended

    def __init__(self, expire: Callable[[], None], *, limit_s: float) -> None:
        self.began_s = time.monotonic()
        self._limit_s = limit_s
        self._stopped = threading.Event()

        def on_main_thread(_: Any) -> int:
            with contextlib.suppress(Exception):
                if not self._stopped.is_set() and not in_torch(sys._getframe(1)):
                    expire()
            return 0

        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(on_main_thread)
        if threading.current_thread() is threading.main_thread():
            Watch._kept.append(self._call)
            threading.Thread(target=self._run, daemon=True, name="sublight watch").start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        rss, cpu_s = _resident_bytes(), time.process_time()
        while not self._stopped.wait(WATCH_S):
            full = _resident_bytes() - rss > GROWTH_BYTES and time.process_time() - cpu_s > LEAST_CPU_S
            if full or time.monotonic() - self.began_s > self._limit_s:
                ctypes.pythonapi.Py_AddPendingCall(self._call, None)


def in_torch(frame: FrameType | None) -> bool:
    """Whether torch is on the stack: one of its ops, or a compilation, may be open, and would outlive its profile."""
    while frame is not None:
        if f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):  # not Linux: the time limit stands alone
        return 0


def forget_profilers() -> None:
    """In a forked child: drop what the parent's profiler left on this thread, or every op pays for it."""
    with contextlib.suppress(ImportError, AttributeError):
        private.clear_callbacks()
