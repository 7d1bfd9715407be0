"""Packing there and back, rounding, and products with packed weights: every width, group and number of rows."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.matmul.low_bit import _two_at_once
from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL, WAYS, launched_by, low_bit_matmul, reference
from sublight.ops.matmul.packing import BITS, dequantize, pack, quantize_weight, unpack

ROWS = {"row": 1, "rows": 9, "whole": 20}


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from(BITS), n=st.integers(1, 5), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_what_is_packed_comes_back(bits: int, n: int, k: int, seed: int) -> None:
    values = torch.randint(2**bits, (n, k), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack(pack(values, bits), bits, k), values.int())


@pytest.mark.parametrize("provider", WAYS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("k", "group"), [(128, 32), (256, 64), (384, 128), (512, 256), (100, 100), (130, 130)])
@pytest.mark.parametrize("symmetric", (False, True))
def test_products_of_every_width_and_group(
    provider: str, bits: int, k: int, group: int, symmetric: bool, device: str
) -> None:
    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, Any] = {"generator": generator, "dtype": torch.float16}
        a, weight = (torch.randn(rows, k, **made).to(device) for rows in (ROWS[provider], 19))
        quantized = quantize_weight(weight, bits, group, symmetric=symmetric)

        def truth(a: Any, packed: Any, scales: Any, zeros: Any) -> Any:
            return reference(a, packed, scales, zeros, bits)

        return correct.forward_errors(lambda *args: launched_by(provider)(*args, bits), truth, (a, *quantized))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.parametrize(("dtype", "mantissa", "bias"), [(torch.bfloat16, 7, 127), (torch.float16, 10, 15)])
@pytest.mark.parametrize("bits", (1, 2, 4))
def test_the_instructions_that_make_two_floats_at_once(dtype: Any, mantissa: int, bias: int, bits: int) -> None:
    """NVIDIA's assembly, played here: the interpreter knows none, so without a GPU no product runs it."""
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(2**32, (2, 500), generator=generator)
    for place in range(32 // bits):
        ptx = _two_at_once(place, bits, mantissa, bias)
        parts = re.fullmatch(
            r"{ \.reg \.b32 t; prmt\.b32 t, \$1, \$2, 0x(\d+); sh([lr])\.\w32 t, t, (\d+); "
            r"lop3\.b32 \$0, t, (\d+), (\d+), 0xEA; }",
            ptx,
        )
        assert parts, ptx
        chosen, direction, by, mask, one = parts.groups()
        both = words[0] | (words[1] << 32)
        register = sum(((both >> 8 * int(byte)) & 255) << 8 * i for i, byte in enumerate(reversed(chosen)))
        register = register << int(by) if direction == "l" else register >> int(by)
        register = (register & 0xFFFFFFFF & int(mask)) | int(one)  # what 0xEA stands for
        halves = torch.stack([register & 0xFFFF, register >> 16]).to(torch.uint16).view(dtype)
        assert torch.equal(halves.double(), (2**bits + ((words >> place * bits) & (2**bits - 1))).double())


def test_rounding_is_to_the_nearest(device: str) -> None:
    weight = torch.randn(8, 256, device=device)
    for bits, group in ((8, 128), (4, 64), (2, 32)):
        packed, scales, zeros = quantize_weight(weight, bits, group)
        off = (dequantize(packed, scales, zeros, bits, 256) - weight).abs().view(8, -1, group)
        assert (off.amax(-1) <= scales * (0.5 + 1e-3)).all()


def test_fitted_zeros_are_nearer(device: str) -> None:
    """Half-quadratic rounding lets go of outliers; over the bulk of the weights the error falls."""
    generator = torch.Generator(device=device).manual_seed(0)
    weight = torch.randn(64, 512, generator=generator, device=device) ** 3
    plain, fitted = (
        (dequantize(*quantize_weight(weight, 3 + 1, 128, rounds=rounds), 4, 512) - weight).abs().mean()
        for rounds in (0, 20)
    )
    assert fitted < plain


@pytest.mark.parametrize("value", (0.0, 3.0, -3.0))
@pytest.mark.parametrize("symmetric", (False, True))
def test_a_group_of_one_value_is_kept(value: float, symmetric: bool) -> None:
    weight = torch.full((2, 128), value)
    for bits in BITS:
        made = dequantize(*quantize_weight(weight, bits, 128, symmetric=symmetric), bits, 128)
        assert torch.equal(made, weight) or (
            symmetric and bits > 1 and (made - weight).abs().max() <= 3 / 2 ** (bits - 1)
        )


@pytest.mark.parametrize("scale", (1e-6, 1e6))
def test_extreme_scales(scale: float, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        a, weight = torch.randn(3, 256, device=device), scale * torch.randn(10, 256, device=device)
        return correct.forward_errors(launched_by("rows"), reference, (a, *quantize_weight(weight)))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.skipif(HAS_GPU, reason="the interpreter's few programs split otherwise")
def test_plans_go_by_the_number_of_rows() -> None:
    chosen = []
    for rows in (1, 2, 128, 129):
        inputs = LOW_BIT_MATMUL.inputs({"m": rows, "n": 8, "k": 128, "group": 128}, "float16", "cpu", 0)
        chosen.append(LOW_BIT_MATMUL.plan(*inputs).provider)
    assert chosen == ["row", "rows", "rows", "whole"]


def test_bad_input_is_refused_in_one_line() -> None:
    weight, a = torch.randn(4, 256), torch.randn(2, 256)
    packed, scales, zeros = quantize_weight(weight)
    for call, words in (
        (lambda: quantize_weight(weight, 3), "weights of 3 bits: use 1, 2, 4, 8"),
        (lambda: quantize_weight(weight, 4, 100), "groups of 100 do not divide k = 256"),
        (lambda: quantize_weight(weight, 4, 16), "groups of 16: use 32, 64"),
        (lambda: pack(torch.tensor([[16]]), 4), "values of 4 bits are 0 to 15, not 16 to 16"),
        (lambda: pack(weight, 4), "whole numbers"),
        (lambda: low_bit_matmul(a, packed, scales, zeros, 8), "is not packed from k = 256 of 8 bits"),
        (lambda: low_bit_matmul(a, packed, scales[:, :1], zeros), "zeros"),
        (lambda: low_bit_matmul(a[:, :100], packed, scales, zeros), "is not packed from k = 100"),
    ):
        with pytest.raises(BadInput, match=words):
            call()
