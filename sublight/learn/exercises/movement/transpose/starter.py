"""out = x.T. Read the page: `sublight learn show transpose`. Check your work: `sublight learn check transpose`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, BLOCK: tl.constexpr):
    # TODO: right, and slow: neighbours in out lie a whole row apart in x. Work on tiles of two dimensions.
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < rows * cols
    x = tl.load(x_ptr + place % rows * cols + place // rows, mask=mask)
    tl.store(out_ptr + place, x, mask=mask)


def transpose(x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    transpose_kernel[(triton.cdiv(rows * cols, BLOCK),)](x, out, rows, cols, BLOCK=BLOCK)
