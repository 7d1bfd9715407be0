"""Flash attention's gradients. Page: `sublight learn show flash_backward`. Check: `sublight learn check`."""

import torch
import triton
import triton.language as tl

ROWS, COLS = 64, 64


@triton.jit
def tile_of(ptr, head, row, length, D: tl.constexpr):
    """Rows of one head, zeros where there is none."""
    at = (head * length + row[:, None]) * D + tl.arange(0, D)[None, :]
    return tl.load(ptr + at, mask=row[:, None] < length, other=0.0)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, log_sum_ptr, delta_ptr, dq_ptr, length, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = tile_of(q_ptr, head, query, length, D)
    grad = tile_of(grad_ptr, head, query, length, D)
    log_sum = tl.load(log_sum_ptr + head * length + query, mask=query < length, other=float("inf"))
    delta = tl.load(delta_ptr + head * length + query, mask=query < length, other=0.0)
    dq = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, COLS):
        key = start + tl.arange(0, COLS)
        k = tile_of(k_ptr, head, key, length, D)
        v = tile_of(v_ptr, head, key, length, D)
        weight = tl.exp(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
        d_score = weight  # TODO 1: the gradient of each score, from grad · v and delta
        dq = tl.dot(d_score.to(k.dtype), k, dq)
    at = (head * length + query[:, None]) * D + tl.arange(0, D)[None, :]
    tl.store(dq_ptr + at, dq * scale, mask=query[:, None] < length)


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, log_sum_ptr, delta_ptr, dk_ptr, dv_ptr, length, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    key = tl.program_id(0) * COLS + tl.arange(0, COLS)
    k = tile_of(k_ptr, head, key, length, D)
    v = tile_of(v_ptr, head, key, length, D)
    dk = tl.zeros([COLS, D], tl.float32)
    dv = tl.zeros([COLS, D], tl.float32)
    for start in range(0, length, ROWS):
        query = start + tl.arange(0, ROWS)
        q = tile_of(q_ptr, head, query, length, D)
        grad = tile_of(grad_ptr, head, query, length, D)
        log_sum = tl.load(log_sum_ptr + head * length + query, mask=query < length, other=float("inf"))
        delta = tl.load(delta_ptr + head * length + query, mask=query < length, other=0.0)
        weight = tl.exp(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
        # TODO 2: dv, from weight and grad; d_score as above; dk, from d_score and q
    at = (head * length + key[:, None]) * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, dk * scale, mask=key[:, None] < length)
    tl.store(dv_ptr + at, dv, mask=key[:, None] < length)


def flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, log_sum: torch.Tensor, delta: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    heads, length, head_dim = q.shape
    scale, given = head_dim**-0.5, (q, k, v, grad, log_sum, delta)
    sizes = {"D": head_dim, "ROWS": ROWS, "COLS": COLS}
    dq_kernel[(triton.cdiv(length, ROWS), heads)](*given, dq, length, scale, **sizes)
    dk_dv_kernel[(triton.cdiv(length, COLS), heads)](*given, dk, dv, length, scale, **sizes)
