"""Linear layers on weights as PyTorch stores them, (out, in), and their three gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.extensions.ladder import Ladder, Rung, Runner
from sublight.extensions.transformer import launch
from sublight.extensions.transformer.ladder import drawn, gradients, of_transformer, words

if TYPE_CHECKING:
    from torch import Tensor


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.linear(x, weight, bias)


def _linear_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    randn = drawn(device, seed)
    return randn(shape["m"], shape["k"]), randn(shape["n"], shape["k"]), randn(shape["n"])


def _linear_backward_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (drawn(device, seed + 2)(shape["m"], shape["n"]), *_linear_inputs(shape, dtype, device, seed))


def _linear_backward(runner: Runner, d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return launch.linear_backward(runner, d_out, x, weight)


def _linear_words(shape: Shape) -> tuple[int, int]:
    """Of x and weight, and of the product."""
    return shape["k"] * (shape["m"] + shape["n"]), shape["m"] * shape["n"]


LINEAR_SHAPES = {"float32": ({"m": 8192, "n": 3072, "k": 768},)}
LINEAR_TESTS = ({"m": 1, "n": 1, "k": 1}, {"m": 33, "n": 65, "k": 70}, {"m": 65, "n": 64, "k": 130})
LINEAR = Ladder(
    **of_transformer("linear", "x @ weight.T + bias, the weight stored as (out, in)"),
    reference=_linear,
    inputs=_linear_inputs,
    cost=lambda shape, dtype: words(
        _linear_words(shape)[0], _linear_words(shape)[1], 2 * shape["m"] * shape["n"] * shape["k"]
    ),
    shapes=LINEAR_SHAPES,
    test_shapes=LINEAR_TESTS,
    rungs=(
        Rung(
            name="tiles",
            kernels=("linear_forward",),
            launch=launch.linear,
            change="64 x 64 of the product a block through shared memory, 4 x 4 a thread, any size, and either operand "
            "as it lies in memory: matmul's ladder goes on from here.",
        ),
    ),
)
LINEAR_BACKWARD = Ladder(
    **of_transformer("linear_backward", "the gradients of a linear layer's input, weight and bias"),
    reference=gradients(_linear, 3),
    inputs=_linear_backward_inputs,
    cost=lambda shape, dtype: words(
        sum(_linear_words(shape)), _linear_words(shape)[0] + shape["n"], 4 * shape["m"] * shape["n"] * shape["k"]
    ),
    shapes=LINEAR_SHAPES,
    test_shapes=LINEAR_TESTS,
    rungs=(
        Rung(
            name="tiles",
            kernels=("linear_backward_x", "linear_backward_weight", "sum_of_rows"),
            launch=_linear_backward,
            change="Two products and a sum over rows. The weight's gradient reads its left operand by columns, which "
            "the tile turns round on its way into shared memory.",
        ),
    ),
)
