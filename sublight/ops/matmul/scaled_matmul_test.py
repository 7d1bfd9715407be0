"""fp8 products: every kernel by every kind of scale, odd sizes and layouts; what is refused, and who takes a call."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.device import PRETEND, Facts
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.matmul import tiles
from sublight.ops.matmul.scaled_matmul import DEFAULT_OUT, OUT, SCALED_MATMUL, plan_by, reference, scaled_matmul
from sublight.ops.matmul.tiles import Split, Tile
from sublight.ops.quantize.quantize import quantize_fp8, quantize_fp8_blocks

SCALINGS = ("tensor", "row", "columns", "blocks")
PROVIDERS = tuple(SCALED_MATMUL.providers)


def drawn(scaling: str, m: int, n: int, k: int, device: str) -> tuple[Any, ...]:
    """Numbers whose size differs from block to block, so that a scale taken from the wrong place shows."""
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    for rows in (x, weight):
        rows *= torch.rand(rows.shape[0], 1, device=device) + 0.1
        rows *= (torch.arange(k, device=device) // 128 % 3 + 1.0)[None, :]
    if scaling in ("tensor", "row"):
        (a, scale_a), (b, scale_b) = quantize_fp8(x), quantize_fp8(weight)
        if scaling == "tensor":
            return a, b.T, scale_a.max().float(), scale_b.max().float()
        return a, b.T, scale_a.float().flatten(), scale_b.float().T
    (a, scale_a), (b, scale_b) = quantize_fp8_blocks(x), quantize_fp8_blocks(weight)
    return a, b.T, scale_a, scale_b.T if scaling == "columns" else scale_b[::128].T.contiguous()


@pytest.mark.parametrize(("m", "n", "k"), [(17, 15, 130), (65, 130, 260)])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_kernel_by_every_scale(provider: str, scaling: str, m: int, n: int, k: int, device: str) -> None:
    ours = SCALED_MATMUL.providers[provider]

    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        inputs = drawn(scaling, m, n, k, device)
        if reason := ours.why_not(*inputs):
            pytest.skip(reason)
        bias = torch.randn(n, device=device).to(OUT[DEFAULT_OUT])
        return correct.forward_errors(ours.launch, reference, (*inputs, bias))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.skipif(HAS_GPU, reason="tries the interpreter's small tiles")
def test_pieces_along_k_are_scaled_once() -> None:
    tile = Tile(bm=32, bn=32, bk=16, warps=4, stages=4, group=2)  # the plan makes it 32 of k
    tokens = tiles.TRIED_SPLIT.set(Split(tile=tile, rounds=1, pieces=2)), PRETEND.set(Facts(multiprocessors=4))
    try:
        inputs = drawn("row", 40, 70, 100, "cpu")
        plan = plan_by("persistent", *inputs, None, DEFAULT_OUT, True)
        assert plan.kernel == "_align_kernel, _split_kernel, _add_pieces_kernel"
        errors = correct.forward_errors(SCALED_MATMUL.providers["persistent"].launch, reference, inputs)
        assert errors[0].ok, errors[0]
    finally:
        tiles.TRIED_SPLIT.reset(tokens[0])
        PRETEND.reset(tokens[1])


@pytest.mark.skipif(HAS_GPU, reason="there PyTorch's product wants codes that lie along k")
@pytest.mark.parametrize("provider", ["promoted", "persistent"])
def test_codes_that_do_not_lie_along_k_go_by_pointers(provider: str) -> None:
    a, b, scale_a, scale_b = drawn("row", 20, 24, 40, "cpu")
    launch = SCALED_MATMUL.providers[provider].launch
    for moved in (b.contiguous(), b.T.repeat_interleave(2, 1)[:, ::2].T):  # k apart, and nothing in one piece
        assert torch.equal(moved.float(), b.float())
        assert plan_by(provider, a, moved, scale_a, scale_b, None, DEFAULT_OUT, False).kernel == "_codes_kernel"
        assert torch.equal(launch(a, moved, scale_a, scale_b), launch(a, b, scale_a, scale_b))


@pytest.mark.parametrize(("capability", "provider"), [(80, "torch"), (90, "promoted"), (120, "promoted")])
def test_a_gpu_without_fp8_is_planned_as_it_runs(capability: int, provider: str) -> None:
    token = PRETEND.set(Facts(capability=capability))
    try:
        inputs = SCALED_MATMUL.inputs({"m": 33, "n": 65, "k": 65, "block": 0}, "float8_e4m3fn", "meta", 0)
        assert SCALED_MATMUL.plan(*inputs).provider == provider
    finally:
        PRETEND.reset(token)


def test_small_scales_are_not_multiplied_with_each_other(device: str) -> None:
    """1e-20 twice is no normal number of fp32; a sum of codes times one, then the other, is."""
    a, b, *_ = drawn("tensor", 4, 16, 32, device)
    small, one = torch.full((), 1e-20, device=device), torch.ones((), device=device)
    ours = SCALED_MATMUL.launch(a, b, small, small, None, "float32").double()
    expected = SCALED_MATMUL.launch(a, b, one, one, None, "float32").double() * small.double() ** 2
    assert ((ours - expected).abs() <= 2.0**-22 * expected.abs()).all()  # two roundings of fp32


@pytest.mark.parametrize(
    ("capability", "fast", "kernel"),
    [(90, True, "_split_kernel, _add_pieces_kernel"), (90, False, "_promoted_kernel"), (120, True, "_codes_kernel")],
)
def test_what_runs_where(capability: int, fast: bool, kernel: str) -> None:
    token = PRETEND.set(Facts(capability=capability))
    try:
        inputs = SCALED_MATMUL.inputs({"m": 512, "n": 10240, "k": 16384, "block": 0}, "float8_e4m3fn", "meta", 0)
        assert plan_by("persistent" if fast else "promoted", *inputs, None, "bfloat16", fast).kernel == kernel
    finally:
        PRETEND.reset(token)


def test_bad_input_is_refused_in_one_line(device: str) -> None:
    a, b, scale_a, scale_b = drawn("row", 4, 16, 32, device)
    with pytest.raises(BadInput, match=r"codes \(m, k\) and \(k, n\) of float8_e4m3fn"):
        scaled_matmul(a.float(), b, scale_a, scale_b)
    with pytest.raises(BadInput, match="scales are float32, not"):
        scaled_matmul(a, b, scale_a.half(), scale_b)
    with pytest.raises(BadInput, match="neither tensors nor rows nor blocks"):
        scaled_matmul(a, b, scale_a[:3], scale_b)
    with pytest.raises(BadInput, match="bfloat16, float16, float32, not"):
        scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.float64)
    with pytest.raises(BadInput, match=r"bias is bfloat16 \(16,\)"):
        scaled_matmul(a, b, scale_a, scale_b, torch.ones(16, device=device))
    assert scaled_matmul(a[:0], b, scale_a[:0], scale_b).shape == (0, 16)
