"""Reductions by functions of the script's own, each with lanes filled by what changes nothing in it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _log_add_exp(a, b):
    most = tl.maximum(a, b)
    return most + tl.log(tl.exp(a - most) + tl.exp(b - most))


@triton.jit
def _combined_kernel(x_ptr, y_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (at < cols)[None, :]
    ptr = x_ptr + row[:, None] * cols + at[None, :]
    x = tl.load(ptr, mask=mask, other=0.0)
    tl.store(y_ptr + row, tl.reduce(tl.where(mask, x, 1.0), 1, _times), mask=row < rows)
    tl.store(y_ptr + rows + row, tl.reduce(x, 1, _plus), mask=row < rows)
    tl.store(y_ptr + 2 * rows + row, tl.reduce(x, 1, _larger), mask=row < rows)  # some lane of each is above 0
    far = tl.load(ptr, mask=mask, other=-1e30)
    tl.store(y_ptr + 3 * rows + row, tl.reduce(far, 1, _log_add_exp), mask=row < rows)


def main() -> None:
    x = torch.rand(7, 24, device="cuda") + torch.tensor([0.5, -0.5], device="cuda").repeat(12)
    y = torch.empty(4, 7, device="cuda")
    _combined_kernel[(2,)](x, y, 7, 24, ROWS=4, BLOCK=32)
    for got, wanted in zip(y, (x.prod(1), x.sum(1), x.amax(1), x.logsumexp(1)), strict=True):
        torch.testing.assert_close(got, wanted)


if __name__ == "__main__":
    main()
