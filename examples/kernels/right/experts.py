"""A product for each expert, on rows that are sorted by expert and filled up to whole tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _experts_kernel(x_ptr, w_ptr, tokens_ptr, experts_ptr, y_ptr, tokens, N, K, TILE: tl.constexpr):
    expert = tl.load(experts_ptr + tl.program_id(0))
    if expert == -1:
        return
    token = tl.load(tokens_ptr + tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, TILE):
        inner = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token * K + inner[None, :], mask=(token < tokens) & (inner[None, :] < K), other=0.0)
        w = tl.load(w_ptr + (expert * N + col) * K + inner[:, None], mask=(col < N) & (inner[:, None] < K), other=0.0)
        total += tl.dot(x, w)
    tl.store(y_ptr + token * N + col, total, mask=(token < tokens) & (col < N))


def main() -> None:
    x, w = torch.randn(20, 24, device="cuda"), torch.randn(3, 20, 24, device="cuda")
    chosen = torch.arange(20) % 3
    tokens, experts = [], []
    for expert in range(3):
        mine = (chosen == expert).nonzero().flatten().tolist()
        tokens += mine + [20] * (-len(mine) % 16)
        experts += [expert]
    order = torch.tensor(tokens + [20] * 16, dtype=torch.int32, device="cuda")
    y = torch.empty(20, 20, device="cuda")
    whose = torch.tensor([*experts, -1], dtype=torch.int32, device="cuda")
    _experts_kernel[(4, 2)](x, w, order, whose, y, 20, 20, 24, TILE=16)
    torch.testing.assert_close(y, torch.einsum("tk,tnk->tn", x, w[chosen]), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
