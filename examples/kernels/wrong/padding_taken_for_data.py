"""`other=0.0` over a loop and in a sort: 0 is the least of positive numbers, and comes before or behind the data."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _extremes_kernel(x_ptr, least_ptr, most_ptr, cols, BLOCK: tl.constexpr):
    least, most = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < cols, other=0.0)
        least = tl.minimum(least, x)  # planted: padded-lanes
        most = tl.where(-x > most, -x, most)  # planted: padded-lanes
    tl.store(least_ptr, tl.min(least, axis=0))
    tl.store(most_ptr, tl.max(most, axis=0))


@triton.jit
def _sorted_kernel(x_ptr, sorted_ptr, top_ptr, cols, TOP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < cols, other=0.0)
    tl.store(sorted_ptr + at, tl.sort(x), mask=at < cols)  # planted: padded-lanes
    top = tl.topk(x - 4, TOP, 0)  # -4 where nothing is: data are 1 at least
    tl.store(top_ptr + tl.arange(0, TOP), top)
    top = tl.topk(-x, TOP, 0)  # planted: padded-lanes
    tl.store(top_ptr + tl.arange(0, TOP), top)


def main() -> None:
    x = torch.rand(200, device="cuda") + 1
    least, most = torch.empty(1, device="cuda"), torch.empty(1, device="cuda")
    _extremes_kernel[(1,)](x, least, most, 200, BLOCK=64)
    _sorted_kernel[(1,)](x, torch.empty_like(x[:20]), torch.empty_like(x[:4]), 20, TOP=4, BLOCK=32)


if __name__ == "__main__":
    main()
