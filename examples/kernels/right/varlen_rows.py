"""Sequences of several lengths, one after another or padded: programs behind a sequence's end return at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _packed_kernel(x_ptr, y_ptr, starts_ptr, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.load(starts_ptr + tl.program_id(0))
    length = tl.load(starts_ptr + tl.program_id(0) + 1) - first
    begin = tl.program_id(1) * ROWS
    if begin >= length:
        return
    row, at = begin + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < length)[:, None] & (at < cols)[None, :]
    x = tl.load(x_ptr + (first + row)[:, None] * cols + at[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + (first + row)[:, None] * cols + at[None, :], x / tl.sum(x, axis=1)[:, None], mask=mask)


@triton.jit
def _padded_kernel(x_ptr, y_ptr, lengths_ptr, most, cols, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    if row >= tl.load(lengths_ptr + tl.program_id(0)):
        return
    at = (tl.program_id(0) * most + row) * cols + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < cols
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=mask), mask=mask)


def main() -> None:
    starts = torch.tensor([0, 5, 5, 17, 20], device="cuda", dtype=torch.int32)
    x = torch.rand(20, 24, device="cuda") + 1
    y = torch.empty_like(x)
    _packed_kernel[(4, 3)](x, y, starts, 24, ROWS=4, BLOCK=32)
    torch.testing.assert_close(y, x / x.sum(1, keepdim=True))
    lengths = [5, 0, 12, 3]
    padded = torch.rand(4, 12, 24, device="cuda")
    doubled = torch.empty_like(padded)
    _padded_kernel[(4, 12)](padded, doubled, torch.tensor(lengths, device="cuda"), 12, 24, BLOCK=32)
    torch.testing.assert_close(doubled[2, : lengths[2]], 2 * padded[2, : lengths[2]])  # one of them is looked at


if __name__ == "__main__":
    main()
