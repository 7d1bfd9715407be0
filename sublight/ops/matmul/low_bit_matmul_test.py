"""Packing there and back, rounding, and products with packed weights: every width, group and number of rows."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

import sublight
from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.matmul.fragments import _added, _two_values
from sublight.ops.matmul.low_bit import _two_at_once
from sublight.ops.matmul.low_bit_matmul import (
    LOW_BIT_MATMUL,
    WAYS,
    WHY_NOT,
    launched_by,
    low_bit_matmul,
    reference,
)
from sublight.ops.matmul.packing import BITS, dequantize, pack, quantize_weight, unpack

ROWS = {"row": 1, "fragments": 5, "warpgroups": 20, "rows": 9, "whole": 20}
GROUPS = [(128, 32), (256, 64), (384, 128), (512, 256), (100, 100), (130, 130), (1536, 512)]


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from(BITS), n=st.integers(1, 5), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_what_is_packed_comes_back(bits: int, n: int, k: int, seed: int) -> None:
    values = torch.randint(2**bits, (n, k), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack(pack(values, bits), bits, k), values.int())


@pytest.mark.parametrize("provider", WAYS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("k", "group"), GROUPS)
@pytest.mark.parametrize("symmetric", (False, True))
def test_products_of_every_width_and_group(
    provider: str, bits: int, k: int, group: int, symmetric: bool, device: str
) -> None:
    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, Any] = {"generator": generator, "dtype": torch.float16}
        a, weight = (torch.randn(rows, k, **made).to(device) for rows in (ROWS[provider], 19))
        quantized = quantize_weight(weight, bits, group, symmetric=symmetric)
        if provider in WHY_NOT and (reason := WHY_NOT[provider](a, quantized[1], bits)):
            pytest.skip(reason)

        def truth(a: Any, packed: Any, scales: Any, zeros: Any) -> Any:
            return reference(a, packed, scales, zeros, bits)

        return correct.forward_errors(lambda *args: launched_by(provider)(*args, bits), truth, (a, *quantized))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.parametrize("quantized", (sublight.quantize_int8, sublight.quantize_fp8))
def test_activations_may_be_codes(quantized: Any, device: str) -> None:
    """Codes of 8 bits are exact in 16: what is left is the rounding of sums."""

    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(rows, 256, generator=generator).to(device) for rows in (5, 19))
        x[0] *= 300  # a row whose codes are as large as any other's, and its scale larger
        codes, scale_a = quantized(x)
        packed, scales, zeros = quantize_weight(weight, 4, 128)
        whole = dequantize(packed, scales, zeros, 4, 256)
        ours = low_bit_matmul(codes, packed, scales, zeros, scale_a=scale_a)
        theirs, truth = (codes.to(kind) * scale_a.to(kind) @ whole.to(kind).T for kind in (torch.float, torch.double))
        return [correct.error(f"row {row}", ours[row], theirs[row], truth[row]) for row in range(len(x))]

    error = correct.settled(draw)
    assert error.ok, error


def test_activations_that_are_neither_floats_nor_codes(device: str) -> None:
    """A weight as whole numbers would be zeros and ones: silently wrong."""
    quantized = quantize_weight(torch.randn(4, 128), 4, 128)
    codes, scale = torch.ones(2, 128, dtype=torch.int8), torch.ones(2, 1)
    for a, scale_a in (
        (codes, None),
        (codes.int(), scale),
        (codes.float(), scale),
        (codes, scale[:1]),
        (codes, scale.T),
    ):
        with pytest.raises(BadInput, match="scale_a"):
            low_bit_matmul(a, *quantized, scale_a=scale_a)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.full((2, 128), float("nan")), "NaN"),
        (torch.cat([torch.ones(2, 127), torch.full((2, 1), float("nan"))], 1), "NaN"),
        (torch.ones(128), "a weight"),
        (torch.ones(2, 128).int(), "floats"),
    ],
)
def test_weights_that_have_no_scale(weight: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        quantize_weight(weight)


def test_what_is_rounded_beyond_its_data_type_is_refused() -> None:
    """A fitted zero moves a group's ends, here past the largest number of fp16."""
    weight = torch.randn(2, 128, generator=torch.Generator().manual_seed(4)).mul(2e4).clamp(-65000, 65000).half()
    packed, scales, zeros = quantize_weight(weight, 2, symmetric=True)
    assert dequantize(packed, scales, zeros, 2, 128).isfinite().all()
    with pytest.raises(BadInput, match="a range beyond its data type"):
        quantize_weight(weight, 2, symmetric=True, rounds=5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(("m", "n", "k", "group"), [(1, 4096, 4096, 128), (8, 1000, 1536, 1536), (3, 16, 14336, 256)])
def test_a_few_rows_straight_into_the_tensor_cores(dtype: Any, m: int, n: int, k: int, group: int) -> None:
    """Whole tiles and others, one warp's blocks and many, by the plan; the same bits each time."""

    def draw(seed: int) -> list[correct.Error]:
        made: dict[str, Any] = {
            "generator": torch.Generator("cuda").manual_seed(seed),
            "dtype": dtype,
            "device": "cuda",
        }
        a, weight = torch.randn(m, k, **made), torch.randn(n, k, **made)
        inputs = (a, *quantize_weight(weight, 4, group))
        assert LOW_BIT_MATMUL.plan(*inputs).provider == "fragments"
        assert torch.equal(low_bit_matmul(*inputs), low_bit_matmul(*inputs))
        return correct.forward_errors(low_bit_matmul, reference, inputs)

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bits", (1, 2, 4))
def test_the_instructions_that_make_two_floats_at_once(dtype: Any, bits: int) -> None:
    """NVIDIA's assembly, played here: the interpreter knows none, so without a GPU no product runs it."""
    words = torch.randint(2**32, (500,), generator=torch.Generator().manual_seed(bits))
    is_bf16 = dtype == torch.bfloat16
    for place in range(16 // bits):
        wanted = torch.stack([(words >> place * bits + half) & (2**bits - 1) for half in (0, 16)])
        assert torch.equal(
            played(_two_at_once(place, bits, *((7, 127) if is_bf16 else (10, 15))), words, dtype), wanted + 2**bits
        )
        found = played(_two_values(place, bits, is_bf16), words, dtype)
        assert torch.equal(found, wanted + int(_added(place, bits, is_bf16)))


def played(ptx: str, words: Any, dtype: Any) -> Any:
    """The two floats of each word."""
    parts = re.fullmatch(
        r"{ \.reg \.b32 t; sh([lr])\.\w32 t, \$[12], (\d+); lop3\.b32 (?:t|\$0), t, (\d+), (\d+), 0xEA; "
        r"(?:mov\.b32 {\$0, \$1}, t; )?}",
        ptx,
    )
    assert parts, ptx
    direction, by, mask, one = parts.groups()
    register = words << int(by) if direction == "l" else words >> int(by)
    register = (register & 0xFFFFFFFF & int(mask)) | int(one)  # what 0xEA stands for
    return torch.stack([register & 0xFFFF, register >> 16]).to(torch.uint16).view(dtype).long()


def test_rounding_is_to_the_nearest(device: str) -> None:
    weight = torch.randn(8, 256, device=device)
    for bits, group in ((8, 128), (4, 64), (2, 32)):
        packed, scales, zeros = quantize_weight(weight, bits, group)
        off = (dequantize(packed, scales, zeros, bits, 256) - weight).abs().view(8, -1, group)
        assert (off.amax(-1) <= scales * (0.5 + 1e-3)).all()


@pytest.mark.parametrize("rounds", (0, 3))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_narrow_groups_far_from_zero(dtype: str, bits: int, rounds: int) -> None:
    """Their zeros are as many steps from the values as these are large; fp16 has no number beyond 65504 for that."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    for first, width in ((1.0, 1e-3), (-100.0, 0.06), (1.0, 0.02)):
        weight = (first + width * torch.rand(4, 128, generator=generator)).to(kind)
        packed, scales, zeros = quantize_weight(weight, bits, 128, rounds=rounds)
        off = (dequantize(packed, scales, zeros, bits, 128).double() - weight.double()).abs()
        step, digit = scales.double().abs(), torch.finfo(kind).eps * abs(first)
        assert (off <= step * (0.5 if not rounds else 2.0) + digit).all() and scales.isfinite().all()


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
    for rows, dtype in ((1, "float32"), (1, "float16"), (2, "float32"), (128, "float16"), (129, "float16")):
        inputs = LOW_BIT_MATMUL.inputs({"m": rows, "n": 8, "k": 128, "group": 128}, dtype, "cpu", 0)
        chosen.append(LOW_BIT_MATMUL.plan(*inputs).provider)
    assert chosen == ["row", "rows", "rows", "rows", "whole"]


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
