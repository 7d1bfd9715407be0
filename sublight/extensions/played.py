"""Launch kernels that a host compiler made: the same source, the same launches and arguments, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from sublight.extensions import build
from sublight.extensions.driver import pointers_to

MULTIPROCESSORS = 2
RESIDENT = 5  # odd, so that work does not divide by it


class BarrierError(RuntimeError):
    """Threads of a block wait at different barriers, which on a GPU hangs or is undefined."""


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
        sizes = (ctypes.c_uint * 6)(*((*grid, 1, 1)[:3] + (*threads, 1, 1)[:3]))
        if getattr(self._library, f"played_{kernel}")(sizes, int(cooperative), int(self._reversed), pointers):
            raise BarrierError(f"{kernel}: threads of a block wait at different barriers")
