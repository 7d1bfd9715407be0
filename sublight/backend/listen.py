"""The one place where launches of Triton kernels are intercepted: to record, to compile without launching, to check.

`listening(listener)` puts a listener in front of Triton's own `JITFunction.run`; the innermost hears of a launch first
and decides whether it goes on. Outside of any such block Triton is as it was.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sublight.backend import native


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A requested launch: the arguments that Triton's `run` was called with."""

    kernel: Any  # triton.JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: Any
    warmup: bool  # compile only


Proceed = Callable[[Request], Any]  # make the launch, or let the next listener decide
Listener = Callable[[Request, Proceed], Any]

LISTENERS: list[Listener] = []  # for the whole process: launches of every thread reach them
_LOCK = threading.RLock()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, every launch of a compiled (not an interpreted) Triton kernel goes to the listener first."""
    with _LOCK:
        if not LISTENERS:
            _Hook.put_in()
        LISTENERS.append(listener)
    try:
        with native.paused():
            yield
    finally:
        with _LOCK:
            LISTENERS.remove(listener)
            if not LISTENERS:
                _Hook.take_out()


class _Hook:
    """Keeps Triton's own `run` while ours stands in its place."""

    original: Any = None

    @classmethod
    def put_in(cls) -> None:
        from triton.runtime.jit import JITFunction

        cls.original = JITFunction.run
        JITFunction.run = _run  # type: ignore[method-assign]

    @classmethod
    def take_out(cls) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run = cls.original  # type: ignore[method-assign]
        cls.original = None


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    original, listeners = _Hook.original, tuple(LISTENERS)
    if original is None:  # the last listener was removed after this launch had begun
        return self.run(*args, grid=grid, warmup=warmup, **kwargs)
    request = Request(kernel=self, args=args, kwargs=kwargs, grid=grid, warmup=warmup)
    return _proceed(listeners, original)(request)


def _proceed(listeners: tuple[Listener, ...], original: Any) -> Proceed:
    if not listeners:
        return lambda r: original(r.kernel, *r.args, grid=r.grid, warmup=r.warmup, **r.kwargs)
    return lambda request: listeners[-1](request, _proceed(listeners[:-1], original))
