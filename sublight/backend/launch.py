"""Launches of our kernels that skip what Triton asks at each one, and has been told before.

A launch through Triton takes 25 µs on an H200's host: arguments are bound by name, options turned into text for a key,
globals compared, and hooks called that nobody has set. What is needed is which compiled kernel it is, which the types
and the alignment of the arguments tell, and the launch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.runtime.jit import JITFunction

THEIRS = JITFunction.run if JITFunction.run.__module__ == JITFunction.__module__ else None  # who records sees each
MOST_KNOWN = 4096  # launches of a kernel that differ; then they are learnt anew
HOOKS = ("launch_enter_hook", "launch_exit_hook")


def quick(module: Any) -> Any:
    """`triton` or `gluon` with a `jit` whose kernels are launched quickly; interpreted ones stay as they are."""

    def jit(function: Any) -> Any:
        kernel = module.jit(function)
        if isinstance(kernel, JITFunction):
            kernel.__class__ = type(type(kernel).__name__, (_Quick, type(kernel)), {})
            kernel.known = {}
        return kernel

    return SimpleNamespace(jit=jit)


class _Quick:
    """Before JITFunction in the order of bases."""

    known: dict[Any, tuple[Any, tuple[Any, ...]]]  # by what tells launches apart: the kernel, its further arguments

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or callable(grid) or JITFunction.run is not THEIRS or _is_watched() or self.pre_run_hooks:
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)  # type: ignore[misc]
        device = torch.cuda.current_device()
        backend = self.device_caches[device][3]
        kinds = tuple([native_specialize_impl(backend, x, False, True, True) for x in args])
        key = (device, kinds, tuple(kwargs.items()))
        found = self.known.get(key)
        if found is None:
            kernel = super().run(*args, grid=grid, warmup=False, **kwargs)  # type: ignore[misc]
            if kernel is not None:  # a hook of Triton's cache may keep it from being compiled
                self._learn(key, kernel, len(args), kwargs)
            return kernel
        kernel, rest = found
        across, down, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch = kernel.run
        launch(across, down, deep, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *rest)
        return kernel

    def _learn(self: Any, key: Any, kernel: Any, given: int, kwargs: dict[str, Any]) -> None:
        """Remember a launch, unless its key does not tell all: a constant by its place; a number by its name, whose
        type 2 and 2.0 do not tell; a tensor by its name, which would be held."""
        placed, named = self.params[:given], self.params[given:]
        if any(param.is_constexpr or param.do_not_specialize for param in placed) or not all(
            param.is_constexpr for param in named
        ):
            return
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known[key] = (kernel, tuple([kwargs.get(param.name, param.default) for param in named]))


def is_ours(kernel: JITFunction[Any]) -> bool:
    return isinstance(kernel, _Quick)


def _is_watched() -> bool:
    """Whether somebody has set a hook, as a profiler of Triton's does, or wants other kernels, as a debugger does."""
    if knobs.runtime.debug or knobs.compilation.instrumentation_mode or knobs.runtime.add_stages_inspection_hook:
        return True
    return any(getattr(getattr(knobs.runtime, name), "calls", True) for name in HOOKS)
