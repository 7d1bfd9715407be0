"""Copy x into out. Read the page: `sublight learn show copy`. Check your work: `sublight learn check copy`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements that one program copies; a power of two


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)  # 0, 1, 2, …: which program this is
    place = tl.arange(0, BLOCK)  # TODO 1: this program's own elements; now all programs have the first ones
    mask = place >= 0  # TODO 2: true where the tensor has such an element
    x = tl.load(x_ptr + place, mask=mask)
    # TODO 3: store x


def copy(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    grid = (1,)  # TODO 4: how many programs are needed for n elements
    copy_kernel[grid](x, out, n, BLOCK=BLOCK)
