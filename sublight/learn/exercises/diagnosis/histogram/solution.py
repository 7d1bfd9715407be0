"""A histogram: a program counts its block on the chip, then adds each bin once, by an atomic."""

import torch
import triton
import triton.language as tl

BLOCK, BINS = 4096, 256


@triton.jit
def histogram_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    bin = tl.load(x_ptr + place, mask=mask, other=0)
    counts = tl.histogram(bin, BINS, mask=mask)
    tl.atomic_add(out_ptr + tl.arange(0, BINS), counts)


def histogram(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    out.zero_()
    histogram_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, BLOCK=BLOCK, BINS=BINS)
