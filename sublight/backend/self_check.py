"""The kernel that the quick launch is tried on."""

from __future__ import annotations

from sublight.backend.jit import tl, triton


@triton.jit
def _axpy_kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0)
    tl.store(y_ptr + place, x * scale, mask=place < n)
