"""One program counts without atomics: two lanes with the same number both store the same count, one too low."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _count_kernel(x_ptr, counts_ptr, BLOCK: tl.constexpr):
    bin = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(counts_ptr + bin, tl.load(counts_ptr + bin) + 1)  # planted: race


def main() -> None:
    x = torch.randint(0, 16, (128,), device="cuda")
    _count_kernel[(1,)](x, torch.zeros(16, dtype=torch.int32, device="cuda"), BLOCK=128)


if __name__ == "__main__":
    main()
