"""Autotune tries every configuration on the real tensors: what is updated in place is updated once a trial."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def _double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, 2 * x, mask=at < n)  # planted: autotuned-in-place


def main() -> None:
    x = torch.randn(1000, device="cuda")
    expected = 2 * x
    _double_kernel[lambda known: (triton.cdiv(1000, known["BLOCK"]),)](x, 1000)
    torch.testing.assert_close(x, expected)


if __name__ == "__main__":
    main()
