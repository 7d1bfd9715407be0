"""Codes and scales, one by one, which the rule of ops_test cannot see: numbers half a step off would pass it.

A code is right where it is the nearest to x / scale. PyTorch's composition divides in fp32 and so do our kernels, so
theirs are the same codes, all of them. RMSNorm comes before the division in the fused op, and rounds: there a code may
lie across a boundary, but no further and no more often than twice PyTorch's own do against float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.device import PRETEND, Facts
from sublight.conftest import HAS_GPU
from sublight.correct import Inputs
from sublight.cost import Shape, shape_text
from sublight.errors import BadInput
from sublight.op import Op
from sublight.ops.quantize import codes, quantize, rms_norm_quantize
from sublight.ops.quantize.codes import LEAST_SCALE, Kind, Pair
from sublight.ops.quantize.quantize import QUANTIZE_FP8, QUANTIZE_FP8_BLOCKS, QUANTIZE_INT8, QUANTIZE_INT8_BLOCKS
from sublight.ops.quantize.rms_norm_quantize import RMS_NORM_FP8, RMS_NORM_INT8

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")  # the interpreter's bf16 is wrong
PLAIN = [QUANTIZE_INT8, QUANTIZE_FP8, QUANTIZE_INT8_BLOCKS, QUANTIZE_FP8_BLOCKS]
FUSED = [RMS_NORM_INT8, RMS_NORM_FP8]
EACH_PLAIN = pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.name)
EACH_KIND = pytest.mark.parametrize("kind", codes.KINDS)
SHAPES = [pytest.param(op, shape, id=f"{op.name}-{shape_text(shape)}") for op in PLAIN for shape in op.test_shapes]


def assert_same(ours: Pair, theirs: Pair) -> None:
    assert ours[0].dtype == theirs[0].dtype
    assert torch.equal(ours[0].float(), theirs[0].float())  # a zero of fp8 may lose its sign
    assert torch.equal(ours[1].view(torch.int32), theirs[1].contiguous().view(torch.int32))  # NaN is itself there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), SHAPES)
def test_codes_and_scales_are_those_of_a_division(op: Op, shape: Shape, dtype: str, device: str) -> None:
    (x,) = op.inputs(shape, dtype, device, 3)
    for power in (-12, 0, 10) if dtype == "float16" else (-90, -12, 0, 60):
        assert_same(op.launch(x * 2.0**power), op.reference(x * 2.0**power))


def test_whole_numbers_round_to_nearest_ties_to_even(device: str) -> None:
    x = torch.arange(-254, 255, device=device) / 2  # the largest is 127, so one step is one
    q, scale = QUANTIZE_INT8.launch(x[None])
    assert scale.item() == 1
    assert torch.equal(q[0], torch.round(x).to(torch.int8))
    assert q[0].float().sub(x).abs().max() == 0.5


def test_every_fp8_number_and_what_lies_between(device: str) -> None:
    whole = torch.arange(-127, 127, dtype=torch.int8).view(torch.float8_e4m3fn).float()
    exact = whole[torch.isfinite(whole)].unique()
    ties = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, ties, ties.nextafter(exact[1:]), ties.nextafter(exact[:-1]), exact / 2**8]).to(device)
    q, scale = QUANTIZE_FP8.launch(x[None])
    assert scale.item() == 1
    assert torch.equal(q[0].float(), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(q[0, : len(exact)].float(), exact.to(device))


@EACH_PLAIN
def test_zeros_come_back_as_zeros(op: Op, device: str) -> None:
    x = torch.randn(5, 300, device=device)
    x[1], x[3] = 0.0, -0.0
    x[2] *= 1e-38
    q, scale = op.launch(x)
    assert_same((q, scale), op.reference(x))
    assert (scale[1] == LEAST_SCALE).all()
    assert not codes.dequantize(q, scale, 128 if "blocks" in op.name else None)[[1, 3]].any()


@EACH_PLAIN
@pytest.mark.parametrize("cols", [300, 3000, 40_000])
def test_what_is_not_finite_keeps_to_its_scale(op: Op, cols: int, device: str) -> None:
    x = torch.randn(4, cols, device=device)
    x[0, 7], x[1, cols - 1], x[2, 150] = math.nan, math.inf, -math.inf
    q, scale = op.launch(x)
    assert_same((q, scale), op.reference(x))
    size = 128 if "blocks" in op.name else None
    numbers = codes.dequantize(q, scale, size)
    odd = ~torch.isfinite(x).view(4, -1)
    spread = torch.nn.functional.pad(odd, (0, -cols % (size or cols))).view(4, -1, size or cols).any(-1, keepdim=True)
    expected = spread.expand(-1, -1, size or cols).reshape(4, -1)[:, :cols]
    assert torch.equal(torch.isnan(numbers), expected)
    assert (q.float()[expected] == 0).all()


def grid_of(op: Op, device: str) -> torch.Tensor:
    """The numbers that codes can be."""
    every = torch.arange(-128, 128, device=device).to(torch.int8)
    numbers = (every if op.name.endswith("int8") else every.view(torch.float8_e4m3fn)).double()
    return numbers[numbers.abs() <= codes.MOST["int8" if op.name.endswith("int8") else "fp8"]].unique()


def ratio_of(op: Op, inputs: Inputs) -> torch.Tensor:
    """What codes are rounded from, in float64."""
    doubles = tuple(x.double() for x in inputs)
    return rms_norm_quantize.rms_norm(*doubles) / op.reference(*doubles)[1]


def hard_inputs(op: Op, dtype: str, device: str) -> Inputs:
    """Rows of which all but zeros and the largest are within 32 roundings of fp32 of the middle between two codes."""
    x, weight = op.inputs({"rows": 64, "cols": 2048}, dtype, device, 5)
    generator = torch.Generator(device=device).manual_seed(6)
    near = 1 + 2**-18 * (torch.rand(x.shape, generator=generator, device=device, dtype=torch.float64) - 0.5)
    grid, ratio = grid_of(op, device), ratio_of(op, (x, weight))
    middle = ((grid[1:] + grid[:-1]) / 2)[(torch.searchsorted(grid, ratio) - 1).clamp(0, len(grid) - 2)]
    kept = (ratio == 0) | (ratio.abs() == ratio.abs().amax(-1, keepdim=True))
    return torch.where(kept, x, (x.double() * middle * near / ratio).to(x.dtype)), weight


def off(op: Op, call: Callable[..., Pair], inputs: Inputs) -> tuple[int, float]:
    """How many codes are not the nearest to float64's ratio, and by how much at most they are further than that is."""
    grid, ratio = grid_of(op, inputs[0].device.type), ratio_of(op, inputs)
    nearest = grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, ratio)]
    distance = (call(*inputs)[0].double() - ratio).abs() - (nearest - ratio).abs()
    return int((distance > 0).sum()), float(distance.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", FUSED, ids=lambda op: op.name)
def test_fused_codes_cross_a_boundary_no_more_than_pytorchs(op: Op, dtype: str, device: str) -> None:
    inputs = hard_inputs(op, dtype, device)
    (ours, ours_most), (theirs, theirs_most) = (off(op, call, inputs) for call in (op.launch, op.reference))
    assert theirs > 1000  # the inputs are hard
    assert ours <= 2 * theirs
    assert ours_most <= 2 * theirs_most


WRONG: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda q: torch.zeros_like(q),
    lambda q: torch.cat([q[:-1], q[-1:] + 1]),  # the last row
    lambda q: q - (torch.arange(q.shape[1]) % 50 == 0).to(q.dtype),  # now and then one too few
)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_boundary_check_finds_wrong_codes(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    op = RMS_NORM_INT8
    inputs = hard_inputs(op, "float16", "cpu")
    theirs = off(op, op.reference, inputs)
    ours = off(op, lambda *x: (wrong(op.reference(*x)[0]), None), inputs)
    assert ours[0] > 2 * theirs[0] or ours[1] > 2 * theirs[1]


@EACH_KIND
def test_rms_norm_of_strange_rows(kind: Kind, device: str) -> None:
    for cols in (300, 3000, 20_000):
        x, weight = torch.randn(4, cols, device=device), torch.ones(cols, device=device)
        x[0, 7], x[1, 8], x[2] = math.nan, math.inf, 0.0
        q, scale = rms_norm_quantize.launch(x, weight, kind=kind)
        assert torch.isnan(scale[:2]).all()
        assert not q[:3].float().any()
        assert scale[2] == LEAST_SCALE
        assert torch.isfinite(scale[3])
        assert q[3].float().abs().max() == codes.MOST[kind]
        weight[7] = math.nan
        q, scale = rms_norm_quantize.launch(x, weight, kind=kind)
        assert torch.isnan(scale).all()
        assert not q.float().any()


@pytest.mark.parametrize("block_size", quantize.BLOCK_SIZES)
def test_blocks_of_any_size(block_size: int, device: str) -> None:
    x = torch.randn(3, 5, 700, device=device)
    q, scale = quantize.launch_blocks(x, block_size, kind="int8")
    assert scale.shape == (3, 5, -(-700 // block_size))
    assert_same((q, scale), codes.quantize(x, "int8", block_size))
    assert_same(quantize.quantize_int8_blocks(x, block_size), (q, scale))


def test_each_kernel_is_reached(device: str) -> None:
    for op in (*PLAIN[:2], *FUSED):
        plans = [op.plan(*op.inputs(shape, "float32", device, 0)) for shape in op.test_shapes]
        assert {plan.kernel for plan in plans} == {"_tile_kernel", "_row_kernel", "_chunks_kernel"}


@pytest.mark.parametrize("op", [*PLAIN, *FUSED], ids=lambda op: op.name)
@pytest.mark.parametrize("capability", [80, 90])
def test_fp8_is_shown_as_bits_where_nothing_converts_to_it(
    op: Op, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "is_interpreted", lambda: False)
    token = PRETEND.set(Facts(capability=capability))
    try:
        plan = op.plan(*op.inputs({"rows": 4, "cols": 256}, "float16", "cpu", 0))
    finally:
        PRETEND.reset(token)
    by_bits = "fp8" in op.name and capability < 89
    assert plan.steps[0].constants["KIND"] == ("fp8_bits" if by_bits else "fp8" if "fp8" in op.name else "int8")
    assert plan.buffers["codes"].bits == (torch.int8 if by_bits else None)
    assert plan.buffers["codes"].dtype == (torch.float8_e4m3fn if "fp8" in op.name else torch.int8)


def test_rows_where_they_are_and_rows_that_are_copied(device: str) -> None:
    x, weight = torch.randn(6, 200, device=device), torch.randn(400, device=device)[::2]
    assert QUANTIZE_INT8.plan(x[:, 1:101]).copies == ()
    assert QUANTIZE_INT8.plan(x.T).copies == ("x",)
    assert RMS_NORM_FP8.plan(x, weight).copies == ("weight",)
    for op, inputs in ((QUANTIZE_FP8, (x[:, 1:101],)), (QUANTIZE_FP8, (x.T,)), (RMS_NORM_FP8, (x, weight))):
        assert_same(op.call(*inputs), op.launch(*(x.contiguous() for x in inputs)))


@EACH_PLAIN
def test_bad_input_is_one_clear_line(op: Op) -> None:
    with pytest.raises(BadInput, match="floating-point"):
        op.call(torch.ones(3, 4, dtype=torch.int32))
    with pytest.raises(BadInput, match="column"):
        op.call(torch.ones(3, 0))
    with pytest.raises(BadInput, match="column"):
        op.call(torch.tensor(1.0))
    if "blocks" in op.name:
        with pytest.raises(BadInput, match="32, 64, 128, 256"):
            op.call(torch.ones(3, 4), 100)


def test_codes_have_no_gradient() -> None:
    x, weight = torch.randn(3, 40, requires_grad=True), torch.ones(40, requires_grad=True)
    results = [op.call(x) for op in PLAIN] + [op.call(x, weight) for op in FUSED]
    assert not any(y.requires_grad for pair in results for y in pair)


@pytest.mark.gpu
@EACH_PLAIN
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_the_codes_of_a_large_tensor(op: Op, dtype: str) -> None:
    for cols in (768, 1600, 4096, 12288, 32768, 5001):
        (x,) = op.inputs({"rows": 2**24 // cols, "cols": cols}, dtype, "cuda", cols)
        assert_same(op.launch(x), op.reference(x))
