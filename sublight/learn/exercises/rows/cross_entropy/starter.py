"""Cross entropy of each row. Page: `sublight learn show cross_entropy`. Check: `sublight learn check cross_entropy`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024
IGNORED = -100  # a label that means: no loss for this row


@triton.jit
def cross_entropy_kernel(logits_ptr, labels_ptr, loss_ptr, cols, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = -float("inf")
    total = 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        # TODO 1: maximum and sum so far, as in online_softmax
    label = tl.load(labels_ptr + row)
    # TODO 2: loss = log of the sum - the logit of the label; 0 where the label is IGNORED


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
    rows, cols = logits.shape
    cross_entropy_kernel[(rows,)](logits, labels, loss, cols, logits.stride(0), IGNORED=IGNORED, BLOCK=BLOCK)
