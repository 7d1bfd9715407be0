"""Contractions by equation: pairs in the best order, each a batched product on views where strides allow.

The indices of two tensors fall into four groups: batches (in both and in the result), sums (in both, not in the
result), rows (in the first alone), columns (in the second alone). A group whose strides nest is one dimension of a
view, so a pair is one batched product without copying anything; where a group does not nest, that tensor is copied.
What is in no other tensor and not in the result is summed first; a pair without a sum is a plain multiplication.
`plan` walks through the same steps as the call, with a multiplication that notes instead of multiplying.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sublight import units
from sublight.cost import Cost
from sublight.cost.einsum import Equation, Label, Labels, kept, pair_cost, parse, path
from sublight.cost.record import NOTHING
from sublight.cost.tensor import Tensor, over
from sublight.errors import BadInput
from sublight.op import Plan
from sublight.ops.matmul.matmul import MATMUL, matmul
from sublight.ops.matmul.product import _one_stride

MOST_KNOWN = 4096  # equations and layouts that are kept


class Term(NamedTuple):
    """A tensor, a label for each of its dimensions, and what it is called in a plan."""

    tensor: torch.Tensor
    labels: Labels
    name: str


class Layout(NamedTuple):
    """What an arrangement depends on."""

    labels: Labels
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def order(self, group: Sequence[Label]) -> Labels:
        """These indices in the order in which the tensor's memory has them."""
        at = {label: (-self.strides[place], place) for place, label in enumerate(self.labels)}
        return tuple(sorted(group, key=at.__getitem__))

    def nests(self, group: Sequence[Label]) -> bool:
        """Whether these dimensions, in this order, are one dimension of a view."""
        places = [self.labels.index(label) for label in group]
        sizes, strides = ([each[place] for place in places] for each in (self.shape, self.strides))
        return 0 in sizes or _one_stride(sizes, strides)[1] is not None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How a pair is one product: the dimensions of each tensor in their order, and the sizes they are merged to."""

    is_swapped: bool  # the second tensor gives the rows, so that the result lies as it is wanted
    first_dims: tuple[int, ...]
    first_sizes: tuple[int, ...]
    second_dims: tuple[int, ...]
    second_sizes: tuple[int, ...]
    labels: Labels  # of the result
    sizes: tuple[int, ...]
    copied: tuple[bool, bool]  # of the first and the second

    @property
    def mkn(self) -> tuple[int, int, int]:
        return self.first_sizes[-2], self.first_sizes[-1], self.second_sizes[-1]


@functools.lru_cache(MOST_KNOWN)
def arrange(one: Layout, other: Layout, result: Labels) -> Arrangement:
    """Arrange two tensors that share a summed index as one product; `result` is in the order that is wanted."""
    has_columns = any(label not in one.labels for label in result)
    is_swapped = has_columns and result[-1] not in other.labels
    first, second = (other, one) if is_swapped else (one, other)
    size = dict(zip(one.labels + other.labels, one.shape + other.shape, strict=True))
    batches = [label for label in result if label in one.labels and label in other.labels]
    sums = [label for label in first.labels if label in second.labels and label not in result]
    rows = [label for label in result if label not in second.labels]
    cols = [label for label in result if label not in first.labels]

    def best(group: Sequence[Label], *layouts: Layout) -> Labels:
        """The order in which the fewest elements are copied: the wanted one, or as one of the tensors has it."""
        orders = [tuple(group), *(layout.order(group) for layout in layouts)]
        return min(orders, key=lambda order: sum(each.numel for each in layouts if not each.nests(order)))

    groups = best(batches, first, second), best(rows, first), best(sums, first, second), best(cols, second)
    batch, row, total, col = groups

    def merged(layout: Layout, *parts: Labels) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        parts = parts if batch else parts[1:]
        dims = tuple(layout.labels.index(label) for part in parts for label in part)
        sizes = tuple(math.prod(size[label] for label in part) for part in parts)
        return dims, sizes, not all(layout.nests(part) for part in parts)

    first_dims, first_sizes, first_copied = merged(first, batch, row, total)
    second_dims, second_sizes, second_copied = merged(second, batch, total, col)
    labels = (*batch, *row, *col)
    return Arrangement(
        is_swapped=is_swapped,
        first_dims=first_dims,
        first_sizes=first_sizes,
        second_dims=second_dims,
        second_sizes=second_sizes,
        labels=labels,
        sizes=tuple(size[label] for label in labels),
        copied=(second_copied, first_copied) if is_swapped else (first_copied, second_copied),
    )


def layout_of(term: Term) -> Layout:
    return Layout(term.labels, tuple(term.tensor.shape), term.tensor.stride())


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """One step of a plan."""

    equation: str
    way: str  # "product", "multiplication" or "sum"
    sizes: str  # of a product, as people write it
    copies: tuple[str, ...]  # tensors whose strides do not allow a view
    cost: Cost
    product: Plan | None = None  # how the product itself runs


@dataclass(frozen=True, slots=True, kw_only=True)
class EinsumPlan:
    """What an einsum runs, in its order, and what each step costs."""

    equation: str
    steps: tuple[Contraction, ...]
    at_once_flops: float  # of one sum over all indices, without pairs

    @property
    def cost(self) -> Cost:
        return sum((step.cost for step in self.steps), NOTHING)

    @property
    def kernel(self) -> str:
        return ", ".join(dict.fromkeys(step.product.kernel for step in self.steps if step.product))

    def __str__(self) -> str:
        lines = [f"einsum {self.equation!r}: {len(self.steps) or 'no'} step{'s' * (len(self.steps) != 1)}"]
        for step in self.steps:
            flops, moved = units.text(step.cost.total_flops, "FLOP"), units.text(step.cost.bytes, "B")
            copies = f"; {' and '.join(step.copies)} copied: no view has these strides" if step.copies else ""
            by = f" by {step.product.kernel} ({step.product.reason})" if step.product else ""
            lines.append(f"  {step.equation}: {step.way}{step.sizes}{by}, {flops}, {moved}{copies}")
        if self.cost.total_flops and self.at_once_flops > self.cost.total_flops:
            lines.append(f"  {self.at_once_flops / self.cost.total_flops:.3g} times fewer operations than at once")
        return "\n".join(lines)


def einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    """The sum of products that the equation names, as `torch.einsum` has it: pairs in the best order, each a product
    of ours where that wins. `sublight.why("einsum", equation, *operands)` shows the path and what each step costs."""
    check(equation, operands)
    if torch.compiler.is_compiling():
        return torch.einsum(equation, *operands)  # type: ignore[no-any-return]
    return _walk(equation, operands, matmul, None)


def plan(equation: str, *operands: torch.Tensor) -> EinsumPlan:
    """What `einsum` runs for these tensors; nothing is multiplied."""
    check(equation, operands)
    steps: list[Contraction] = []
    with torch.no_grad():
        _walk(equation, operands, lambda a, b: a.new_empty((*a.shape[:-1], b.shape[-1])), steps)
    sizes = parse(equation, [tuple(x.shape) for x in operands]).sizes
    at_once = float(len(operands) * math.prod(sizes.values()))
    return EinsumPlan(equation=equation, steps=tuple(steps), at_once_flops=at_once)


def check(equation: str, operands: Sequence[torch.Tensor]) -> None:
    if not isinstance(equation, str):
        raise BadInput(f"einsum takes an equation first, as 'ij,jk->ik', not {type(equation).__name__}")
    if not operands or not all(isinstance(x, torch.Tensor) for x in operands):
        raise BadInput(f"einsum {equation!r} takes tensors behind its equation")


@functools.lru_cache(MOST_KNOWN)
def _parsed(equation: str, shapes: tuple[tuple[int, ...], ...]) -> Equation:
    return parse(equation, shapes)


@functools.lru_cache(MOST_KNOWN)
def _path(terms: tuple[Labels, ...], output: Labels, sizes: tuple[tuple[Label, int], ...]) -> list[tuple[int, int]]:
    return path(terms, output, dict(sizes))


def _walk(
    equation: str, operands: Sequence[torch.Tensor], product: Product, steps: list[Contraction] | None
) -> torch.Tensor:
    """All pairs in their order; what each was is noted in `steps`."""
    parsed = _parsed(equation, tuple(tuple(x.shape) for x in operands))
    output, sizes = parsed.output, parsed.sizes
    terms = [
        _views(Term(x, labels, f"tensor {place}"), parsed)
        for place, (x, labels) in enumerate(zip(operands, parsed.inputs, strict=True))
    ]
    all_labels = [term.labels for term in terms]
    terms = [_alone(term, kept(all_labels, (place,), output), steps) for place, term in enumerate(terms)]
    for one, other in _path(tuple(term.labels for term in terms), output, tuple(sizes.items())):
        needed = kept([term.labels for term in terms], (one, other), output)
        pair = terms[one], terms[other]
        terms = [term for place, term in enumerate(terms) if place not in (one, other)]
        in_order = output if not terms else pair[0].labels + pair[1].labels
        result = tuple(dict.fromkeys(label for label in in_order if label in needed))
        terms.append(_pair(*pair, result, product, steps))
    (last,) = terms
    x = last.tensor.permute([last.labels.index(label) for label in output if label in last.labels])
    missing = [place for place, label in enumerate(output) if label not in last.labels]
    for place in missing:  # no tensor has more than one entry of it
        x = x.unsqueeze(place)
    return x


def _views(term: Term, parsed: Equation) -> Term:
    """Diagonals for indices that a tensor has twice; without the dimensions of one that others stretch."""
    x, labels = term.tensor, list(term.labels)
    while twice := [label for label in labels if labels.count(label) > 1]:
        first = labels.index(twice[0])
        second = labels.index(twice[0], first + 1)
        x = x.diagonal(dim1=first, dim2=second)
        del labels[second], labels[first]
        labels.append(twice[0])
    for place in range(len(labels) - 1, -1, -1):
        if x.shape[place] == 1 and parsed.sizes[labels[place]] != 1:
            x = x.select(place, 0)
            del labels[place]
    return Term(x, tuple(labels), term.name)


def _alone(term: Term, needed: frozenset[Label], steps: list[Contraction] | None) -> Term:
    """Summed over what neither another tensor nor the result has."""
    places = [place for place, label in enumerate(term.labels) if label not in needed]
    if not places:
        return term
    left = tuple(label for label in term.labels if label in needed)
    x = term.tensor.sum(places, dtype=term.tensor.dtype)
    if steps is not None:
        cost = over([_costed(term.tensor)], [_costed(x)], operations=term.tensor.numel())
        steps.append(
            Contraction(
                equation=f"{_text(term.labels)}->{_text(left)}",
                way="sum",
                sizes=f" of {term.name}",
                copies=(),
                cost=cost,
            )
        )
    return Term(x, left, term.name)


def _pair(one: Term, other: Term, result: Labels, product: Product, steps: list[Contraction] | None) -> Term:
    if not {*one.labels, *other.labels} - {*result}:
        x = _spread(one, result) * _spread(other, result)
        if steps is not None:
            steps.append(_noted(one, other, result, x, way="multiplication", sizes="", copies=(), product=None))
        return Term(x, result, f"({one.name}, {other.name})")
    how = arrange(layout_of(one), layout_of(other), result)
    first, second = (other, one) if how.is_swapped else (one, other)
    a = first.tensor.permute(how.first_dims).reshape(how.first_sizes)
    b = second.tensor.permute(how.second_dims).reshape(how.second_sizes)
    x = product(a, b).reshape(how.sizes)
    if steps is not None:
        batches = f" {how.first_sizes[0]} ×" if len(how.first_sizes) == 3 else ""
        copies = tuple(term.name for term, is_copied in zip((one, other), how.copied, strict=True) if is_copied)
        m, k, n = how.mkn
        step = _noted(
            one, other, how.labels, x,
            way="product", sizes=f"{batches} {m}x{k} @ {k}x{n}", copies=copies, product=MATMUL.plan(a, b),
        )  # fmt: skip
        steps.append(step)
    return Term(x, how.labels, f"({one.name}, {other.name})")


def _spread(term: Term, result: Labels) -> torch.Tensor:
    """The tensor with a dimension for each index of the result, of size one where it has none."""
    x = term.tensor.permute([term.labels.index(label) for label in result if label in term.labels])
    for place, label in enumerate(result):
        if label not in term.labels:
            x = x.unsqueeze(place)
    return x


def _noted(
    one: Term, other: Term, result: Labels, x: torch.Tensor, *,
    way: str, sizes: str, copies: tuple[str, ...], product: Plan | None,
) -> Contraction:  # fmt: skip
    size = dict(zip(one.labels + other.labels, (*one.tensor.shape, *other.tensor.shape), strict=True))
    cost = pair_cost(one.labels, other.labels, result, size, str(x.dtype).removeprefix("torch."))
    for term in (one, other):
        if term.name in copies:
            cost = cost + over([_costed(term.tensor)], [_costed(term.tensor)])
    equation = f"{_text(one.labels)},{_text(other.labels)}->{_text(result)}"
    return Contraction(equation=equation, way=way, sizes=sizes, copies=copies, cost=cost, product=product)


def _costed(x: torch.Tensor) -> Tensor:
    return Tensor(shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))


def _text(labels: Labels) -> str:
    """An ellipsis is written as one."""
    words: list[str] = []
    for label in labels:
        word = "..." if label[0] == "." else label
        if word != "..." or not words or words[-1] != word:
            words.append(word)
    return "".join(words)
