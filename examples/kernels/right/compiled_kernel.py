"""The launcher compiles first, asks for the registers, and launches what it got; then it times it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax_kernel(y_ptr, x_ptr, stride, rows, cols, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=2):
        col = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + col, mask=col < cols, other=float("-inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(y_ptr + row * stride + col, e / tl.sum(e, axis=0), mask=col < cols)


def softmax(x):
    device = triton.runtime.driver.active.get_active_torch_device()
    facts = triton.runtime.driver.active.utils.get_device_properties(device.index)
    y = torch.empty_like(x)
    kernel = _softmax_kernel.warmup(y, x, x.stride(0), *x.shape, BLOCK=64, num_warps=8, grid=(1,))
    kernel._init_handles()
    programs = facts["multiprocessor_count"] * (facts["max_num_regs"] // (kernel.n_regs * facts["warpSize"] * 8))
    kernel[(min(programs, x.shape[0], 4), 1, 1)](y, x, x.stride(0), *x.shape, 64)
    return y


def main() -> None:
    x = torch.randn(13, 50, device=triton.runtime.driver.active.get_active_torch_device())
    torch.testing.assert_close(softmax(x), torch.softmax(x, 1))
    middle, low, high = triton.testing.do_bench(lambda: softmax(x), quantiles=[0.5, 0.2, 0.8])
    assert 2 * x.nbytes / middle and low <= high


if __name__ == "__main__":
    main()
