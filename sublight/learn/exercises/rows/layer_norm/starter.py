"""LayerNorm of each row. Page: `sublight learn show layer_norm`. Check: `sublight learn check layer_norm`."""

import torch
import triton
import triton.language as tl

EPS = 1e-5


@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, cols, x_stride, out_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / cols
    centered = x - mean  # TODO 1: behind the row's end this is -mean, which would enter the variance
    # TODO 2: variance, the reciprocal of its root, weight and bias
    tl.store(out_ptr + row * out_stride + col, centered, mask=mask)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    BLOCK = triton.next_power_of_2(cols)
    layer_norm_kernel[(rows,)](x, weight, bias, out, cols, x.stride(0), out.stride(0), EPS, BLOCK=BLOCK)
