"""Triton where it is installed; elsewhere (macOS, a CPU-only install) a stand-in under which kernels can be defined.

Ops then still import, cost, and run through PyTorch: only launching one of our kernels needs the real thing.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
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

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << (n - 1).bit_length()

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

    triton, tl = _Triton(), _Language()

__all__ = ["AVAILABLE", "tl", "triton"]
