"""The gradient of an embedding: every token adds its row to its word's, by atomics: tokens may share one."""

import torch
import triton
import triton.language as tl


@triton.jit
def embedding_backward_kernel(ids_ptr, grad_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    word = tl.load(ids_ptr + token)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    grad = tl.load(grad_ptr + token * cols + col, mask=mask)
    tl.atomic_add(out_ptr + word * cols + col, grad, mask=mask, sem="relaxed")  # nobody reads before the launch ends


def embedding_backward(ids: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    tokens, cols = grad.shape
    out.zero_()
    embedding_backward_kernel[(tokens,)](ids, grad, out, cols, BLOCK=triton.next_power_of_2(cols))
