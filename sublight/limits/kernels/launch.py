"""A kernel that does as good as nothing: what is left is its launch."""

from __future__ import annotations

from typing import Any

from sublight.backend.jit import tl, triton


@triton.jit
def _empty_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


def empty(x: Any) -> None:
    _empty_kernel[(1,)](x, num_warps=1)
