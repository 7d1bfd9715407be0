"""Softmax over chunks. Page: `sublight learn show online_softmax`. Check: `sublight learn check online_softmax`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # of a chunk; rows may be longer


@triton.jit
def online_softmax_kernel(x_ptr, out_ptr, log_sum_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = -float("inf")  # the largest value so far
    total = 0.0  # the sum of exp(x - top) so far
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total + tl.sum(tl.exp(x - new_top), axis=0)  # TODO 1: the sum so far was taken with the old top
        top = new_top
    # TODO 2: store top + log(total) to log_sum[row]
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        # TODO 3: store exp(x - top) / total


def online_softmax(x: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> None:
    rows, cols = x.shape
    online_softmax_kernel[(rows,)](x, out, log_sum, cols, x.stride(0), out.stride(0), BLOCK=BLOCK)
