"""Rotary embedding: a program turns all heads of one token; each number is read once, though it enters two results."""

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, heads, half, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (col < half)
    start = (token * heads + head) * 2 * half
    first = tl.load(x_ptr + start + col, mask=mask).to(tl.float32)
    second = tl.load(x_ptr + start + half + col, mask=mask).to(tl.float32)
    cos = tl.load(cos_ptr + token * half + col, mask=col < half).to(tl.float32)
    sin = tl.load(sin_ptr + token * half + col, mask=col < half).to(tl.float32)
    tl.store(out_ptr + start + col, first * cos - second * sin, mask=mask)
    tl.store(out_ptr + start + half + col, second * cos + first * sin, mask=mask)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    sizes = {"HEADS": triton.next_power_of_2(heads), "BLOCK": triton.next_power_of_2(half)}
    rope_kernel[(tokens,)](x, cos, sin, out, heads, half, **sizes)
