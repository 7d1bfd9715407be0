"""Triton where it is installed; elsewhere (macOS, a CPU-only install) a stand-in under which kernels can be defined.

Ops then still import, cost, and run through PyTorch: only launching one of our kernels needs the real thing.
"""

from __future__ import annotations

from typing import Any

try:
    import triton as their_triton
    import triton.language as tl
    from triton.experimental import gluon as their_gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.language.extra import libdevice

    from sublight.backend import launch as launching

    AVAILABLE = True
    triton, gluon = launching.quick(their_triton), launching.quick(their_gluon)  # of both, ours take `jit` alone
    # global to shared memory without passing through registers; Triton renamed it between 3.6 and 3.9
    copy_in = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
except ImportError:
    AVAILABLE = False

    class _Kernel:
        """Keeps the name of a kernel that cannot be launched."""

        def __init__(self, function: Any) -> None:
            self.fn, self.__name__ = function, function.__name__

        def __getitem__(self, grid: Any) -> Any:
            raise ImportError("our kernels need triton: pip install triton (Linux only), or use provider 'torch'")

    class _Language:
        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    class _Triton:
        jit = staticmethod(_Kernel)

    triton, tl = _Triton(), _Language()
    gluon, gl = triton, tl
    async_copy = copy_in = libdevice = None

__all__ = [
    "AVAILABLE", "async_copy", "cdiv", "copy_in", "gl", "gluon", "libdevice", "next_power_of_2", "tl", "triton",
]  # fmt: skip


def cdiv(a: int, b: int) -> int:
    """As many b as cover a. Launchers count with these two: Triton's own work in kernels too, and take 5 µs for it."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """
    >>> next_power_of_2(1), next_power_of_2(5), next_power_of_2(8)
    (1, 8, 8)
    """
    return 1 << (n - 1).bit_length()
