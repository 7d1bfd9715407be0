"""A histogram with a race. Page: `sublight learn show histogram`. Check your work: `sublight learn check histogram`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def histogram_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    bin = tl.load(x_ptr + place, mask=mask, other=0)
    count = tl.load(out_ptr + bin, mask=mask)
    tl.store(out_ptr + bin, count + 1, mask=mask)  # TODO: mend the race; then let a program add to each bin once


def histogram(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    out.zero_()
    histogram_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, BLOCK=BLOCK)
