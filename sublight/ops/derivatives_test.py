"""Every op under every way to differentiate it: right, or PyTorch's own op, or one clear error; never wrong in silence.

Second derivatives are in `ops_test.py`. Here: torch.func, forward-mode AD, torch.jit.trace,
tensors that are negated lazily, and whether anything that has a gradient in PyTorch has one here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.autograd import forward_ad

from sublight import correct
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.op import Op
from sublight.ops import OPS

REFUSALS = (NotImplementedError, ValueError, RuntimeError)  # PyTorch's, where it has no such derivative; ours are fewer
DRAWS = 2  # whose errors are pooled, and more where luck may decide
Call = Callable[..., Any]
Way = Callable[[Call, Inputs, int], Any]  # (call, inputs, the input to differentiate by) -> tensors


def wrt(op: Op, inputs: Inputs) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(inputs) if x.is_floating_point()) if op.wrt is None else op.wrt


def outputs(call: Call, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    result = call(*(x.clone() for x in inputs))
    return result if isinstance(result, tuple) else (result,)


def at(call: Call, inputs: Inputs, place: int) -> Call:
    """The call as a function of one input, its outputs of floating point in one vector."""

    def function(x: torch.Tensor) -> torch.Tensor:
        result = call(*(x if i == place else other for i, other in enumerate(inputs)))
        result = result if isinstance(result, tuple) else (result,)
        return torch.cat([y.flatten() for y in result if y.is_floating_point()])

    return function


def summed(function: Call) -> Call:
    return lambda x: function(x).square().sum()


def tangent(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)


def func_grad(call: Call, inputs: Inputs, place: int) -> Any:
    return torch.func.grad(summed(at(call, inputs, place)))(inputs[place])


def jacrev(call: Call, inputs: Inputs, place: int) -> Any:
    return torch.func.jacrev(lambda x: at(call, inputs, place)(x)[:3])(inputs[place])


def jvp(call: Call, inputs: Inputs, place: int) -> Any:
    return torch.func.jvp(at(call, inputs, place), (inputs[place],), (tangent(inputs[place]),))[1]


def jacfwd(call: Call, inputs: Inputs, place: int) -> Any:
    """By three directions: a whole Jacobian takes the interpreter too long."""
    x = inputs[place]
    directions = torch.stack([tangent(x), tangent(x).square(), torch.ones_like(x)])

    def along(coefficients: torch.Tensor) -> torch.Tensor:
        return at(call, inputs, place)(x + (coefficients.view(-1, *[1] * x.dim()) * directions).sum(0))

    return torch.func.jacfwd(along)(torch.zeros(3, dtype=x.dtype, device=x.device))


def dual(call: Call, inputs: Inputs, place: int) -> Any:
    with forward_ad.dual_level():
        y = at(call, inputs, place)(forward_ad.make_dual(inputs[place], tangent(inputs[place])))
        return forward_ad.unpack_dual(y).tangent


def traced(call: Call, inputs: Inputs, place: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.trace(at(call, inputs, place), (inputs[place],), check_trace=False)
    return function(inputs[place] * 0.5)


def negated(call: Call, inputs: Inputs, place: int) -> Any:
    """z.conj().imag holds the numbers of z with another sign, which only shows in a bit of the tensor."""
    x = inputs[place]
    lazy = torch.complex(torch.zeros_like(x, dtype=torch.float64), -x.double()).to(_complex(x)).conj().imag
    assert lazy.is_neg()
    return at(call, inputs, place)(lazy)


def _complex(x: torch.Tensor) -> torch.dtype:
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64


def backward(call: Call, inputs: Inputs, place: int) -> Any:
    x = inputs[place].detach().requires_grad_()
    y = at(call, inputs, place)(x)
    return torch.autograd.grad(y, x, tangent(y))[0] if y.requires_grad else None  # its own errors, not those of y


WAYS: tuple[Way, ...] = (func_grad, jacrev, jvp, jacfwd, dual, traced, negated, backward)


@pytest.mark.parametrize("op", [op for op in OPS if not op.writes], ids=lambda op: op.name)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_right_or_refused(op: Op, way: Way, device: str) -> None:
    inputs = op.inputs(op.test_shapes[1], "float32", device, 0)
    places = [i for i in wrt(op, inputs) if inputs[i].is_floating_point()]
    if not places or not any(y.is_floating_point() for y in outputs(op.reference, inputs)):
        pytest.skip("it has no derivative")
    for place in places:
        draw = functools.partial(judged, op, way, place, device)
        if draw(0) is not None:
            error = correct.settled(lambda seed: [draw(seed)], DRAWS)  # noqa: B023
            assert error.ok, (place, error)


def judged(op: Op, way: Way, place: int, device: str, seed: int) -> correct.Error | None:
    """How far ours is off; None where PyTorch has no such derivative, or ours refuses with a reason."""
    inputs = op.inputs(op.test_shapes[1], "float32", device, seed)
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    try:
        theirs, truth = way(op.reference, inputs, place), way(op.reference, wide, place)
    except REFUSALS:
        return None
    try:
        ours = way(op.call, inputs, place)
    except (NotImplementedError, BadInput) as refused:
        assert str(refused), "an error says what cannot be"
        return None
    assert (ours is None) == (theirs is None), "a derivative was dropped, or made up"
    return None if theirs is None else correct.error(way.__name__, ours, theirs, truth)
