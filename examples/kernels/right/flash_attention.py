"""Attention in bf16 with the softmax online, causal and not."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    y_ptr,
    length,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64) * length * WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    q = tl.load(q_ptr + head + row[:, None] * WIDTH + d[None, :], mask=row[:, None] < length, other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * ROWS, length) if CAUSAL else length
    for start in range(0, end, COLS):
        col = start + tl.arange(0, COLS)
        k = tl.load(k_ptr + head + col[None, :] * WIDTH + d[:, None], mask=col[None, :] < length, other=0.0)
        v = tl.load(v_ptr + head + col[:, None] * WIDTH + d[None, :], mask=col[:, None] < length, other=0.0)
        keep = col[None, :] < length
        if CAUSAL:
            keep = keep & (col[None, :] <= row[:, None])
        score = tl.where(keep, tl.dot(q, k) * scale, float("-inf"))
        now = tl.maximum(best, tl.max(score, 1))
        p = tl.exp(score - now[:, None])
        shrink = tl.exp(best - now)
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None])
        best = now
    y = (total / weight[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + head + row[:, None] * WIDTH + d[None, :], y, mask=row[:, None] < length)


def main() -> None:
    for causal in (True, False):
        q, k, v = (torch.randn(2, 50, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        y = torch.empty_like(q)
        _attention_kernel[(2, 2)](q, k, v, y, 50, 0.25, WIDTH=16, ROWS=32, COLS=16, CAUSAL=causal)
        wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
        torch.testing.assert_close(y.float(), wanted, rtol=3e-2, atol=3e-2)


if __name__ == "__main__":
    main()
