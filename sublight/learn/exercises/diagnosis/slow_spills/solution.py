"""RMSNorm of long rows: sixteen warps share a row, so that each thread holds 32 values of it."""

import torch
import triton
import triton.language as tl

CAUSE = "spills"
EPSILON = 1e-6


@triton.jit
def slow_spills_kernel(x_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * cols + col, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / cols + eps)
    tl.store(out_ptr + row * cols + col, x * scale * weight, mask=mask)


def slow_spills(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    block = triton.next_power_of_2(cols)
    slow_spills_kernel[(rows,)](x, weight, out, cols, EPSILON, BLOCK=block, num_warps=16)
