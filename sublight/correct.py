"""The one rule of correctness: no further from a float64 reference than twice what PyTorch's own implementation is.

PyTorch's composition in the same data type (TF32 off) is the yardstick, in maximum and in root-mean-square error, for
every output and every gradient; where its error is zero, ours must be zero. There is no tolerance to pick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sublight.op import Call, Inputs

if TYPE_CHECKING:
    import torch

FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """How far an output is from float64, ours and PyTorch's; over several draws the larger maximum, the pooled mean."""

    name: str
    largest: float
    squares: float  # sum over elements of the squared error
    count: int
    torch_largest: float
    torch_squares: float
    misplaced: int = 0  # elements where one is finite or signed infinite or NaN and the other is not

    @property
    def ratio(self) -> float:
        """Ours over PyTorch's, the worse of maximum and root mean square; infinite where only PyTorch is exact."""
        if self.misplaced:
            return math.inf
        pairs = ((self.largest, self.torch_largest), (math.sqrt(self.squares), math.sqrt(self.torch_squares)))
        return max((ours / theirs if theirs else (math.inf if ours else 0.0)) for ours, theirs in pairs)

    @property
    def ok(self) -> bool:
        return self.ratio <= FACTOR

    def merge(self, other: Error) -> Error:
        return Error(
            name=self.name,
            largest=max(self.largest, other.largest),
            squares=self.squares + other.squares,
            count=self.count + other.count,
            torch_largest=max(self.torch_largest, other.torch_largest),
            torch_squares=self.torch_squares + other.torch_squares,
            misplaced=self.misplaced + other.misplaced,
        )


def error(name: str, ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> Error:
    """Compare two results of one data type with the float64 truth."""
    import torch

    if ours.shape != truth.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{name}: {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(truth.shape)}")
    rounded = truth.to(ours.dtype)  # so that what overflows in this data type counts as infinite, as it must
    odd = ~torch.isfinite(rounded)
    same = torch.where(torch.isnan(rounded), torch.isnan(ours), ours == rounded)
    misplaced = int((odd & ~same).sum()) + int((~odd & ~torch.isfinite(ours)).sum())
    plain = ~odd & torch.isfinite(ours) & torch.isfinite(theirs)

    def measures(result: torch.Tensor) -> tuple[float, float]:
        off = torch.where(plain, result.double() - truth, 0.0).abs_()
        return (float(off.max()), float(off.square_().sum())) if off.numel() else (0.0, 0.0)

    largest, squares = measures(ours)
    torch_largest, torch_squares = measures(theirs)
    return Error(
        name=name,
        largest=largest,
        squares=squares,
        count=ours.numel(),
        torch_largest=torch_largest,
        torch_squares=torch_squares,
        misplaced=misplaced,
    )


def forward_errors(ours: Call, reference: Call, inputs: Inputs) -> list[Error]:
    """Every output of `ours` against PyTorch's and against float64."""
    import torch

    with torch.no_grad():
        results = [_tuple(ours(*inputs)), _tuple(reference(*inputs)), _tuple(reference(*map(_double, inputs)))]
    return [error(f"output {i}", *triple) for i, triple in enumerate(zip(*results, strict=True))]


def backward_errors(ours: Call, reference: Call, inputs: Inputs, grad: torch.Tensor) -> list[Error]:
    """Every gradient; `ours` takes (grad, *inputs) and gives one for each input."""
    theirs, truth = gradients(reference, inputs, grad), gradients(reference, tuple(map(_double, inputs)), grad.double())
    results = zip(_tuple(ours(grad, *inputs)), theirs, truth, strict=True)
    return [error(f"gradient {i}", *triple) for i, triple in enumerate(results)]


def gradients(call: Call, inputs: Inputs, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each input, through autograd."""
    import torch

    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    return torch.autograd.grad(call(*leaves), leaves, grad)


def worst(errors: Sequence[Error]) -> Error:
    """The error with the largest ratio."""
    return max(errors, key=lambda error: error.ratio)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double()


def _tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
