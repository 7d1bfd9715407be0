"""Layer norm by a warp a row, and its way back; rows.py has the ladder of its way there."""

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


SHAPES = {"float32": ({"rows": 8192, "cols": 768},)}
TESTS = ({"rows": 1, "cols": 1}, {"rows": 3, "cols": 33}, {"rows": 21, "cols": 70})


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


def _norm_kept(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    import torch

    y, means, scales = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, launch.EPS)
    return y, means.flatten(), scales.flatten()


def _one_by_one(
    d_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, ...]:
    """PyTorch's own sums over rows into one address each, one after the other, as atomic additions come."""
    d_x, *_ = gradients(_norm, 3)(d_y, x, weight, bias)
    to = d_y.new_zeros(len(d_y)).long()
    normed = (x - means[:, None].to(x)) * scales[:, None].to(x)
    return d_x, *(d_y.new_zeros(1, d_y.shape[1]).index_add_(0, to, each).flatten() for each in (d_y * normed, d_y))


NORM = Ladder(
    **of_transformer("layer_norm_kept", "layer norm of each row, and its mean and scale, which the way back needs"),
    reference=_norm_kept,
    inputs=lambda shape, dtype, device, seed: _norm_backward_inputs(shape, dtype, device, seed)[1:4],
    cost=lambda shape, dtype: words(
        shape["rows"] * shape["cols"] + 2 * shape["cols"], shape["rows"] * (shape["cols"] + 2)
    ),
    shapes=SHAPES,
    test_shapes=TESTS,
    rungs=(
        Rung(
            name="warp",
            kernels=("norm_forward",),
            launch=launch.norm,
            change="A warp takes a row, so that no barrier is needed, and shuffles make its sums: for rows of some "
            "thousand bytes, of which a block of eight warps has eight at hand.",
        ),
    ),
)
NORM_BACKWARD = Ladder(
    **of_transformer("layer_norm_backward", "the gradients of layer norm's input, weight and bias"),
    reference=gradients(_norm, 3),
    inputs=_norm_backward_inputs,
    cost=lambda shape, dtype: words(
        2 * shape["rows"] * shape["cols"] + shape["cols"] + 2 * shape["rows"],
        shape["rows"] * shape["cols"] + 2 * shape["cols"],
    ),
    shapes=SHAPES,
    test_shapes=TESTS,
    rungs=(
        Rung(
            name="atomics",
            kernels=("norm_backward_x", "norm_backward_weight_atomics"),
            launch=functools.partial(_norm_backward, atomics=True),
            change="The input's gradient by a warp a row. Weight and bias get an atomic addition from every element: "
            "as many as there are rows meet at one address. These sums round after every row; PyTorch's index_add_, "
            "which does the same, is their yardstick.",
            yardstick=_one_by_one,
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
