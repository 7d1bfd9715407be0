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

THEIRS = JITFunction.run  # as it is unless somebody records launches
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
            self._learn(key, kernel, len(args), kwargs)
            return kernel
        kernel, rest = found
        across, down, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch = kernel.run
        launch(across, down, deep, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *rest)
        return kernel

    def _learn(self: Any, key: Any, kernel: Any, given: int, kwargs: dict[str, Any]) -> None:
        """Remember a launch, unless its key does not tell all: a constant among the positional arguments, say."""
        params = self.params
        rest = [kwargs.get(param.name, param.default) for param in params[given:]]
        is_told = not any(param.is_constexpr or param.do_not_specialize for param in params[:given])
        if not is_told or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            return
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known[key] = (kernel, tuple(rest))


def _is_watched() -> bool:
    """Whether somebody has set a hook: a profiler of Triton's."""
    return any(getattr(getattr(knobs.runtime, name), "calls", True) for name in HOOKS)
