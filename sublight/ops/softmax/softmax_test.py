"""softmax, log_softmax and online_softmax: masked rows, any layout, one result used alone, derivatives of derivatives.

Values and gradients over all shapes are held to the rule in ops_test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.conftest import HAS_GPU
from sublight.op import Op
from sublight.ops.softmax import online_softmax
from sublight.ops.softmax.log_softmax import LOG_SOFTMAX
from sublight.ops.softmax.online_softmax import ONLINE_SOFTMAX
from sublight.ops.softmax.softmax import SOFTMAX
from sublight.ops.softmax.softmax_topk import SOFTMAX_TOPK

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
EACH_OP = pytest.mark.parametrize("op", [SOFTMAX, LOG_SOFTMAX, ONLINE_SOFTMAX], ids=lambda op: op.name)
DIFFERENTIABLE = (SOFTMAX, LOG_SOFTMAX, ONLINE_SOFTMAX, SOFTMAX_TOPK)
EACH_DIFFERENTIABLE = pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)


def offset(x: Any) -> Any:
    """No row starts at a 16-byte boundary."""
    room = x.new_empty(x.numel() + 1)[1:]
    return room.copy_(x.reshape(-1)).view(x.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "together": lambda x: x,
    "gapped": lambda x: torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]],
    "turned": lambda x: x.mT.contiguous().mT,
    "offset": offset,
    "deep": lambda x: x.view(3, 4, -1),
    "swapped": lambda x: x.view(3, 4, -1).transpose(0, 1),
}


@EACH_OP
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_runs_what_the_plan_says(op: Op, layout: str, dtype: str, device: str) -> None:
    values, slopes = [], []
    for cols in (100, 2064):  # several rows a program, one row a program
        x = LAYOUTS[layout](*op.inputs({"rows": 12, "cols": cols}, dtype, device, 0))
        with watching() as steps:
            values.append(correct.forward_errors(op.call, op.reference, (x,)))
        if op.plan(x).provider == "sublight":  # a small call on a GPU may be PyTorch's, for the host's time
            assert op.plan(x).kernel == ", ".join(step.name for step in steps)
        grads = tuple(LAYOUTS[layout](g) if g.dim() == x.dim() == 2 else g for g in correct.random_grads(op.call, (x,)))
        slopes.append(correct.backward_errors(through_autograd(op), op.reference, (x,), grads))
    assert correct.pooled(values).ok, correct.pooled(values)
    assert correct.pooled(slopes).ok, correct.pooled(slopes)


def through_autograd(op: Op) -> Callable[..., Any]:
    return lambda *given: correct.gradients(op.call, given[-1:], given[:-1])


@EACH_OP
@pytest.mark.parametrize("cols", [100, 3008, 40_000])
def test_masked_rows(op: Op, cols: int, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        x = torch.randn(4, cols, generator=torch.Generator().manual_seed(seed)).to(device)
        x[0, : cols // 2] = -math.inf
        x[1, 1:] = -math.inf
        x[2] = -math.inf
        both = (x, x[2:3])  # several rows, and one that is shared out
        return [each for rows in both for each in correct.forward_errors(op.launch, op.reference, (rows,))]

    error = correct.settled(draw, 2)
    assert error.ok, error


def test_a_row_of_one_probability_is_exact(device: str) -> None:
    x = torch.full((2, 3000), -math.inf, device=device)
    x[:, 7] = 3.3
    assert SOFTMAX.launch(x)[0, 7] == 1
    assert torch.isnan(SOFTMAX.launch(torch.full_like(x, -math.inf))).all()


def test_an_infinite_row_has_an_infinite_log(device: str) -> None:
    x = torch.randn(2, 300, device=device)
    x[0, 7] = math.inf
    assert online_softmax.launch(x)[1][0] == math.inf


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["y", "log", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_results_that_are_used(used: tuple[int, ...], dtype: str, device: str) -> None:
    def of(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: tuple(call(x)[i] for i in used)

    (x,) = ONLINE_SOFTMAX.inputs({"rows": 24, "cols": 200}, dtype, device, 0)
    grads = correct.random_grads(of(ONLINE_SOFTMAX.call), (x,))
    for call in (ONLINE_SOFTMAX.call, torch.ops.sublight.online_softmax):
        error = correct.worst(
            correct.backward_errors(
                lambda *given, call=call: correct.gradients(of(call), given[-1:], given[:-1]),
                of(ONLINE_SOFTMAX.reference), (x,), grads,
            )
        )  # fmt: skip
        assert error.ok, error


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def second_derivative(call: Callable[..., Any], x: Any, weights: tuple[Any, ...]) -> Any:
    """The gradient of a gradient's square: through the results, and through what they are multiplied by."""
    x = x.detach().requires_grad_()
    outputs = [y for y in as_tuple(call(x)) if y.requires_grad]
    loss = sum((weight.to(y.dtype) * y * y).sum() for weight, y in zip(weights, outputs, strict=True))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


