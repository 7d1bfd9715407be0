"""The one rule of correctness: no further from a float64 reference than twice what PyTorch's own implementation is.

PyTorch's composition in the same data type (TF32 off) is the yardstick, in maximum and in root-mean-square error, for
every output and every gradient; where its error is zero, ours must be zero. There is no tolerance to pick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FACTOR = 2.0
FAR_OFF = 1e6  # written in place of an infinite ratio, which JSON cannot hold
Inputs = tuple["torch.Tensor", ...]
Call = Callable[..., Any]  # tensors in, a tensor or a tuple of them out


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
    if not ours.is_floating_point():
        wrong = int((ours != theirs).sum())
        return Error(name=name, largest=0.0, squares=0.0, count=ours.numel(), torch_largest=0.0, torch_squares=0.0,
                     misplaced=wrong)  # fmt: skip
    rounded = truth.to(ours.dtype)  # so that what overflows in this data type counts as infinite, as it must
    odd = ~torch.isfinite(rounded)
    same = torch.where(torch.isnan(rounded), torch.isnan(ours), ours == rounded)
    misplaced = int((odd & ~same).sum()) + int((~odd & ~torch.isfinite(ours)).sum())
    plain = ~odd & torch.isfinite(ours) & torch.isfinite(theirs)

    def measures(result: torch.Tensor) -> tuple[float, float]:
        off = (
            (truth.double() - result).masked_fill_(~plain, 0.0).abs_()
        )  # each float64 copy of a large result is gigabytes
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


def forward_errors(ours: Call, reference: Call, inputs: Inputs, *, writes: bool = False) -> list[Error]:
    """Every output of `ours` against PyTorch's and against float64; with `writes` each call gets inputs of its own.

    Outputs of whole numbers (indices, counts) have no error: they are compared as they are, so an op whose ties may be
    broken either way needs a check of its own.
    """
    import torch

    own = (lambda xs: tuple(x.clone() for x in xs)) if writes else tuple
    with torch.no_grad():
        results = [
            _tuple(ours(*own(inputs))),
            _tuple(reference(*own(inputs))),
            _tuple(reference(*map(_double, own(inputs)))),
        ]
    return [error(f"output {i}", *triple) for i, triple in enumerate(zip(*results, strict=True))]


def backward_errors(
    ours: Call,
    reference: Call,
    inputs: Inputs,
    grads: torch.Tensor | tuple[torch.Tensor, ...],
    *,
    wrt: tuple[int, ...] | None = None,
) -> list[Error]:
    """Every gradient; `ours` takes (*grads, *inputs) and gives one for each of `wrt`."""
    grads = _tuple(grads)
    theirs = gradients(reference, inputs, grads, wrt=wrt)
    truth = gradients(reference, tuple(map(_double, inputs)), tuple(map(_double, grads)), wrt=wrt)
    results = zip(_tuple(ours(*grads, *inputs)), theirs, truth, strict=True)
    return [error(f"gradient {i}", *triple) for i, triple in enumerate(results)]


def leaves_of(inputs: Inputs, wrt: tuple[int, ...] | None) -> Inputs:
    """The same inputs as leaves of autograd; those in `wrt` require a gradient."""
    return tuple(
        x.detach().requires_grad_() if (x.is_floating_point() if wrt is None else i in wrt) else x
        for i, x in enumerate(inputs)
    )


def gradients(
    call: Call,
    inputs: Inputs,
    grads: torch.Tensor | tuple[torch.Tensor, ...],
    *,
    wrt: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradient of each input of `wrt`, by autograd; `grads` belong to the outputs that have one, in their order."""
    import torch

    leaves = leaves_of(inputs, wrt)
    outputs = [y for y in _tuple(call(*leaves)) if y.requires_grad]
    return torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], _tuple(grads))


def random_grads(call: Call, inputs: Inputs, *, wrt: tuple[int, ...] | None = None, seed: int = 7) -> Inputs:
    """A gradient for each output of `call` that has one: random, but 1 for a single number, as of `loss.backward()`."""
    import torch

    with torch.enable_grad():
        outputs = [y for y in _tuple(call(*leaves_of(inputs, wrt))) if y.requires_grad]
    generator = torch.Generator(device=outputs[0].device).manual_seed(seed)
    return tuple(
        torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype) if y.dim() else torch.ones_like(y)
        for y in outputs
    )


def worst(errors: Sequence[Error]) -> Error:
    """The error with the largest ratio."""
    return max(errors, key=lambda error: error.ratio)


def pooled(errors: Sequence[Sequence[Error]]) -> Error:
    """The worst result's error, pooled over several draws; each draw is a list with one error for each result."""
    total = list(errors[0])
    for more in errors[1:]:
        total = [one.merge(other) for one, other in zip(total, more, strict=True)]
    return worst(total)


def settled(draw: Callable[[int], Sequence[Error]], draws: int = 1, *, times: int = 8) -> Error:
    """The pooled error over `draws` seeds; where it is beyond the rule, over up to `times` as many.

    A maximum over few numbers is luck: where PyTorch's largest error happens to be small, right code looks wrong. Draws
    are doubled until the two maxima have come near what each can reach: a lucky ratio falls, a real error's stays.
    """
    errors = [draw(seed) for seed in range(draws)]
    while not (pooled_error := pooled(errors)).ok and len(errors) < draws * times:
        errors += [draw(seed) for seed in range(len(errors), 2 * len(errors))]
    return pooled_error


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double() if x.is_floating_point() else x


def _tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
