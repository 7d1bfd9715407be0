"""4-bit weights times a vector: eight of them come in one word, and become numbers where they are used."""

import torch
import triton
import triton.language as tl

GROUP, EACH = 128, 8  # weights that share a scale, weights in a word
ROWS, GROUPS = 4, 8


@triton.jit
def dequantize_kernel(
    x_ptr, packed_ptr, scales_ptr, out_ptr, rows, groups,
    GROUP: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words: tl.constexpr = GROUP // EACH
    total = tl.zeros([ROWS, GROUPS * words], dtype=tl.float32)
    for start in range(0, groups, GROUPS):
        word = start * words + tl.arange(0, GROUPS * words)
        inside = word < groups * words
        mask = (row[:, None] < rows) & inside[None, :]
        packed = tl.load(packed_ptr + row[:, None] * groups * words + word[None, :], mask=mask, other=0)
        scale = tl.load(scales_ptr + row[:, None] * groups + word[None, :] // words, mask=mask, other=0.0)
        part = tl.zeros([ROWS, GROUPS * words], dtype=tl.float32)
        for place in tl.static_range(EACH):
            code = (packed >> 4 * place) & 15
            x = tl.load(x_ptr + word // words * GROUP + place * words + word % words, mask=inside, other=0.0).to(
                tl.float32
            )
            part += (code - 8).to(tl.float32) * x[None, :]
        total += part * scale.to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, axis=1), mask=row < rows)


def dequantize(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    rows, groups = scales.shape
    grid = (triton.cdiv(rows, ROWS),)
    dequantize_kernel[grid](
        x, packed, scales, out, rows, groups, GROUP=GROUP, EACH=EACH, ROWS=ROWS, GROUPS=GROUPS, num_warps=1
    )
