"""Padding that loses each comparison, in a loop and in a sort."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _extremes_kernel(x_ptr, least_ptr, most_ptr, cols, BLOCK: tl.constexpr):
    least, most = tl.full((BLOCK,), float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < cols, other=0.0)
        most = tl.maximum(most, tl.abs(x))
        least = tl.where((at < cols) & (x < least), x, least)
        least = tl.minimum(least, tl.load(x_ptr + at, mask=at < cols, other=float("inf")))
    tl.store(least_ptr, tl.min(least, axis=0))
    tl.store(most_ptr, tl.max(most, axis=0))


@triton.jit
def _sorted_kernel(x_ptr, sorted_ptr, top_ptr, cols, TOP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < cols, other=float("inf"))
    tl.store(sorted_ptr + at, tl.sort(x), mask=at < cols)
    top = tl.topk(tl.exp(-x), TOP, 0)
    tl.store(top_ptr + tl.arange(0, TOP), top / tl.sum(top, axis=0))


def main() -> None:
    x = torch.rand(200, device="cuda") + 1
    least, most = torch.empty(1, device="cuda"), torch.empty(1, device="cuda")
    _extremes_kernel[(1,)](x, least, most, 200, BLOCK=64)
    assert least[0] == x.min() and most[0] == x.max()
    ordered, top = torch.empty_like(x[:20]), torch.empty_like(x[:4])
    _sorted_kernel[(1,)](x, ordered, top, 20, TOP=4, BLOCK=32)
    torch.testing.assert_close(ordered, x[:20].sort().values)


if __name__ == "__main__":
    main()
