"""In place and autotuned: values put back between trials, sums begun at zero, and an update that changes nothing."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCKS = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]


@triton.autotune(configs=BLOCKS, key=["n"], restore_value=["x_ptr"])
@triton.jit
def _double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, 2 * x, mask=at < n)


@triton.autotune(configs=BLOCKS, key=["n"], reset_to_zero=["total_ptr"])
@triton.jit
def _sum_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0)))


@triton.autotune(configs=BLOCKS, key=["n"])
@triton.jit
def _positive_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, tl.maximum(x, 0.0), mask=at < n)


@triton.autotune(configs=BLOCKS[:1], key=["n"])
@triton.jit
def _untried_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


def main() -> None:
    x = torch.randn(1000, device="cuda")
    expected, count = 2 * x, torch.ones(1000, device="cuda", dtype=torch.int32)
    grid = lambda known: (triton.cdiv(1000, known["BLOCK"]),)  # noqa: E731
    _double_kernel[grid](x, 1000)
    torch.testing.assert_close(x, expected)
    total = torch.zeros(1, device="cuda", dtype=torch.int32)
    _sum_kernel[grid](count, total, 1000)
    assert total.item() == 1000
    _positive_kernel[grid](x, 1000)
    torch.testing.assert_close(x, expected.relu())
    _untried_kernel[grid](count, 1000)
    assert count.sum().item() == 2000


if __name__ == "__main__":
    main()
