"""Slow: GELU by erf. Page: `sublight learn show slow_double`. Check: `sublight learn check slow_double`."""

import torch
import triton
import triton.language as tl

CAUSE = ""  # TODO 1: one of the page's words, then TODO 2: mend it
BLOCK = 1024


@triton.jit
def slow_double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask).to(tl.float64)
    erf = tl.erf(x * 0.7071067811865476)
    tl.store(out_ptr + place, 0.5 * x * (1.0 + erf), mask=mask)


def slow_double(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    slow_double_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, BLOCK=BLOCK)
