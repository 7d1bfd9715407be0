"""The gradient of an embedding. Page: `sublight learn show embedding_backward`. Check: `sublight learn check`."""

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
    old = tl.load(out_ptr + word * cols + col, mask=mask)
    tl.store(out_ptr + word * cols + col, old + grad, mask=mask)  # TODO 2: two programs may have the same word


def embedding_backward(ids: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    tokens, cols = grad.shape
    # TODO 1: words that no token has need a zero, and sums need to begin with one
    embedding_backward_kernel[(tokens,)](ids, grad, out, cols, BLOCK=triton.next_power_of_2(cols))
