"""Read an xray page. Page: `sublight learn show read_xray`. Check: `sublight learn check read_xray`."""

import torch
import triton
import triton.language as tl

WORST = ""  # TODO 1: the tensor whose access moves most sectors: "x", "y" or "out"
SECTORS = 0  # TODO 2: how many sectors one request of it takes
BLOCK = 1024


@triton.jit
def read_xray_kernel(x_ptr, y_ptr, out_ptr, rows, cols, BLOCK: tl.constexpr):  # TODO 3: mend it
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < rows * cols
    row = place // cols
    col = place % cols
    x = tl.load(x_ptr + place, mask=mask)
    y = tl.load(y_ptr + col * rows + row, mask=mask)
    tl.store(out_ptr + place, x + y, mask=mask)


def read_xray(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    read_xray_kernel[(triton.cdiv(rows * cols, BLOCK),)](x, y, out, rows, cols, BLOCK=BLOCK)


if __name__ == "__main__":  # for `sublight xray --record`
    x, y = torch.randn(4096, 2048), torch.randn(2048, 4096)
    read_xray(x, y, torch.empty_like(x))