@EACH_DIFFERENTIABLE
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_derivative_is_as_right_as_pytorchs(op: Op, dtype: str, device: str) -> None:
    errors = []
    rows, seeds = (4, 2) if op is SOFTMAX_TOPK and not HAS_GPU else (24, 4)  # its sorts take the interpreter long
    for seed in range(seeds):
        (x,) = op.inputs({"rows": rows, "cols": 130}, dtype, device, seed)
        x = x / 4  # flat enough that fp16 holds a derivative of a derivative
        results = op.reference(x)
        sizes = [float(y.float().abs().mean()) for y in as_tuple(results) if y.is_floating_point()]
        grads = correct.random_grads(op.reference, (x,))
        weights = tuple(grad.float() / size for grad, size in zip(grads, sizes, strict=True))
        exact = second_derivative(op.reference, x.double(), weights)
        theirs, ours = (second_derivative(call, x, weights) for call in (op.reference, op.call))
        errors.append([correct.error("second derivative", ours, theirs, exact)])
        assert exact.abs().max() > 0
    assert correct.pooled(errors).ok, correct.pooled(errors)


@EACH_DIFFERENTIABLE
def test_the_registered_op_and_a_compiler_get_the_same_gradients(op: Op, device: str) -> None:
    torch._dynamo.reset()
    (x,) = op.inputs({"rows": 6, "cols": 40}, "float32", device, 0)
    registered = getattr(torch.ops.sublight, op.name)
    grads = correct.random_grads(op.reference, (x,))
    expected = correct.gradients(op.call, (x,), grads)
    assert torch.equal(*expected, *correct.gradients(lambda x: registered(*op.library_args(x)), (x,), grads))
    compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager")
    assert torch.equal(*expected, *correct.gradients(compiled, (x,), grads))
    leaf = x.clone().requires_grad_()
    assert set(torch.library.opcheck(registered, op.library_args(leaf)).values()) == {"SUCCESS"}


@EACH_DIFFERENTIABLE
def test_transforms_get_pytorchs_own_derivatives(op: Op, device: str) -> None:
    (x,) = op.inputs({"rows": 3, "cols": 40}, "float32", device, 0)

    def first(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: as_tuple(call(x))[0]

    tangent = torch.randn_like(x)
    ours, theirs = (torch.func.jvp(first(call), (x,), (tangent,)) for call in (op.call, op.reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("op", [SOFTMAX, LOG_SOFTMAX], ids=lambda op: op.name)
def test_a_gradient_that_is_negated_lazily(op: Op, device: str) -> None:
    (x,) = op.inputs({"rows": 24, "cols": 40}, "float32", device, 0)
    dy = torch.randn(24, 40, dtype=torch.complex64, device=device).conj().imag
    assert dy.is_neg()
    error = correct.worst(correct.backward_errors(through_autograd(op), op.reference, (x,), (dy,)))
    assert error.ok, error
