"""Online softmax: one pass for maximum and sum together, a second one for the result."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def online_softmax_kernel(x_ptr, out_ptr, log_sum_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = -float("inf")
    total = 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
    tl.store(log_sum_ptr + row, top + tl.log(total))
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        tl.store(out_ptr + row * out_stride + col, tl.exp(x - top) / total, mask=col < cols)


def online_softmax(x: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> None:
    rows, cols = x.shape
    online_softmax_kernel[(rows,)](x, out, log_sum, cols, x.stride(0), out.stride(0), BLOCK=BLOCK)
