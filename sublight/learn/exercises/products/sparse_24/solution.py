"""2:4 weights times a vector: half of the weights are read, and two bits of each say which x it meets."""

import torch
import triton
import triton.language as tl

ROWS, WORDS = 4, 64  # of a block: eight values to a word


@triton.jit
def sparse_24_kernel(values_ptr, places_ptr, x_ptr, out_ptr, rows, words, ROWS: tl.constexpr, WORDS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    each = tl.arange(0, 8)[None, None, :]
    total = tl.zeros([ROWS, WORDS, 8], dtype=tl.float32)
    for start in range(0, words, WORDS):
        word = (start + tl.arange(0, WORDS))[None, :]
        mask = (row < rows) & (word < words)
        places = tl.load(places_ptr + row * words + word, mask=mask, other=0).to(tl.int32)
        number = (word * 8)[:, :, None] + each
        value = tl.load(values_ptr + (row * words * 8)[:, :, None] + number, mask=mask[:, :, None], other=0.0)
        near = (places[:, :, None] >> each * 2) & 3
        col = number // 2 * 4 + near
        x = tl.load(x_ptr + col, mask=mask[:, :, None], other=0.0)
        total += value.to(tl.float32) * x.to(tl.float32)
    sums = tl.sum(tl.sum(total, axis=2), axis=1)
    tl.store(out_ptr + row, sums[:, None], mask=row < rows)


def sparse_24(values: torch.Tensor, places: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    rows, words = places.shape
    grid = (triton.cdiv(rows, ROWS),)
    sparse_24_kernel[grid](values, places, x, out, rows, words, ROWS=ROWS, WORDS=WORDS)
