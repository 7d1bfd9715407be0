"""Sums over many rows are as exact as a tree of additions, which PyTorch makes on a GPU; its sums on a CPU are not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sublight.correct import Error, error, settled
from sublight.errors import BadInput
from sublight.extensions import build
from sublight.extensions.transformer.linear import LINEAR_BACKWARD
from sublight.extensions.transformer.norm import NORM_BACKWARD


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    try:
        build.host_compiler()
    except BadInput as missing:
        pytest.skip(str(missing))


def tree(x: torch.Tensor) -> torch.Tensor:
    """Neighbours first, then neighbours of these; the number of rows is a power of two."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def test_layer_norms_weight_and_bias() -> None:
    def draw(seed: int) -> list[Error]:
        inputs = NORM_BACKWARD.inputs({"rows": 2048, "cols": 4}, "float32", "cpu", seed)
        d_y, x, _, _, means, scales = inputs
        mine = NORM_BACKWARD.call(NORM_BACKWARD.rung("columns"))(*inputs)
        truth = NORM_BACKWARD.reference(*(each.double() for each in inputs))
        yardstick = (tree(d_y * ((x - means[:, None]) * scales[:, None])), tree(d_y))
        return [error(name, *triple) for name, *triple in zip("wb", mine[1:], yardstick, truth[1:], strict=True)]

    worst = settled(draw, 4)
    assert worst.ok, worst


def test_a_linear_layers_bias() -> None:
    def draw(seed: int) -> list[Error]:
        inputs = LINEAR_BACKWARD.inputs({"m": 2048, "n": 4, "k": 1}, "float32", "cpu", seed)
        mine = LINEAR_BACKWARD.call(LINEAR_BACKWARD.rungs[0])(*inputs)
        return [error("bias", mine[2], tree(inputs[0]), inputs[0].double().sum(0))]

    worst = settled(draw, 4)
    assert worst.ok, worst
