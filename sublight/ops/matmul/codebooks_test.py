"""NF4 and MXFP4 against their formats' definitions, code by code, and what does not fit together."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.errors import BadInput
from sublight.ops.matmul.codebooks import NF4, decode_mxfp4, decode_nf4


def fp4(code: int) -> float:
    """Sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_every_code_of_mxfp4_under_every_scale() -> None:
    codes = torch.arange(32).remainder(16)
    packed = (codes[::2] | codes[1::2] << 4).to(torch.uint8).repeat(255, 1)
    exponents = torch.arange(255).to(torch.uint8)[:, None]
    found = decode_mxfp4(packed, exponents, dtype=torch.float64)
    wanted = torch.tensor([fp4(int(code)) for code in codes], dtype=torch.float64)[None]
    wanted = wanted * 2.0 ** (exponents.double() - 127)
    inside = wanted.abs() <= torch.finfo(torch.float32).max
    assert torch.equal(found[inside], wanted[inside]) and found[~inside].isinf().all()
    by_block = decode_mxfp4(packed.view(255, 1, 16), exponents, dtype=torch.float64)  # as gpt-oss stores them
    assert torch.equal(by_block, found)
    assert decode_mxfp4(packed[:1], torch.full((1, 1), 255, dtype=torch.uint8)).isnan().all()


def test_nf4_as_bitsandbytes_lays_it() -> None:
    """Rounded here as the format is defined: to the nearest of 16 numbers, blocks over the whole weight."""
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))  # the last block has 44
    blocks = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks / absmax[:, None])[..., None].sub(torch.tensor(NF4)).abs().argmin(-1).reshape(-1)[: weight.numel()]
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    found = decode_nf4(packed, absmax, (6, 50), dtype=torch.float32)
    scales = absmax.repeat_interleave(64)[: weight.numel()].view(6, 50)
    assert torch.equal(found, torch.tensor(NF4)[codes].view(6, 50) * scales)
    assert ((found - weight).abs() <= scales * 0.16).all()  # half of the widest gap between two numbers
    assert torch.equal(found.abs().reshape(-1).topk(1).values, weight.abs().reshape(-1).topk(1).values)


def test_nf4_whose_magnitudes_are_codes_themselves() -> None:
    """As bitsandbytes' `use_double_quant` stores them: the mean taken off, then 256 at a time by a table of 256."""
    generator = torch.Generator().manual_seed(1)
    absmax = torch.rand(300, generator=generator) + 0.5  # a block of 256, and one of 44
    packed = torch.randint(0, 256, (300 * 32,), generator=generator, dtype=torch.uint8)
    table = torch.linspace(-1, 1, 256).sign() * torch.linspace(-1, 1, 256).square()
    offset = absmax.mean()
    blocks = torch.nn.functional.pad(absmax - offset, (0, 212)).view(2, 256)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1).reshape(-1)[:300].to(torch.uint8)
    found = decode_nf4(packed, codes, (300, 64), nested=(table, scales, float(offset)), dtype=torch.float32)
    magnitudes = torch.cat([table[codes[:256].long()] * scales[0], table[codes[256:].long()] * scales[1]]) + offset
    assert torch.equal(found, decode_nf4(packed, magnitudes, (300, 64), dtype=torch.float32))
    assert ((magnitudes - absmax).abs() <= 0.008).all()


BYTES = torch.zeros(2, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decode_mxfp4(BYTES.int(), BYTES[:, :2]), "bytes of two each"),
        (lambda: decode_mxfp4(BYTES, BYTES[:, :3]), "96 bytes"),
        (lambda: decode_mxfp4(BYTES.view(4, 16), BYTES[:, :2]), "a scale for every 16"),
        (lambda: decode_mxfp4(BYTES, BYTES[:, :2].float()), "a scale for every 16"),
        (lambda: decode_nf4(BYTES, torch.ones(2), (3, 50)), "75 bytes"),
        (lambda: decode_nf4(BYTES, torch.ones(3), (2, 64)), "one float a block"),
        (lambda: decode_nf4(BYTES, BYTES[0, :2], (2, 64)), "one float a block"),
        (lambda: decode_nf4(BYTES, torch.ones(2), (2, 64), nested=(torch.ones(256), torch.ones(1), 0.0)), "uint8"),
        (lambda: decode_nf4(BYTES, BYTES[0, :2], (2, 64), nested=(torch.ones(16), torch.ones(1), 0.0)), "16 numbers"),
        (lambda: decode_nf4(BYTES, BYTES[0, :2], (2, 64), nested=(torch.ones(256), torch.ones(2), 0.0)), "2 scales"),
    ],
)
def test_what_does_not_fit_together(call: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()
