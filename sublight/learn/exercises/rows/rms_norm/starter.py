"""RMSNorm of each row. Page: `sublight learn show rms_norm`. Check: `sublight learn check rms_norm`."""

import torch
import triton
import triton.language as tl

EPS = 1e-6


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, cols, x_stride, out_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    # TODO: load the row, the mean of its squares, the reciprocal of the root, times weight, store


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    # TODO: launch one program a row
