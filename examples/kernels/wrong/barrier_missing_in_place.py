"""A row is turned around in place: a fast warp stores to what a slow one has not read yet."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _reverse_kernel(x_ptr, COLS: tl.constexpr):
    row, at = x_ptr + tl.program_id(0) * COLS, tl.arange(0, COLS)
    x = tl.load(row + COLS - 1 - at)
    tl.store(row + at, x)  # planted: missing-barrier


@triton.jit
def _by_the_first_kernel(x_ptr, COLS: tl.constexpr):
    row, at = x_ptr + tl.program_id(0) * COLS, tl.arange(0, COLS)
    first = tl.load(row)  # by every warp
    tl.store(row + at, tl.load(row + at) / first)  # planted: missing-barrier


def main() -> None:
    x = torch.rand(3, 256, device="cuda") + 1
    wanted = x.flip(1)
    _reverse_kernel[(3,)](x, COLS=256)
    assert torch.equal(x, wanted)
    wanted = x / x[:, :1]
    _by_the_first_kernel[(3,)](x, COLS=256)
    torch.testing.assert_close(x, wanted)


if __name__ == "__main__":
    main()
