"""Row times stride, for matrices of 65,536 by 65,536.

run with: --at M=65536,N=65536,K=65536
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, sam, sbk, scm, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inner = tl.arange(0, TILE)
    a_ptrs = a_ptr + row * sam + inner[None, :]  # planted: offset-overflow
    b_ptrs = b_ptr + inner[:, None] * sbk + col
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, TILE):
        a = tl.load(a_ptrs, mask=(row < M) & (inner[None, :] < K - start), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - start) & (col < N), other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += TILE
        b_ptrs += TILE * sbk
    wide = row.to(tl.int64) * scm
    tl.store(c_ptr + wide + col, total, mask=(row < M) & (col < N))


def main() -> None:
    a, b = torch.randn(40, 50), torch.randn(50, 36)
    c = torch.empty(40, 36)
    _matmul_kernel[(3, 3)](a, b, c, 40, 36, 50, a.stride(0), b.stride(0), c.stride(0), TILE=16)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
