"""An autograd function: several launches, outputs made by torch.empty_like, gradients through torch."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _square_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * x, mask=offsets < n)


@triton.jit
def _square_backward_kernel(grad_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    grad = tl.load(grad_ptr + offsets, mask=mask) * 2 * tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, grad, mask=mask)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _square_kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(x)
        _square_backward_kernel[(triton.cdiv(x.numel(), 128),)](grad, x, out, x.numel(), BLOCK=128)
        return out


def main() -> None:
    x = torch.randn(300, device="cuda", requires_grad=True)
    _Square.apply(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())


if __name__ == "__main__":
    main()
