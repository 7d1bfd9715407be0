"""What ops_test's shapes do not reach: halves of one tensor, the other gelu, tails, huge values, odd views."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import torch.nn.functional as F

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.gated import gated
from sublight.ops.kernels import column_sums, pointwise
from sublight.ops.pointwise import activation, bias_gelu
from sublight.ops.record import tuning

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["silu", "none", "tanh"])
def test_both_halves_of_one_tensor(by: gated.Gate, dtype: torch.dtype, device: str) -> None:
    x, dy = torch.randn(6, 5, 528, device=device).to(dtype), torch.randn(6, 5, 264, device=device).to(dtype)
    gate, up = gated.halves(x)
    assert gate.data_ptr() == x.data_ptr()
    apart = gate.contiguous(), up.contiguous()
    assert torch.equal(gated.launch(gate, up, by), gated.launch(*apart, by))
    together = gated.launch_halves_backward(dy, x, by)
    assert torch.equal(together, torch.cat(gated.launch_backward(dy, *apart, by), -1))


def test_one_tensor_alone_is_both_halves(device: str) -> None:
    x = torch.randn(3, 128, device=device, requires_grad=True)
    for call, act in ((gated.swiglu, F.silu), (gated.geglu, lambda gate: F.gelu(gate, approximate="tanh"))):
        expected = act(x[:, :64]) * x[:, 64:]
        torch.testing.assert_close(call(x), expected)
        (ours,), (theirs,) = (torch.autograd.grad(y.sum(), x) for y in (call(x), expected))
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.ops.sublight.gated_halves(x, "silu"), F.silu(x[:, :64]) * x[:, 64:])
    with pytest.raises(BadInput, match="even"):
        gated.swiglu(x[:, :63])


@pytest.mark.parametrize("name", ["gated_halves", "gated_backward"])
def test_opcheck_of_what_no_record_names(name: str, device: str) -> None:
    x = torch.randn(3, 128, device=device)
    args = (x.requires_grad_(), "tanh") if name == "gated_halves" else (x, x, x, "silu")
    assert set(torch.library.opcheck(getattr(torch.ops.sublight, name), args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "tanh"])
def test_every_gelu_is_as_right_as_pytorch(kind: activation.Approximate, dtype: torch.dtype, device: str) -> None:
    x, bias, up, dy = (2 * torch.randn(64, 256, device=device).to(dtype) for _ in range(4))
    bias = bias[0].clone()
    checks = [
        *correct.forward_errors(
            lambda x: activation.launch(x, activation.kind_of(kind)),
            lambda x: activation.gelu_reference(x, kind),
            (x,),
        ),
        *correct.forward_errors(
            lambda x, up: gated.launch(x, up, kind), lambda x, up: gated.geglu_reference(x, up, kind), (x, up)
        ),
        *correct.forward_errors(
            lambda x, bias: bias_gelu.launch(x, bias, kind),
            lambda x, bias: bias_gelu.reference(x, bias, kind),
            (x, bias),
        ),
        *correct.backward_errors(
            lambda dy, x, bias: bias_gelu.launch_backward(dy, x, bias, kind),
            lambda x, bias: bias_gelu.reference(x, bias, kind),
            (x, bias),
            dy,
        ),
    ]
    assert correct.worst(checks).ok, correct.worst(checks)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_the_lower_tail_keeps_its_digits(kind: str, device: str) -> None:
    """Where 1 + erf(x) has few left: a 16-bit result is within two of its own last places."""
    x = torch.linspace(-3.5, -0.5, 3000, device=device).half()
    truth = F.gelu(x.double(), approximate="none" if kind == "gelu" else "tanh")
    off = (activation.launch(x, kind).double() - truth).abs() / truth.abs()
    assert float(off.max()) < 2 * 2.0**-11


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu2"])
def test_huge_values_have_a_slope(kind: str, device: str) -> None:
    x = torch.tensor([1e20, -1e20, 3e38, -3e38, 200.0, -200.0], device=device)
    slope = activation.launch_backward(torch.ones_like(x), x, kind)
    if kind == "relu2":
        assert slope.tolist() == [2 * float(x[0]), 0.0, math.inf, 0.0, 400.0, 0.0]
    else:
        assert slope.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_special_values_of_relu2(device: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 3.0], device=device)
    result = activation.launch(x, "relu2")
    assert torch.equal(result[[0, 1, 3, 4]].cpu(), torch.tensor([math.inf, 0.0, 0.0, 9.0]))
    assert math.isnan(result[2])


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("cols", [64, 66, 61])
def test_views_that_start_anywhere(offset: int, cols: int, device: str) -> None:
    room = torch.randn(40, 101, device=device)  # no vector divides the stride
    x, dy = room[:, offset : offset + cols], torch.randn(40, cols, device=device)
    for kind in ("gelu", "gelu_tanh", "relu2"):
        assert torch.equal(activation.launch(x, kind), activation.launch(x.contiguous(), kind))
        ours = activation.launch_backward(dy, x, kind)
        assert torch.equal(ours, activation.launch_backward(dy, x.contiguous(), kind))


def test_vectors_divide_columns_and_strides() -> None:
    half = torch.float16
    assert pointwise.vector_of(torch.empty(3, 64, dtype=half)) == 8
    assert pointwise.vector_of(torch.empty(3, 100, dtype=half)) == 4
    assert pointwise.vector_of(torch.empty(3, 66, dtype=half)[:, :64]) == 2
    assert pointwise.vector_of(torch.empty(3, 7)) == 1
    assert pointwise.vector_of(torch.empty(3, 64)) == 4


def test_wide_indices_give_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = torch.randn(20, 130, device=device)[:, :128]
    usual = activation.launch(x, "gelu")
    monkeypatch.setattr(activation, "is_wide", lambda vectors: True)
    assert torch.equal(activation.launch(x, "gelu"), usual)


def test_bad_input(device: str) -> None:
    x = torch.randn(4, 64, device=device)
    calls = (
        activation.gelu,
        lambda x, kind: gated.geglu(x, x, kind),
        lambda x, kind: bias_gelu.bias_gelu(x, x[0], kind),
    )
    for call in calls:
        with pytest.raises(BadInput, match="approximate"):
            call(x, "erf")
    with pytest.raises(BadInput, match="shape"):
        gated.launch(x, x[:2], "silu")
    with pytest.raises(BadInput, match="float16"):
        gated.launch(x, x.half(), "silu")
    with pytest.raises(BadInput, match="columns"):
        bias_gelu.launch(x, x[0, :-1])
    assert torch.equal(gated.swiglu(x, x[:1]), F.silu(x) * x[:1])  # PyTorch broadcasts


@pytest.mark.parametrize("rows", [1, 128, 129, 3000])
def test_column_sums_share_out_every_row_once(rows: int) -> None:
    for cols in (1, 768, 1600, 14336):
        plan = column_sums.plan("", torch.empty(rows, cols, device="meta", dtype=torch.float16))
        assert (plan.parts - 1) * plan.tile.block < cols <= plan.parts * plan.tile.block
        assert (plan.shares - 1) * plan.tile.rows < rows  # every program has a tile
        assert plan.shares == 1 or rows > column_sums.FEW_ROWS


@pytest.mark.parametrize("cols", [7, 130])
def test_column_sums_in_many_steps(cols: int, device: str) -> None:
    x, bias = torch.zeros(263, cols, device=device), torch.zeros(cols, device=device)
    dy = torch.arange(263 * cols, device=device).view(263, cols) % 11.0  # sums of small whole numbers are exact
    tile = tuning.Tile(block=64, rows=4, warps=1, programs=1)
    for trial in (None, ("bias_gelu_backward", tile)):
        token = tuning.TRIAL.set(trial)
        try:
            dx, dbias = bias_gelu.launch_backward(dy, x, bias)
        finally:
            tuning.TRIAL.reset(token)
        assert torch.equal(dx, dy / 2)
        assert torch.equal(dbias, dy.sum(0) / 2)


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (300, 64), (259, 130)])
def test_bias_gelu_in_a_grid_of_three_sides(rows: int, cols: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x, bias = torch.randn(rows, cols, device=device), torch.randn(cols, device=device)
    usual = bias_gelu.launch(x, bias)
    monkeypatch.setattr(pointwise, "MAX_GROUPS", 3)
    assert torch.equal(bias_gelu.launch(x, bias), usual)
    torch.testing.assert_close(usual, bias_gelu.reference(x, bias))


def test_blocks_of_columns_leave_little_empty() -> None:
    for cols in (1, 16, 127, 768, 1600, 6400, 14336, 50257):
        block = pointwise.block_for_columns(cols, 1024)
        assert -(-cols // block) * block <= max(16, 1.05 * cols)
    assert pointwise.block_for_columns(1600, 1024, 256) == 256


def test_an_infinite_gradient_is_not_lost(device: str) -> None:
    x, bias = torch.zeros(200, 64, device=device), torch.zeros(64, device=device)
    dy = torch.ones_like(x)
    dy[3, 5] = math.inf
    _, dbias = bias_gelu.launch_backward(dy, x, bias)
    assert dbias[5] == math.inf
    assert torch.isfinite(dbias).sum() == 63
