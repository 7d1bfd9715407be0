"""Slow: bias and GELU. Page: `sublight learn show slow_passes`. Check: `sublight learn check slow_passes`."""

import torch
import triton
import triton.language as tl

CAUSE = ""  # TODO 1: one of the page's words
BLOCK = 1024


@triton.jit
def add_bias_kernel(x_ptr, bias_ptr, out_ptr, n, cols, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask).to(tl.float32) + tl.load(bias_ptr + place % cols, mask=mask).to(tl.float32)
    tl.store(out_ptr + place, x, mask=mask)


@triton.jit
def tanh_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(out_ptr + place, 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0), mask=mask)


@triton.jit
def gate_kernel(x_ptr, tanh_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask)
    tl.store(out_ptr + place, 0.5 * x * (1.0 + tl.load(tanh_ptr + place, mask=mask)), mask=mask)


def slow_passes(x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    n, cols = x.numel(), x.shape[1]
    grid = (triton.cdiv(n, BLOCK),)
    summed = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    tanh = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    add_bias_kernel[grid](x, bias, summed, n, cols, BLOCK=BLOCK)
    tanh_kernel[grid](summed, tanh, n, BLOCK=BLOCK)
    gate_kernel[grid](summed, tanh, out, n, BLOCK=BLOCK)  # TODO 2: mend it
