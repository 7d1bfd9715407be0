"""Small steps away from 1.0, in bf16: each is rounded away."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _descend_kernel(w_ptr, g_ptr, n, rate, steps, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    w = tl.load(w_ptr + offsets, mask=mask)
    for _ in range(steps):
        w = (w - rate * tl.load(g_ptr + offsets, mask=mask)).to(tl.bfloat16)  # planted: bf16-accumulation
    tl.store(w_ptr + offsets, w, mask=mask)


def main() -> None:
    w = torch.ones(64, dtype=torch.bfloat16)
    g = torch.full((64,), 0.01, dtype=torch.bfloat16)
    _descend_kernel[(1,)](w, g, 64, 1e-3, 20, BLOCK=64)


if __name__ == "__main__":
    main()
