"""What holds of every op that has a plan: `why` names what runs, a plan fits its tensors, gradients of gradients."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import CHECKED, watching
from sublight.cost import Shape
from sublight.op import Op
from sublight.ops.movement.compact import COMPACT
from sublight.ops.movement.embedding import EMBEDDING
from sublight.ops.movement.permute import PERMUTE, TRANSPOSE

CASES: tuple[tuple[Op, Shape], ...] = (
    (PERMUTE, {"d0": 2, "d1": 3, "d2": 4, "d3": 33, "order": 1342}),
    (PERMUTE, {"d0": 2, "d1": 9, "d2": 3, "d3": 16, "order": 1324}),
    (TRANSPOSE, {"batch": 2, "rows": 33, "cols": 150}),
    (COMPACT, {"numel": 4098}),
    (EMBEDDING, {"rows": 200, "cols": 33, "vocab": 70}),
    (EMBEDDING, {"rows": 30, "cols": 64, "vocab": 7}),
)


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Every launch looks whether its tensors are of the kind that the plan was made for."""
    token = CHECKED.set(True)
    try:
        yield
    finally:
        CHECKED.reset(token)


def plain(x: Any) -> Any:
    return x.clone()


def gapped(x: Any) -> Any:
    """Rows with something between them."""
    room = x.new_ones((*x.shape[:-1], 2 * x.shape[-1] + 3))
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def turned(x: Any) -> Any:
    return x.mT.contiguous().mT


def offset(x: Any) -> Any:
    """In one piece that begins at no 16-byte boundary."""
    room = x.new_ones(x.numel() + 1)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


LAYOUTS = (plain, gapped, turned, offset)


def laid_out(layout: Callable[[Any], Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(layout(x) if x.dim() > 1 else x.clone() for x in inputs)


def draw(op: Op, shape: Shape, device: str, seed: int) -> tuple[Any, ...]:
    """The op's inputs, with two dimensions where they have one, so that they can be laid out otherwise."""
    inputs = op.inputs(shape, "float32", device, seed)
    return tuple(x.view(2, -1) for x in inputs) if op.keys == ("numel",) else inputs


def launched(call: Callable[..., Any], *args: Any) -> str:
    """The names of the kernels that a call launches, each once."""
    with watching() as steps:
        call(*args)
    return ", ".join(dict.fromkeys(step.name for step in steps))


def check_plans(op: Op, shape: Shape, device: str) -> None:
    """Twice in every layout: the second call finds its plan, and the plans of the other layouts beside it."""
    errors: list[list[correct.Error]] = []
    for seed, layout in itertools.product((0, 1), LAYOUTS):
        inputs = laid_out(layout, draw(op, shape, device, seed))
        plan = op.plan(*inputs)
        assert plan.provider == "sublight", plan.reason
        with checking():
            assert launched(op.call, *laid_out(layout, inputs)) == plan.kernel, layout.__name__
            errors.append(correct.forward_errors(op.call, op.reference, inputs, writes=bool(op.writes)))
    for several in zip(*errors, strict=True):  # over one small draw PyTorch may be right by luck
        total = several[0]
        for each in several[1:]:
            total = total.merge(each)
        assert total.ok, total


def second_derivatives(call: Callable[..., Any], inputs: tuple[Any, ...], wrt: tuple[int, ...] | None) -> Any:
    """Of the sum of the squares of the gradients of the sum of the cubes of the outputs, all inputs in one piece."""
    leaves = correct.leaves_of(inputs, wrt)
    wanted = [x for x in leaves if x.requires_grad]
    result = call(*leaves)
    cubes = [y.pow(3).sum() for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
    first = torch.autograd.grad(sum(cubes), wanted, create_graph=True)
    assert all(grad.requires_grad for grad in first), "a gradient that is cut off in silence"
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), wanted)
    return torch.cat([grad.flatten() for grad in second])


def check_second_derivatives(op: Op, shape: Shape, device: str) -> None:
    for layout in LAYOUTS:
        inputs = laid_out(layout, draw(op, shape, device, 0))
        doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        ours, theirs = (second_derivatives(call, inputs, op.wrt) for call in (op.call, op.reference))
        error = correct.error("second", ours, theirs, second_derivatives(op.reference, doubles, op.wrt))
        assert error.ok, (layout.__name__, error)


EACH = pytest.mark.parametrize(("op", "shape"), CASES, ids=lambda each: each.name if isinstance(each, Op) else "")


@EACH
def test_why_names_what_is_launched_and_plans_fit(op: Op, shape: Shape, device: str) -> None:
    check_plans(op, shape, device)


@EACH
def test_second_derivatives_are_as_right_as_pytorchs(op: Op, shape: Shape, device: str) -> None:
    check_second_derivatives(op, shape, device)


def test_a_plan_that_does_not_fit_is_noticed(device: str) -> None:
    """The check of the checks: a step that is launched on tensors of another kind."""
    (x,) = TRANSPOSE.inputs({"batch": 1, "rows": 33, "cols": 65}, "float32", device, 0)
    (step,) = TRANSPOSE.plan(x).steps
    y = torch.full((65, 33), math.nan, device=device)
    with checking():
        step(x, y)
        assert torch.equal(y, x[0].T)
        with pytest.raises(AssertionError, match="was planned for"):
            step(offset(x), y)
