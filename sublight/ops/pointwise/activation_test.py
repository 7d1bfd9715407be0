"""What ops_test's shapes do not reach: halves of one tensor, the other gelu, tails, huge values, odd views."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import torch.nn.functional as F

from sublight import correct
from sublight.backend.device import Facts
from sublight.errors import BadInput
from sublight.op import Op
from sublight.ops.gated import gated
from sublight.ops.kernels import column_sums, pointwise
from sublight.ops.kernels.rows import rows_of
from sublight.ops.pointwise import activation, bias_gelu
from sublight.ops.pointwise.activation import GELU, GELU_TANH, RELU2
from sublight.ops.record import tuning

DTYPES = [torch.float32, torch.float16]
OPS = (GELU, GELU_TANH, RELU2)
EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


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


@pytest.mark.parametrize("turned", [False, True])
def test_one_tensor_alone_is_both_halves(turned: bool, device: str) -> None:
    x = torch.randn(40, 256, device=device)
    x = x.T.contiguous().T if turned else x
    calls = (
        (gated.swiglu, lambda x: F.silu(x[:, :128]) * x[:, 128:]),
        (gated.geglu, lambda x: F.gelu(x[:, :128], approximate="tanh") * x[:, 128:]),
        (lambda x: torch.ops.sublight.gated_halves(x, "silu"), lambda x: F.silu(x[:, :128]) * x[:, 128:]),
    )
    for ours, theirs in calls:
        (dy,) = correct.random_grads(theirs, (x,))
        errors = [
            *correct.forward_errors(ours, theirs, (x,)),
            *correct.backward_errors(lambda dy, x, ours=ours: correct.gradients(ours, (x,), dy), theirs, (x,), dy),
        ]
        assert correct.worst(errors).ok, correct.worst(errors)
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
            lambda x: GELU.launch(x, kind),
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


@pytest.mark.parametrize("op", [GELU, GELU_TANH], ids=lambda op: op.name)
def test_the_lower_tail_keeps_its_digits(op: Op, device: str) -> None:
    """Where 1 + erf(x) has few left: relative to the result, no further off than twice what PyTorch's is."""
    x = torch.linspace(-3.5, -0.5, 3000, device=device).half()
    truth = op.reference(x.double())
    ours, theirs = (float(((y.double() - truth) / truth).abs().max()) for y in (op.launch(x), op.reference(x)))
    assert ours <= correct.FACTOR * theirs


@EACH_OP
def test_huge_values_have_a_slope(op: Op, device: str) -> None:
    x = torch.tensor([1e20, -1e20, 3e38, -3e38, 200.0, -200.0], device=device)
    (slope,) = op.launch_backward(torch.ones_like(x), x)
    if op is RELU2:
        assert slope.tolist() == [2 * float(x[0]), 0.0, math.inf, 0.0, 400.0, 0.0]
    else:
        assert slope.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_special_values_of_relu2(device: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 3.0], device=device)
    result = RELU2.launch(x)
    assert torch.equal(result[[0, 1, 3, 4]].cpu(), torch.tensor([math.inf, 0.0, 0.0, 9.0]))
    assert math.isnan(result[2])


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("cols", [64, 66, 61])
def test_views_that_start_anywhere(offset: int, cols: int, device: str) -> None:
    room = torch.randn(40, 101, device=device)  # no vector divides the stride
    x, dy = room[:, offset : offset + cols], torch.randn(40, cols, device=device)
    for op in OPS:
        assert torch.equal(op.launch(x), op.launch(x.contiguous()))
        assert torch.equal(*op.launch_backward(dy, x), *op.launch_backward(dy, x.contiguous()))


def test_vectors_divide_columns_and_strides() -> None:
    half = torch.float16

    def vector(x: torch.Tensor) -> int:
        return pointwise.vector_of(rows_of(x))

    assert vector(torch.empty(3, 64, dtype=half)) == 8
    assert vector(torch.empty(3, 100, dtype=half)) == 4
    assert vector(torch.empty(3, 66, dtype=half)[:, :64]) == 2
    assert vector(torch.empty(3, 7)) == 1
    assert vector(torch.empty(3, 64)) == 4
    plan = activation.plan_forward(torch.empty(3, 66, dtype=half)[:, :64], "gelu")
    assert (plan.kernel, plan.steps[0].constants["VECTOR"], plan.copies) == ("_activation_rows_kernel", 2, ())
    assert activation.plan_forward(torch.empty(64, 3).T, "gelu").copies == ("x",)


def test_wide_indices_give_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = torch.randn(20, 130, device=device)[:, :128]
    usual = GELU.launch(x)
    monkeypatch.setattr(pointwise, "is_wide", lambda vectors: True)
    assert activation.plan_forward(x, "gelu").steps[0].constants["WIDE"]
    assert torch.equal(GELU.launch(x), usual)


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
        layout = rows_of(torch.empty(rows, cols, device="meta", dtype=torch.float16))
        sharing = column_sums.share_out("", layout, Facts(), "dbias")
        assert (sharing.parts - 1) * sharing.tile.block < cols <= sharing.parts * sharing.tile.block
        assert (sharing.shares - 1) * sharing.tile.rows < rows  # every program has a tile
        assert sharing.shares == 1 or rows > column_sums.FEW_ROWS
        assert len(sharing.steps()) == (sharing.shares > 1)


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
    error = correct.worst(correct.forward_errors(bias_gelu.launch, bias_gelu.reference, (x, bias)))
    assert error.ok, error


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
