"""out[i] = sum of row i of x. Page: `sublight learn show row_sum`. Check: `sublight learn check row_sum`."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols)  # TODO: what do the lanes behind the row hold?
    # TODO: one number of the whole row, stored to out[row]


def row_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    BLOCK = triton.next_power_of_2(cols)
    row_sum_kernel[(rows,)](x, out, cols, x.stride(0), BLOCK=BLOCK)
