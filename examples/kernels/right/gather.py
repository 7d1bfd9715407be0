"""Rows of a table by index; programs may read the same row."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _embedding_kernel(index_ptr, table_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(index_ptr + i)
    col = tl.arange(0, BLOCK)
    tl.store(y_ptr + i * cols + col, tl.load(table_ptr + row * cols + col, mask=col < cols), mask=col < cols)


def main() -> None:
    table = torch.randn(30, 48)
    index = torch.randint(0, 30, (20,))
    y = torch.empty(20, 48)
    _embedding_kernel[(20,)](index, table, y, 48, BLOCK=64)
    assert torch.equal(y, table[index])


if __name__ == "__main__":
    main()
