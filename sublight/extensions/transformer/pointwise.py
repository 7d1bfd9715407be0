"""What moves bytes and little else: residual, GELU, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.extensions.ladder import Ladder, Rung, Runner
from sublight.extensions.transformer import launch
from sublight.extensions.transformer.ladder import drawn, gradients, of_transformer, words

if TYPE_CHECKING:
    from torch import Tensor

ADAMW_STEP = 3
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


def _flat_inputs(count: int) -> Callable[[Shape, str, str, int], Inputs]:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        randn = drawn(device, seed)
        return tuple(2 * randn(shape["numel"]) for _ in range(count))

    return inputs


def _element(kernel: str) -> Callable[..., Tensor]:
    """The plain kernel, an element a thread, where the op's own launch takes four."""

    def run(runner: Runner, *inputs: Tensor) -> Tensor:
        out = inputs[0].new_empty(inputs[0].shape)
        runner.launch(kernel, *launch.each(out.numel()), *inputs, out, out.numel())
        return out

    return run


def _not_fours(x: Tensor, *more: Tensor) -> str:
    return "takes a number of elements that 4 divides" if x.numel() % 4 else ""


def _gelu(x: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.gelu(x, approximate="tanh")


FLAT = {"float32": ({"numel": 8192 * 3072},)}
FLAT_TESTS = tuple({"numel": numel} for numel in (1, 257, 1028))
FOUR = "16 bytes an access, four elements a thread: a quarter of the instructions that load and store."
RESIDUAL = Ladder(
    **of_transformer("residual", "the sum of two tensors"),
    reference=lambda a, b: a + b,
    inputs=_flat_inputs(2),
    cost=lambda shape, dtype: words(2 * shape["numel"], shape["numel"]),
    shapes=FLAT,
    test_shapes=FLAT_TESTS,
    rungs=(
        Rung(
            name="element",
            kernels=("residual_forward",),
            launch=_element("residual_forward"),
            change="An element a thread: two loads, an addition, a store of 4 bytes.",
        ),
        Rung(name="four", kernels=("residual_forward_4",), launch=launch.residual, change=FOUR, why_not=_not_fours),
    ),
)
GELU = Ladder(
    **of_transformer("gelu", "GELU in its form with a tanh, as GPT-2 has it"),
    reference=_gelu,
    inputs=_flat_inputs(1),
    cost=lambda shape, dtype: words(shape["numel"], shape["numel"]),
    shapes=FLAT,
    test_shapes=FLAT_TESTS,
    rungs=(
        Rung(
            name="element",
            kernels=("gelu_forward",),
            launch=_element("gelu_forward"),
            change="An element a thread; tanhf is some twenty instructions, which memory's time hides.",
        ),
        Rung(name="four", kernels=("gelu_forward_4",), launch=launch.gelu, change=FOUR, why_not=_not_fours),
    ),
)
GELU_BACKWARD = Ladder(
    **of_transformer("gelu_backward", "GELU's gradient"),
    reference=gradients(_gelu, 1),
    inputs=_flat_inputs(2),
    cost=lambda shape, dtype: words(2 * shape["numel"], shape["numel"]),
    shapes=FLAT,
    test_shapes=FLAT_TESTS,
    rungs=(
        Rung(
            name="element",
            kernels=("gelu_backward",),
            launch=launch.gelu_backward,
            change="The tanh is computed again from the input: to keep it would cost 4 bytes an element both ways.",
        ),
    ),
)


def _adamw_reference(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    beta1, beta2 = BETAS
    parameter = parameter * (1 - RATE * DECAY)
    first = first * beta1 + gradient * (1 - beta1)
    second = second * beta2 + gradient * gradient * (1 - beta2)
    corrected = (second / (1 - beta2**ADAMW_STEP)).sqrt() + EPS
    return parameter - RATE * (first / (1 - beta1**ADAMW_STEP)) / corrected, first, second


def _adamw(runner: Runner, parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    to = (parameter.new_empty(parameter.shape), first.new_empty(first.shape), second.new_empty(second.shape))
    launch.adamw(
        runner, (parameter, gradient, first, second), to, step=ADAMW_STEP, rate=RATE, betas=BETAS, eps=EPS, decay=DECAY
    )
    return to


def _adamw_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    randn = drawn(device, seed)
    parameter, gradient, first, second = (randn(shape["numel"]) for _ in range(4))
    return parameter, gradient, first, second.abs()


ADAMW = Ladder(
    **of_transformer("adamw", "one step of AdamW: a parameter and its two moments"),
    reference=_adamw_reference,
    inputs=_adamw_inputs,
    cost=lambda shape, dtype: words(4 * shape["numel"], 3 * shape["numel"]),
    shapes={"float32": ({"numel": 2**25},)},
    test_shapes=({"numel": 1}, {"numel": 600}),
    rungs=(
        Rung(
            name="element",
            kernels=("adamw",),
            launch=_adamw,
            change="All of it in one pass: four numbers read and three written an element, where an operation at a "
            "time would move some twenty.",
        ),
    ),
)
