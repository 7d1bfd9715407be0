"""out = x * y + z. Read the page: `sublight learn show multiply_add`. Check: `sublight learn check multiply_add`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def multiply_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask)
    y = tl.load(y_ptr + place, mask=mask)
    tl.store(out_ptr + place, x * y, mask=mask)


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask)
    y = tl.load(y_ptr + place, mask=mask)
    tl.store(out_ptr + place, x + y, mask=mask)


def multiply_add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, out: torch.Tensor) -> None:
    # TODO: this is right, and slow: the product goes to memory and comes back. One kernel can do it all.
    n = out.numel()
    grid = (triton.cdiv(n, BLOCK),)
    product = torch.empty_like(x)
    multiply_kernel[grid](x, y, product, n, BLOCK=BLOCK)
    add_kernel[grid](product, z, out, n, BLOCK=BLOCK)
