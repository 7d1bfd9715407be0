"""Gather and scatter. Read the page: `sublight learn show permute_rows`. Check: `sublight learn check permute_rows`."""

import torch
import triton
import triton.language as tl


@triton.jit
def permute_rows_kernel(x_ptr, take_ptr, put_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    source = row  # TODO 1: the row of x to take, which lies in take
    target = row  # TODO 2: the row of out to put it to, which lies in put
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + source * cols + col, mask=mask)
    # TODO 3: store it to its row of out


def permute_rows(x: torch.Tensor, take: torch.Tensor, put: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    permute_rows_kernel[(rows,)](x, take, put, out, cols, BLOCK=triton.next_power_of_2(cols))
