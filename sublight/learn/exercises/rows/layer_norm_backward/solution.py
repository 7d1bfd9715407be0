"""LayerNorm backward: a row is read once, mean and deviation are computed again, two sums make the gradient."""

import torch
import triton
import triton.language as tl

EPSILON = 1e-5


@triton.jit
def layer_norm_backward_kernel(x_ptr, weight_ptr, grad_ptr, dx_ptr, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * cols + col, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * cols + col, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / cols
    centred = tl.where(mask, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / cols + eps)
    normal = centred * scale
    inner = grad * weight
    along_ones = tl.sum(inner, axis=0) / cols
    along_x = tl.sum(inner * normal, axis=0) / cols
    dx = (inner - along_ones - normal * along_x) * scale
    tl.store(dx_ptr + row * cols + col, dx, mask=mask)


def layer_norm_backward(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, dx: torch.Tensor) -> None:
    rows, cols = x.shape
    block = triton.next_power_of_2(cols)
    layer_norm_backward_kernel[(rows,)](x, weight, grad, dx, cols, EPSILON, BLOCK=block, num_warps=8)
