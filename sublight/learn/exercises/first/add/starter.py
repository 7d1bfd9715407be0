"""out = x + y. Read the page: `sublight learn show add`. Check your work: `sublight learn check add`."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # TODO: mask, two loads, one sum, one store


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    n = out.numel()
    # TODO: launch add_kernel on enough programs for n elements
