"""Softmax of each row. Page: `sublight learn show softmax`. Check: `sublight learn check softmax`."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)  # TODO 1: is 0 right for a maximum?
    # TODO 2: subtract the row's maximum, take exp, divide by the sum
    tl.store(out_ptr + row * out_stride + col, x, mask=mask)


def softmax(x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    BLOCK = triton.next_power_of_2(cols)
    softmax_kernel[(rows,)](x, out, cols, x.stride(0), out.stride(0), BLOCK=BLOCK)
