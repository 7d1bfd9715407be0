"""Slow: a squared ReLU. Page: `sublight learn show slow_few`. Check: `sublight learn check slow_few`."""

import torch
import triton
import triton.language as tl

CAUSE = ""  # TODO 1: one of the page's words
BLOCK = 1024
PROGRAMS = 4


@triton.jit
def slow_few_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < n
        x = tl.maximum(tl.load(x_ptr + place, mask=mask).to(tl.float32), 0.0)
        tl.store(out_ptr + place, x * x, mask=mask)


def slow_few(x: torch.Tensor, out: torch.Tensor) -> None:
    slow_few_kernel[(PROGRAMS,)](x, out, x.numel(), BLOCK=BLOCK)  # TODO 2: mend it
