"""Compile kernels side by side, by threads, instead of launching them: a listener on top of Triton's own machinery.

Triton's asynchronous compilation is private to it. Where it is not as expected, launches are made as they come and each
kernel is compiled when it is first launched: slower, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from sublight.backend.listen import Proceed, Request, listening


def start_driver() -> None:
    """Start Triton's driver, as its first launch would: on 3.6 that runs a C compiler, most of a second."""
    from triton.runtime import driver

    _ = driver.active.utils


@contextlib.contextmanager
def compiling(pool: Executor, is_wanted: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, kernels that are wanted are compiled by the pool and not launched; after it, all of them can be."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        yield
        return
    outer = active_mode.get()
    mode = AsyncCompileMode(pool, ignore_errors=True)

    def compile_only(request: Request, proceed: Proceed) -> Any:
        if not is_wanted(request.kernel):
            return proceed(request)
        before = active_mode.set(mode)  # set in each thread: autograd's has a value of its own
        try:
            return proceed(replace(request, warmup=True))
        finally:
            active_mode.reset(before)

    try:
        with listening(compile_only), mode:
            active_mode.set(outer)  # from here on a kernel is compiled where it is launched
            yield
    finally:
        active_mode.set(outer)  # Triton 3.6 leaves its own mode set where it is interrupted
