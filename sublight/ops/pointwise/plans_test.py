"""What the plans of elementwise ops promise: a call launches what its plan names, whatever its inputs' layout, and is
right when it is called again, when it is differentiated twice, and when a tensor is negated lazily."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import CHECKED, watching
from sublight.correct import Call, Inputs
from sublight.op import Op
from sublight.ops.gated.gated import GEGLU, SWIGLU
from sublight.ops.pointwise.activation import GELU, GELU_TANH, RELU2
from sublight.ops.pointwise.add import ADD
from sublight.ops.pointwise.bias_dropout_residual import BIAS_DROPOUT_RESIDUAL
from sublight.ops.pointwise.bias_gelu import BIAS_GELU
from sublight.ops.quantize.quantize import QUANTIZE_FP8, QUANTIZE_FP8_BLOCKS, QUANTIZE_INT8, QUANTIZE_INT8_BLOCKS
from sublight.ops.quantize.rms_norm_quantize import RMS_NORM_FP8, RMS_NORM_INT8
from sublight.ops.rotary.qk_norm_rope import QK_NORM_ROPE
from sublight.ops.rotary.rope import ROPE, ROPE_IN_PLACE

DIFFERENTIABLE = (GELU, GELU_TANH, RELU2, BIAS_GELU, BIAS_DROPOUT_RESIDUAL, SWIGLU, GEGLU, ROPE, QK_NORM_ROPE)
QUANTIZE = (QUANTIZE_INT8, QUANTIZE_FP8, QUANTIZE_INT8_BLOCKS, QUANTIZE_FP8_BLOCKS, RMS_NORM_INT8, RMS_NORM_FP8)
OPS = (ADD, *DIFFERENTIABLE, ROPE_IN_PLACE, *QUANTIZE)
EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
EACH_DIFFERENTIABLE = pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def gapped(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that do not follow one another, with NaN between them."""
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), math.nan if x.is_floating_point() else 1)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, columns first."""
    return x.mT.contiguous().mT if x.dim() > 1 else x.clone()


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element away from any alignment."""
    room = x.new_empty(x.numel() + 1)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


LAYOUTS = (as_it_is, gapped, turned, off_by_one)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Every launch looks whether its tensors are of the kind that it was planned for."""
    token = CHECKED.set(True)
    yield
    CHECKED.reset(token)


def drawn(op: Op, device: str, seed: int = 0) -> Inputs:
    """Of a size of which PyTorch's own error is no luck."""
    sizes = {"rows": 24, "cols": 136, "numel": 3264, "batch": 2, "q_len": 9, "heads": 4, "kv_heads": 2, "head_dim": 24}
    return op.inputs({key: sizes[key] for key in op.keys}, "float32", device, seed)


def bits(result: Any) -> list[bytes]:
    """Of every output: codes in fp8 cannot be compared."""
    outputs = result if isinstance(result, tuple) else (result,)
    return [y.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for y in outputs]


@EACH_OP
@pytest.mark.parametrize("moved", LAYOUTS, ids=lambda moved: moved.__name__)
def test_a_call_launches_what_its_plan_names(
    op: Op, moved: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    for seed in (0, 1):  # the second call finds its plan
        plan = op.plan(*map(moved, drawn(op, device, seed)))
        with watching() as steps:
            result = op.call(*map(moved, drawn(op, device, seed)))
        assert [step.name for step in steps] == [step.name for step in plan.steps]
        assert [step.grid for step in steps] == [step.grid for step in plan.steps]
        assert plan.reason
        if plan.provider == "torch":
            assert not steps and op is ADD
        else:
            assert plan.kernel == ", ".join(step.name for step in steps)
        assert bits(result) == bits(op.launch(*drawn(op, device, seed)))


@EACH_DIFFERENTIABLE
@pytest.mark.parametrize("moved", LAYOUTS, ids=lambda moved: moved.__name__)
def test_the_gradient_does_not_depend_on_the_layout(
    op: Op, moved: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    inputs = drawn(op, device)
    grads = correct.random_grads(op.reference, inputs, wrt=op.wrt)
    found = correct.gradients(op.call, tuple(map(moved, inputs)), tuple(map(moved, grads)), wrt=op.wrt)
    assert bits(found) == bits(op.launch_backward(*grads, *inputs))


def weighed(x: torch.Tensor) -> torch.Tensor:
    """A sum of squares, each with a weight of its own: a plain one would not see that vectors are turned."""
    weights = torch.linspace(-1.0, 2.0, x.numel(), dtype=torch.float64, device=x.device).view(x.shape)
    return (x.square() * weights.to(x.dtype)).sum()


def second(call: Call, wrt: tuple[int, ...] | None) -> Call:
    """Inputs to the gradients of a function of a call's gradients."""

    def found(*inputs: torch.Tensor) -> Inputs:
        with torch.enable_grad():
            leaves = correct.leaves_of(inputs, wrt)
            wanted = [x for x in leaves if x.requires_grad]
            outputs = call(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            grads = torch.autograd.grad(sum(map(weighed, outputs)), wanted, create_graph=True)
            return torch.autograd.grad(sum(map(weighed, grads)), wanted)

    return found


@EACH_DIFFERENTIABLE
def test_second_derivative(op: Op, device: str) -> None:
    draws = [
        correct.forward_errors(second(op.call, op.wrt), second(op.reference, op.wrt), drawn(op, device, seed))
        for seed in range(3)
    ]
    for each in zip(*draws, strict=True):
        error = each[0].merge(each[1]).merge(each[2])
        assert error.ok, error


def test_second_derivative_of_add(device: str) -> None:
    """Of the registered op: a call is PyTorch's own."""
    inputs = drawn(ADD, device)
    errors = correct.forward_errors(second(torch.ops.sublight.add, None), second(ADD.reference, None), inputs)
    assert correct.worst(errors).ok, errors


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same values, in memory with the other sign."""
    y = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert y.is_neg()
    return y


@EACH_OP
def test_a_lazily_negated_tensor_is_taken_for_what_it_stands_for(op: Op, device: str) -> None:
    inputs = drawn(op, device)
    expected = op.reference(*map(as_it_is, inputs))
    x, *rest = (negated(x) if x.is_floating_point() else x for x in inputs)
    plan = op.plan(x, *rest)
    assert plan.provider == "torch" and (op is ADD or "negated" in plan.reason)
    assert bits(op.call(x, *rest)) == bits(expected)


@EACH_DIFFERENTIABLE
def test_a_lazily_negated_gradient_is_taken_for_what_it_stands_for(op: Op, device: str) -> None:
    inputs = drawn(op, device)
    grads = correct.random_grads(op.reference, inputs, wrt=op.wrt)
    usual, other = (
        correct.gradients(op.call, inputs, tuple(map(sign, grads)), wrt=op.wrt) for sign in (as_it_is, negated)
    )
    assert bits(usual) == bits(other)
