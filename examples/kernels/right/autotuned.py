"""Configurations, a heuristic and a helper function."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _leaky(x, slope):
    return tl.where(x > 0, x, x * slope)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)], key=["n"])
@triton.heuristics({"IS_EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def _leaky_kernel(x_ptr, y_ptr, n, slope, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if IS_EVEN:
        tl.store(y_ptr + offsets, _leaky(tl.load(x_ptr + offsets), slope))
    else:
        mask = offsets < n
        tl.store(y_ptr + offsets, _leaky(tl.load(x_ptr + offsets, mask=mask), slope), mask=mask)


def main() -> None:
    for n in (512, 500):
        x = torch.randn(n, device="cuda")
        y = torch.empty_like(x)
        _leaky_kernel[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n, 0.1)
        torch.testing.assert_close(y, torch.nn.functional.leaky_relu(x, 0.1))


if __name__ == "__main__":
    main()
