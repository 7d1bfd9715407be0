"""A cache of torch.empty is read one token further than it was written."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _fill_kernel(cache_ptr, lengths_ptr, most, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    for token in range(tl.load(lengths_ptr + sequence)):
        tl.store(cache_ptr + (sequence * most + token) * BLOCK + tl.arange(0, BLOCK), 1.0)  # planted: unwritten-output


@triton.jit
def _mean_kernel(cache_ptr, lengths_ptr, y_ptr, most, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    length = tl.load(lengths_ptr + sequence)
    total = tl.zeros((BLOCK,), tl.float32)
    for token in range(0, length + 1):
        at = (sequence * most + token) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(cache_ptr + at)  # planted: uninitialised-read
    tl.store(y_ptr + sequence * BLOCK + tl.arange(0, BLOCK), total / length)


def main() -> None:
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    cache = torch.empty(2, 8, 16)
    y = torch.empty(2, 16)
    _fill_kernel[(2,)](cache, lengths, 8, BLOCK=16)
    _mean_kernel[(2,)](cache, lengths, y, 8, BLOCK=16)


if __name__ == "__main__":
    main()
