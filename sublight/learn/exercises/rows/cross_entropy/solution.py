"""Cross entropy: one pass over the logits, then one more load, of the label's logit."""

import torch
import triton
import triton.language as tl

BLOCK = 1024
IGNORED = -100


@triton.jit
def cross_entropy_kernel(logits_ptr, labels_ptr, loss_ptr, cols, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = -float("inf")
    total = 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
    label = tl.load(labels_ptr + row)
    kept = label != IGNORED
    logit = tl.load(logits_ptr + row * stride + label, mask=kept, other=0.0).to(tl.float32)
    loss = tl.log(total) + (top - logit)
    tl.store(loss_ptr + row, tl.where(kept, loss, 0.0))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
    rows, cols = logits.shape
    cross_entropy_kernel[(rows,)](logits, labels, loss, cols, logits.stride(0), IGNORED=IGNORED, BLOCK=BLOCK)
