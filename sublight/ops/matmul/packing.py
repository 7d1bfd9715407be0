"""Weights of 1 to 8 bits: how they are packed, rounded, and made whole again. One packing serves every kernel.

A word of 32 bits holds 32 / bits values. Along k a weight comes in blocks of 16 words. At the same place of a word's
lower and upper half lie two neighbours along k, which one instruction makes two 16-bit floats in one register; at the
same place of a block's words lie 32 of them. So a kernel that takes its words apart place by place meets x in
contiguous pieces, whatever the number of bits (`low_bit.py`, `fragments.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sublight.errors import BadInput

WORDS = 16  # of a block
BITS = (1, 2, 4, 8)


def block_of(bits: int) -> int:
    """Values along k of a block of words.

    >>> block_of(8), block_of(4)
    (64, 128)
    """
    return WORDS * 32 // bits


def words_of(k: int, bits: int) -> int:
    """Words of a packed row of k values: whole blocks.

    >>> words_of(129, 4)
    32
    """
    return -(-k // block_of(bits)) * WORDS


def check_bits(bits: int) -> None:
    if bits not in BITS:
        raise BadInput(f"weights of {bits} bits: use {', '.join(map(str, BITS))}")


def check_group(k: int, group: int, bits: int) -> None:
    """That scales can be found: groups divide k, and a block, or are blocks."""
    block = block_of(bits)
    if group < 1 or k % group:
        raise BadInput(f"groups of {group} do not divide k = {k}: use a divisor of it, or {k} for one scale a row")
    if group != k and (group < 32 or (group % block and block % group)):
        small = ", ".join(str(size) for size in (32, 64, 128, 256) if size < block)
        raise BadInput(f"groups of {group}: use {small}, a multiple of {block}, or {k} for one scale a row")


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers (n, k) from 0 to 2**bits - 1, as int32 words (n, words); k is filled up with 0.

    >>> [hex(word) for word in pack(torch.arange(128)[None] % 16, 4)[0, :3].tolist()]  # neighbours are 16 bits apart
    ['0x11110000', '0x33332222', '0x55554444']
    """
    check_bits(bits)
    if values.dim() != 2 or values.is_floating_point():
        raise BadInput(f"pack takes whole numbers of shape (n, k), not {values.dtype} {tuple(values.shape)}")
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= 2**bits):
        raise BadInput(f"values of {bits} bits are 0 to {2**bits - 1}, not {int(values.min())} to {int(values.max())}")
    n, k = values.shape
    filled = F.pad(values.to(torch.int64), (0, -k % block_of(bits))).view(n, -1, 16 // bits, WORDS, 2)
    words = (filled << _places(bits, values.device)).sum((2, 4)).view(n, -1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack(packed: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The whole numbers again, (n, k), as int32."""
    check_bits(bits)
    n = packed.shape[0]
    if packed.dtype != torch.int32 or packed.dim() != 2 or packed.shape[1] != words_of(k, bits):
        raise BadInput(f"{packed.dtype} {tuple(packed.shape)} is not packed from k = {k} of {bits} bits")
    words = packed.view(n, -1, 1, WORDS, 1)
    values: torch.Tensor = (words >> _places(bits, packed.device)) & (2**bits - 1)
    return values.reshape(n, -1)[:, :k]


def _places(bits: int, device: torch.device) -> torch.Tensor:
    """The bits of a word where values begin: (places in a half, 1, half)."""
    in_half = bits * torch.arange(16 // bits, device=device, dtype=torch.int32)
    return in_half[:, None, None] + torch.tensor([0, 16], device=device, dtype=torch.int32)


def quantize_weight(
    weight: torch.Tensor, bits: int = 4, group: int = 128, *, symmetric: bool = False, rounds: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed, scales, zeros) of a weight (n, k): value = (whole number - zero) * scale, for each group along k.

    Scales and zeros are (n, groups): a sector of memory holds those of the next blocks along k.
    To the nearest; with `symmetric` the zero is the middle. `rounds` moves zeros towards where the error is smallest,
    with large errors counting less (half-quadratic quantization).
    """
    check_bits(bits)
    if weight.dim() != 2 or not weight.is_floating_point():
        raise BadInput(f"quantize_weight takes a weight (n, k) in floats, not {weight.dtype} {tuple(weight.shape)}")
    n, k = weight.shape
    check_group(k, group, bits)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    w = weight.detach().float().view(n, k // group, group)
    if symmetric:
        scale = stored_above(w.abs().amax(-1) / max(middle - 0.5, 0.5), weight.dtype)
        zero = torch.full_like(scale, middle if bits > 1 else 0.5)
    else:
        low, high = w.amin(-1), w.amax(-1)
        least = low.abs() / (torch.finfo(weight.dtype).max / 2)  # of a narrow group far from 0: its zero has to fit
        scale = torch.where(low == high, 0.0, torch.maximum((high - low) / most, least))
        scale = stored_above(scale, weight.dtype)
        zero = -low / torch.where(scale == 0, 1.0, scale)
    constant = scale == 0  # a group of one value: that value is its scale, or 0
    scale = torch.where(constant, torch.where(w[..., 0] == 0, 1.0, w[..., 0]), scale)
    zero = torch.where(constant, torch.where(w[..., 0] == 0, 0.0, -1.0), zero)
    scale, zero = (x.to(weight.dtype).float() for x in (scale, zero))  # as they will be stored
    no_scale = "the weight has NaN or infinite values, or a range beyond its data type: no scale fits it"
    if weight.device.type != "meta" and not bool((scale * most).isfinite().all()):
        raise BadInput(no_scale)

    def nearest(zero: torch.Tensor) -> torch.Tensor:
        return (w / scale[..., None] + zero[..., None]).round().clamp(0, most)

    for _ in range(rounds):
        q = nearest(zero)
        error = w - (q - zero[..., None]) * scale[..., None]
        sparse = error.sign() * F.relu(error.abs() - error.abs().mean(-1, keepdim=True))
        moved = (q - (w - sparse) / scale[..., None]).mean(-1).to(weight.dtype).float()
        zero = torch.where(constant, zero, moved)
    q = nearest(zero)
    ends = ((torch.stack([q.amin(-1), q.amax(-1)]) - zero) * scale).to(weight.dtype)
    if weight.device.type != "meta" and not bool(ends.isfinite().all()):
        raise BadInput(no_scale)
    return pack(q.view(n, k).int(), bits), scale.to(weight.dtype), zero.to(weight.dtype)


def stored_above(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as a data type holds them, none smaller than it was: so that a group's ends stay within reach."""
    stored = scale.to(dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    above = (stored.view(whole) + 1).view(dtype)  # the next number of a positive one
    return torch.where(stored.float() < scale, above, stored).float()


def dequantize(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The weight (n, k) that these stand for, in the data type of the scales."""
    group = k // scales.shape[1]
    values = unpack(packed, bits, k).to(torch.promote_types(scales.dtype, torch.float32))
    wide = (x.to(values.dtype).repeat_interleave(group, 1) for x in (zeros, scales))
    return ((values - next(wide)) * next(wide)).to(scales.dtype)
