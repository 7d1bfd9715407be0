"""Launch kernels that a host compiler made: the same source, the same launches and arguments, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from sublight.extensions import build
from sublight.extensions.driver import pointers_to

MULTIPROCESSORS = 1  # one: few threads, so that in small inputs each takes several turns
RESIDENT = 3


FAULTS = {  # as played.h numbers them
    1: "threads of a block wait at different barriers",
    2: "a thread ends before an asynchronous copy of its own has arrived: copy_async_wait is missing",
    3: "an asynchronous copy of 16 bytes begins at no multiple of 16",
}


class PlayedFault(RuntimeError):
    """A kernel did something that on a GPU hangs, fails or is undefined."""


class OnCpu:
    """The kernels of one file on the CPU; with `reversed` a block's threads run from the last to the first."""

    multiprocessors = MULTIPROCESSORS

    def __init__(self, source: str, kernels: Sequence[str], *, reversed: bool = False) -> None:
        self._library = ctypes.CDLL(str(build.host_library(source, kernels)))
        self._reversed = reversed

    def resident(self, kernel: str, threads: int) -> int:
        return RESIDENT

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        threads: tuple[int, ...],
        *arguments: Any,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        pointers, _kept = pointers_to(arguments)
        sizes = (ctypes.c_uint * 7)(*((*grid, 1, 1)[:3] + (*threads, 1, 1)[:3]), shared_bytes)
        if fault := getattr(self._library, f"played_{kernel}")(sizes, int(cooperative), int(self._reversed), pointers):
            raise PlayedFault(f"{kernel}: {FAULTS[fault]}")
