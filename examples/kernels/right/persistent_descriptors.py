"""A matrix product by few programs, each over many tiles, through tensor descriptors."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _tile(number, groups, rows, GROUP: tl.constexpr):
    first = number // groups * GROUP
    size = min(rows - first, GROUP)
    return first + number % size, number % groups // size


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, TILE: tl.constexpr, GROUP: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[K, 1], block_shape=[TILE, TILE])
    b = tl.make_tensor_descriptor(b_ptr, shape=[N, K], strides=[K, 1], block_shape=[TILE, TILE])
    c = tl.make_tensor_descriptor(c_ptr, shape=[M, N], strides=[N, 1], block_shape=[TILE, TILE])
    rows, cols = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    for number in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=True):
        row, col = _tile(number, GROUP * cols, rows, GROUP)
        total = tl.zeros((TILE, TILE), tl.float32)
        for inner in range(tl.cdiv(K, TILE)):
            total = tl.dot(a.load([row * TILE, inner * TILE]), b.load([col * TILE, inner * TILE]).T, total)
        c.store([row * TILE, col * TILE], total.to(tl.float16))


def main() -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    a, b = (torch.randn(size, 24, device="cuda", dtype=torch.float16) for size in (40, 48))
    c = torch.empty(40, 48, device="cuda", dtype=torch.float16)
    _matmul_kernel[(4,)](a, b, c, 40, 48, 24, TILE=16, GROUP=2)
    torch.testing.assert_close(c, a @ b.T, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    main()
