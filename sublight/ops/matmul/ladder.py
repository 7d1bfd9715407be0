"""The first steps on the way to a fast product: what each changes is its whole point; none of them uses tensor cores.

Every kernel computes one tile of C = A @ B with its epilogue; A is (m, k), B (k, n), of any strides.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished


@triton.jit
def _outer_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, residual_stride, scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS x COLS, one step of k at a time: a column of A and a row of B from memory, a multiply-add each.

    `naive` takes tiles that are high and narrow, so that lanes of a warp read places of B that lie a row apart;
    `coalesced` takes wide and flat ones: lanes read neighbours, and a fetched sector is used in full.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    a_at, b_at = a_ptr + row * am, b_ptr + col.to(tl.int64) * bn
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for _ in range(k):
        a = tl.load(a_at, mask=row < m, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=col < n, other=0.0).to(tl.float32)
        acc += a[:, None] * b[None, :]
        a_at += ak
        b_at += bk
    acc = finished(
        acc, bias_ptr, residual_ptr, row, col, m, n, residual_stride, scale,
        HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, ACTIVATION,
    )  # fmt: skip
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + row[:, None] * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


KERNELS = (
    Kernel(
        jit=_outer_kernel,
        narrow="the lesson's first step: a column of A is read element by element, and 16-bit elements are 2 bytes",
    ),
)
