"""Rotary embedding. Read the page: `sublight learn show rope`. Check your work: `sublight learn check rope`."""

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, heads, half, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    head = tl.program_id(1)
    col = tl.arange(0, BLOCK)
    mask = col < half
    start = 0  # TODO 1: where this token's head begins, in x and in out
    first = tl.load(x_ptr + start + col, mask=mask).to(tl.float32)
    second = first  # TODO 2: the partners, half a head further on
    cos = tl.load(cos_ptr + token * half + col, mask=mask).to(tl.float32)
    sin = tl.load(sin_ptr + token * half + col, mask=mask).to(tl.float32)
    # TODO 3: turn each pair, and store both halves


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    rope_kernel[(tokens, heads)](x, cos, sin, out, heads, half, BLOCK=triton.next_power_of_2(half))
