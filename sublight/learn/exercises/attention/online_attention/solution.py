"""Attention for one query a program, in one pass: sum and result are rescaled when the maximum grows."""

import torch
import triton
import triton.language as tl

KEYS = 64


@triton.jit
def scores_of(q, k_ptr, head, key, kv_len, scale, D: tl.constexpr):
    """q · k of a chunk of keys, scaled; -inf where there is no key."""
    dim = tl.arange(0, D)
    at = (head * kv_len + key[:, None]) * D + dim[None, :]
    k = tl.load(k_ptr + at, mask=key[:, None] < kv_len, other=0.0).to(tl.float32)
    return tl.where(key < kv_len, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))


@triton.jit
def online_attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, q_len, kv_len, scale, D: tl.constexpr, KEYS: tl.constexpr):
    query = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, D)
    q = tl.load(q_ptr + (head * q_len + query) * D + dim).to(tl.float32)
    top = -float("inf")
    total = 0.0
    result = tl.zeros([D], dtype=tl.float32)
    for start in range(0, kv_len, KEYS):
        key = start + tl.arange(0, KEYS)
        score = scores_of(q, k_ptr, head, key, kv_len, scale, D)
        at = (head * kv_len + key[:, None]) * D + dim[None, :]
        v = tl.load(v_ptr + at, mask=key[:, None] < kv_len, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, tl.max(score, axis=0))
        mend = tl.exp(top - new_top)
        weight = tl.exp(score - new_top)
        total = total * mend + tl.sum(weight, axis=0)
        result = result * mend + tl.sum(weight[:, None] * v, axis=0)
        top = new_top
    tl.store(out_ptr + (head * q_len + query) * D + dim, result / total)


def online_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    heads, q_len, head_dim = q.shape
    scale = head_dim**-0.5
    online_attention_kernel[(q_len, heads)](q, k, v, out, q_len, k.shape[1], scale, D=head_dim, KEYS=KEYS)
