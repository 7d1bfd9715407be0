"""Flash attention, causal: a block of queries meets block after block of keys; scores never leave the chip.

Only the last blocks of keys need a mask, so they have a turn of their own; powers of two cost less than those of e.
"""

import torch
import triton
import triton.language as tl

QUERIES, KEYS = 128, 64
LOG2_E = 1.4426950408889634


@triton.jit
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, length, scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * QUERIES
    head = tl.program_id(1)
    query = first + tl.arange(0, QUERIES)
    dim = tl.arange(0, D)
    here = (head * length + query[:, None]) * D + dim[None, :]
    q = tl.load(q_ptr + here, mask=query[:, None] < length, other=0.0)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, D], tl.float32)
    for turn in tl.static_range(2):  # keys that every query of the block sees, then those on the diagonal
        begin = 0 if turn == 0 else first
        end = first if turn == 0 else tl.minimum(first + QUERIES, length)
        for start in range(begin, end, KEYS):
            key = start + tl.arange(0, KEYS)
            there = (head * length + key[:, None]) * D + dim[None, :]
            if turn == 0:
                k = tl.load(k_ptr + there)
                v = tl.load(v_ptr + there)
            else:
                k = tl.load(k_ptr + there, mask=key[:, None] < length, other=0.0)
                v = tl.load(v_ptr + there, mask=key[:, None] < length, other=0.0)
            score = tl.dot(q, tl.trans(k)) * scale
            if turn == 1:
                score = tl.where((key[None, :] <= query[:, None]) & (key[None, :] < length), score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1))
            mend = tl.exp2(top - new_top)
            weight = tl.exp2(score - new_top[:, None])
            total = total * mend + tl.sum(weight, axis=1)
            result = tl.dot(weight.to(v.dtype), v, result * mend[:, None])
            top = new_top
    tl.store(out_ptr + here, result / total[:, None], mask=query[:, None] < length)
    tl.store(log_sum_ptr + head * length + query, (top + tl.log2(total)) * 0.6931471805599453, mask=query < length)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor
) -> None:
    heads, length, head_dim = q.shape
    grid = (triton.cdiv(length, QUERIES), heads)
    flash_attention_kernel[grid](
        q, k, v, out, log_sum, length, head_dim**-0.5 * LOG2_E, D=head_dim, QUERIES=QUERIES, KEYS=KEYS, num_warps=8
    )
