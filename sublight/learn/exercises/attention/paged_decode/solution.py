"""Paged decoding: a program has one head of one sequence, and finds each page of its keys and values in the table."""

import torch
import triton
import triton.language as tl

PAGES = 8  # at a time


@triton.jit
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, heads, width, scale,
    D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, D)
    length = tl.load(lengths_ptr + sequence)
    q = tl.load(q_ptr + (sequence * heads + head) * D + dim).to(tl.float32)
    top = -float("inf")
    total = 0.0
    result = tl.zeros([D], dtype=tl.float32)
    for start in range(0, length, PAGE * PAGES):
        key = start + tl.arange(0, PAGE * PAGES)
        page = tl.load(table_ptr + sequence * width + key // PAGE, mask=key < length, other=0).to(tl.int64)
        slot = page * PAGE + key % PAGE
        at = (slot[:, None] * heads + head) * D + dim[None, :]
        k = tl.load(k_ptr + at, mask=key[:, None] < length, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=key[:, None] < length, other=0.0).to(tl.float32)
        score = tl.where(key < length, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        mend = tl.exp(top - new_top)
        weight = tl.exp(score - new_top)
        total = total * mend + tl.sum(weight, axis=0)
        result = result * mend + tl.sum(weight[:, None] * v, axis=0)
        top = new_top
    tl.store(out_ptr + (sequence * heads + head) * D + dim, result / total)


def paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    batch, heads, head_dim = q.shape
    sizes = {"D": head_dim, "PAGE": k_cache.shape[1], "PAGES": PAGES}
    scale, width = head_dim**-0.5, table.shape[1]
    paged_decode_kernel[(batch, heads)](q, k_cache, v_cache, table, lengths, out, heads, width, scale, **sizes)
