"""Layer norm's way back; its way there has a ladder of its own (rows.py)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.extensions.ladder import Ladder, Rung, Runner
from sublight.extensions.transformer import launch
from sublight.extensions.transformer.ladder import drawn, gradients, of_transformer, words

if TYPE_CHECKING:
    from torch import Tensor


def _norm(x: Tensor, weight: Tensor, bias: Tensor, *kept: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, launch.EPS)


def _norm_backward_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """d_y, x, weight, bias, and the row's mean and scale as the way there left them."""
    rows, cols = shape["rows"], shape["cols"]
    randn = drawn(device, seed)
    d_y, x, weight, bias = randn(rows, cols), 2 * randn(rows, cols) + 1, randn(cols), randn(cols)
    wide = x.double()
    means, scales = wide.mean(1), (wide.var(1, correction=0) + launch.EPS).rsqrt()
    return d_y, x, weight, bias, means.float(), scales.float()


def _norm_backward(
    runner: Runner,
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    means: Tensor,
    scales: Tensor,
    *,
    atomics: bool,
) -> tuple[Tensor, ...]:
    return launch.norm_backward(runner, d_y, x, weight, means, scales, atomics=atomics)


NORM_BACKWARD = Ladder(
    **of_transformer("layer_norm_backward", "the gradients of layer norm's input, weight and bias"),
    reference=gradients(_norm, 3),
    inputs=_norm_backward_inputs,
    cost=lambda shape, dtype: words(
        2 * shape["rows"] * shape["cols"] + shape["cols"] + 2 * shape["rows"],
        shape["rows"] * shape["cols"] + 2 * shape["cols"],
    ),
    shapes={"float32": ({"rows": 8192, "cols": 768},)},
    test_shapes=({"rows": 1, "cols": 1}, {"rows": 3, "cols": 33}, {"rows": 21, "cols": 70}),
    rungs=(
        Rung(
            name="atomics",
            kernels=("norm_backward_x", "norm_backward_weight_atomics"),
            launch=functools.partial(_norm_backward, atomics=True),
            change="The input's gradient by a warp a row. Weight and bias get an atomic addition from every element: "
            "as many as there are rows meet at one address.",
        ),
        Rung(
            name="columns",
            kernels=("norm_backward_x", "norm_backward_weight"),
            launch=functools.partial(_norm_backward, atomics=False),
            change="A block takes 32 columns and walks down all rows, eight at a time, a sum in each thread's "
            "register; shared memory brings eight together. No atomic addition, the same bits every time; but there "
            "are only as many blocks as 32 goes into the columns.",
        ),
    ),
)
