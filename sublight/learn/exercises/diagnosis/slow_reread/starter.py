"""Slow: x over its largest magnitude. Page: `sublight learn show slow_reread`. Check: `sublight learn check`."""

import torch
import triton
import triton.language as tl

CAUSE = ""  # TODO 1: one of the page's words
BLOCK = 4096


@triton.jit
def slow_reread_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, x / tl.max(largest, axis=0), mask=mask)


def slow_reread(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    slow_reread_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, BLOCK=BLOCK)  # TODO 2: mend it
