"""Weights of four bits in two published formats, NF4 and MXFP4, made whole: codes are places in a table of 16 numbers.

Both tables are not evenly spaced, so a word's bits are no number times a scale, and `low_bit_matmul` cannot multiply
them as they are. A weight made whole is multiplied by `matmul`, or rounded anew by `quantize_weight`.
"""

from __future__ import annotations

import torch

from sublight.errors import BadInput

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)  # quantiles of the normal distribution, scaled to -1 … 1 (QLoRA, appendix E)
FP4 = (*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))  # e2m1
NESTED_BLOCK = 256  # codes of magnitudes that share a scale, where these are codes themselves
MX_BLOCK = 32  # codes that share a scale in the OCP's microscaling formats
MX_BIAS = 127  # of a scale's exponent; 255 stands for NaN


def decode_nf4(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    shape: tuple[int, ...],
    *,
    block: int = 64,
    nested: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """A weight of this shape from bytes of two NF4 codes, the first in the upper half, and the largest magnitude of
    each block of codes, as bitsandbytes stores them (`absmax`). Where it has quantized these, too (`use_double_quant`),
    `nested` is its `nested_quant_map` of 256 numbers, its `nested_absmax`, and its `nested_offset`.

    >>> decode_nf4(torch.tensor([0xF0, 0x7F], dtype=torch.uint8), torch.tensor([2.0]), (2, 2), dtype=torch.float32)
    tensor([[ 2., -2.],
            [ 0.,  2.]])
    """
    numel = 1
    for size in shape:
        numel *= size
    _check_bytes(packed, "NF4", -(-numel // 2))
    if nested is not None:
        absmax = _magnitudes(absmax, *nested)
    if not absmax.is_floating_point() or absmax.numel() != -(-numel // block):
        raise BadInput(
            f"absmax {absmax.dtype} {tuple(absmax.shape)} for {numel} codes in blocks of {block}: one float a block"
        )
    codes = torch.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], 1).reshape(-1)[:numel]
    values = torch.tensor(NF4, device=packed.device)[codes.long()]
    scales = absmax.reshape(-1).float().repeat_interleave(block)[:numel]
    return (values * scales).to(dtype).reshape(shape)


def _magnitudes(codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, offset: float) -> torch.Tensor:
    """Largest magnitudes from codes of their own: a place in a table, by a scale for every 256, and what all have."""
    blocks = -(-codes.numel() // NESTED_BLOCK)
    if codes.dtype != torch.uint8 or table.numel() != 256 or scales.numel() != blocks:
        raise BadInput(
            f"nested absmax: {codes.numel()} codes {codes.dtype}, {table.numel()} numbers, {scales.numel()} scales: "
            f"torch.uint8, 256 numbers, a scale for every {NESTED_BLOCK}"
        )
    scale = scales.reshape(-1).float().repeat_interleave(NESTED_BLOCK)[: codes.numel()]
    return table.reshape(-1).float()[codes.reshape(-1).long()] * scale + float(offset)


def decode_mxfp4(packed: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A weight (…, k) from bytes of two FP4 codes (…, k / 2), the first in the lower half, and the exponents of each
    block of 32, bytes (…, k / 32); (…, k / 32, 16) for the codes, as gpt-oss stores them, is taken, too.

    >>> decode_mxfp4(torch.full((1, 16), 0x92, dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8))[0, :3]
    tensor([ 2., -1.,  2.], dtype=torch.bfloat16)
    """
    _check_bytes(packed, "MXFP4", scales.numel() * MX_BLOCK // 2)
    whole = (*scales.shape, MX_BLOCK // 2)
    if scales.dtype != torch.uint8 or tuple(packed.shape) not in (whole, (*scales.shape[:-1], whole[-2] * whole[-1])):
        raise BadInput(
            f"MXFP4 codes {tuple(packed.shape)} with scales {scales.dtype} {tuple(scales.shape)}: bytes, a scale for "
            f"every {MX_BLOCK // 2} of the codes' last dimension"
        )
    codes = packed.reshape(whole)
    pairs = torch.stack([codes & 15, codes >> 4], -1).reshape(*scales.shape, MX_BLOCK)
    values = torch.tensor(FP4, device=packed.device)[pairs.long()]
    factor = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - MX_BIAS)
    factor = torch.where(scales == 255, torch.nan, factor)
    return (values * factor[..., None]).reshape(*scales.shape[:-1], -1).to(dtype)


def _check_bytes(packed: torch.Tensor, name: str, count: int) -> None:
    if packed.dtype != torch.uint8 or packed.numel() != count:
        raise BadInput(f"{name} codes are {count} bytes of two each (torch.uint8), not {packed.numel()} {packed.dtype}")
