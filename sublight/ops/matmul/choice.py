"""Whether a product is ours or cuBLAS's: by what runs on an H200 have shown (`benchmarks/products_h200.json`).

Of aligned operands both reach what the tensor cores can do, so cuBLAS keeps those; with fewer than 1024 rows it is
ahead, since its programs share what they load in pairs, which Triton's cannot. Ours are faster where memory decides
(one row), and where rows begin at odd places, where cuBLAS falls to a third or a sixth: a vocabulary of 50,257, a width
of 700. An activation in the same pass does not change that yet: only silu was faster so, in one run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sublight.backend.device import Facts
from sublight.ops.matmul.product import ENGINE_BYTES, Operand, Product
from sublight.ops.matmul.skinny import MOST_ROWS

ODD_ROWS = 256  # of A, where rows of A, B or C begin at odd places: with fewer, a copy of B costs more than it brings
ODD_FLOPS = 2e9
ROW_BYTES = 2 << 20  # of a weight that one row is multiplied by …
ROWS_BYTES = 512 << 20  # … or up to 64


def why_cublas(p: Product, operands: Sequence[Operand], dtype: torch.dtype, gpu: Facts) -> str:
    """Why cuBLAS takes a product; empty where ours is faster."""
    if gpu.capability != 90:
        return "cuBLAS: our products are timed on Hopper alone"
    if dtype.itemsize != 2 or p.batches > 1:
        return "cuBLAS: ours are faster in 16 bits, one product at a time"
    if p.m <= MOST_ROWS:
        return _why_not_few(p, p.n * p.k * dtype.itemsize)
    if not all(operand.is_whole for operand in operands):
        return "cuBLAS: an operand has no dimension that lies in one piece"
    if not all(operand.is_readable for operand in operands) or p.n * dtype.itemsize % ENGINE_BYTES:
        is_enough = p.m >= ODD_ROWS and 2.0 * p.m * p.n * p.k >= ODD_FLOPS
        return "" if is_enough else "cuBLAS: too little work to pay for aligned copies"
    return "cuBLAS: of aligned operands ours is as fast, not faster"


def _why_not_few(p: Product, weight_bytes: int) -> str:
    if p.ak != 1 or p.bk != 1:
        return "cuBLAS: few rows, of operands that do not lie along k"
    least = ROW_BYTES if p.m == 1 else ROWS_BYTES
    rows = "one row" if p.m == 1 else f"{p.m} rows"
    return "" if weight_bytes >= least else f"cuBLAS: {rows} with a weight below {least >> 20} MiB"
