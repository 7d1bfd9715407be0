"""Copy with few programs that loop. Page: `sublight learn show blocks`. Check: `sublight learn check blocks`."""

import torch
import triton
import triton.language as tl

PROGRAMS = 16  # TODO: too few for a GPU; the page says how many are enough
BLOCK = 256


@triton.jit
def blocks_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    step = tl.num_programs(0) * BLOCK  # what all programs copy in one turn
    for start in range(tl.program_id(0) * BLOCK, n, step):
        place = start + tl.arange(0, BLOCK)
        mask = place < n
        tl.store(out_ptr + place, tl.load(x_ptr + place, mask=mask), mask=mask)


def blocks(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    blocks_kernel[(min(PROGRAMS, triton.cdiv(n, BLOCK)),)](x, out, n, BLOCK=BLOCK)
