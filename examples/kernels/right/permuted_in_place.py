"""Rows are permuted in place: behind a barrier, within a warp, by lanes that exchange what they have loaded."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _reverse_kernel(x_ptr, COLS: tl.constexpr):
    row, at = x_ptr + tl.program_id(0) * COLS, tl.arange(0, COLS)
    x = tl.load(row + COLS - 1 - at)
    tl.debug_barrier()
    tl.store(row + at, x)


@triton.jit
def _pairs_kernel(x_ptr, COLS: tl.constexpr):
    """Neighbours change places, and both belong to one warp."""
    row, at = x_ptr + tl.program_id(0) * COLS, tl.arange(0, COLS)
    tl.store(row + at, tl.load(row + (at ^ 1)))


@triton.jit
def _rotary_kernel(x_ptr, COLS: tl.constexpr):
    """Both of a pair load both, and belong to one warp."""
    row, at = x_ptr + tl.program_id(0) * COLS, tl.arange(0, COLS)
    x, partner = tl.load(row + at), tl.load(row + (at ^ 1))
    tl.store(row + at, x + partner)


@triton.jit
def _transpose_kernel(x_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j)
    tl.store(x_ptr + i * N + j, tl.trans(x))


@triton.jit
def _halves_kernel(x_ptr, COLS: tl.constexpr):
    """Each lane writes what it has read."""
    row, at = x_ptr + tl.program_id(0) * COLS, tl.arange(0, COLS // 2)
    a, b = tl.load(row + at), tl.load(row + COLS // 2 + at)
    tl.store(row + at, a - b)
    tl.store(row + COLS // 2 + at, a + b)


@triton.jit
def _flags_kernel(at_ptr, seen_ptr, new_ptr, COLS: tl.constexpr):
    """Two lanes raise the same flag, whatever they have seen."""
    at = tl.load(at_ptr + tl.arange(0, COLS))
    tl.store(new_ptr + tl.arange(0, COLS), tl.load(seen_ptr + at) == 0)
    tl.debug_barrier()
    tl.store(seen_ptr + at, 1)


def main() -> None:
    x = torch.randn(3, 256, device="cuda")
    wanted = x.flip(1)
    _reverse_kernel[(3,)](x, COLS=256)
    assert torch.equal(x, wanted)
    wanted = x.view(3, 128, 2).flip(2).view(3, 256)
    _pairs_kernel[(3,)](x, COLS=256)
    assert torch.equal(x, wanted)
    wanted = torch.cat([x[:, :128] - x[:, 128:], x[:, :128] + x[:, 128:]], dim=1)
    _halves_kernel[(3,)](x, COLS=256)
    assert torch.equal(x, wanted)
    wanted = x + x.view(3, 128, 2).flip(2).view(3, 256)
    _rotary_kernel[(3,)](x, COLS=256)
    assert torch.equal(x, wanted)
    square = torch.randn(32, 32, device="cuda")
    wanted = square.t().clone()
    _transpose_kernel[(1,)](square, N=32)
    assert torch.equal(square, wanted)
    seen, new = torch.zeros(50, dtype=torch.int32, device="cuda"), torch.empty(128, dtype=torch.int32, device="cuda")
    _flags_kernel[(1,)](torch.randint(0, 50, (128,), device="cuda"), seen, new, COLS=128)
    assert new.all()


if __name__ == "__main__":
    main()
