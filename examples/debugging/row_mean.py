"""The mean of each row, with a planted mistake: `python row_mean.py`, and docs/debugging.md finds it in five ways.

TRITON_INTERPRET=1 python examples/debugging/row_mean.py           on the CPU
TRITON_INTERPRET=1 python examples/debugging/row_mean.py --print   what each program loaded
python examples/debugging/row_mean.py --device cuda --print        the same on a GPU
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _row_mean_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr, PRINT: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + places)  # planted: no mask, so that the next row's numbers come along
    if PRINT:
        tl.device_print("x", x)
    total = tl.sum(x, 0)
    tl.store(y_ptr + row, total / cols)


def main() -> None:
    device = "cuda" if "cuda" in sys.argv else "cpu"
    x = torch.arange(1.0, 13.0, device=device).view(2, 6)
    y = torch.empty(2, device=device)
    _row_mean_kernel[(2,)](x, y, 6, BLOCK=8, PRINT="--print" in sys.argv)
    print("rows  ", x.tolist())
    print("means ", [round(mean, 2) for mean in y.tolist()])
    print("should be", x.mean(1).tolist())


if __name__ == "__main__":
    main()
