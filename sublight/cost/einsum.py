"""Contractions by equation: which indices mean what, in which order pairs are contracted, and what each pair costs.

A product of three tensors in the wrong order may take thousands of times the operations of the best. Up to eight
tensors every order is tried, by dynamic programming over sets of tensors; beyond that the pair that costs least is
contracted first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sublight.cost.dtypes import matmul_limit, vector_limit
from sublight.cost.record import NOTHING, Cost
from sublight.cost.tensor import dense, over
from sublight.errors import BadInput

Label = str  # a letter, or "...2" for the second dimension from the right of an ellipsis
Labels = tuple[Label, ...]
Sizes = Mapping[Label, int]
Pair = tuple[int, int]  # places in a list from which both are taken, and to whose end the result goes
MOST_EXACT = 8  # tensors of which every order is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """What an equation means for tensors of certain shapes."""

    inputs: tuple[Labels, ...]  # a label for each dimension, of a diagonal the same one twice
    output: Labels
    sizes: Sizes


def parse(equation: str, shapes: Sequence[tuple[int, ...]]) -> Equation:
    """Parse an equation as `torch.einsum` does: implicit outputs by the alphabet, ellipses, sizes of one that stretch.

    >>> parse("...ij,jk", [(7, 2, 3), (3, 4)]).output
    ('...1', 'i', 'k')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise BadInput(f"einsum {equation!r} has {len(terms)} terms, for {len(shapes)} tensors")
    inputs = tuple(_labels(equation, term, len(shape)) for term, shape in zip(terms, shapes, strict=True))
    sizes: dict[Label, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        own: dict[Label, int] = {}
        for label, size in zip(labels, shape, strict=True):
            if own.setdefault(label, size) != size:
                raise BadInput(f"einsum {equation!r}: {label} is {own[label]} and {size} in one tensor")
            if sizes.setdefault(label, size) != size:
                if 1 not in (size, sizes[label]):
                    raise BadInput(f"einsum {equation!r}: {label} is {sizes[label]} and {size}")
                sizes[label] = max(size, sizes[label]) if 0 not in (size, sizes[label]) else 0
    dots = sorted({label for labels in inputs for label in labels if label[0] == "."}, key=_from_right, reverse=True)
    if arrow:
        output = tuple(
            label for letter in _letters(equation, right) for label in (dots if letter == "..." else [letter])
        )
    else:
        counts = Counter(label for labels in inputs for label in labels if label[0] != ".")
        output = (*dots, *sorted(label for label, count in counts.items() if count == 1))
    if unknown := [label for label in output if label not in sizes]:
        raise BadInput(f"einsum {equation!r}: {unknown[0]} of the result is in no tensor")
    if len(set(output)) != len(output):
        raise BadInput(f"einsum {equation!r}: the result has one index twice")
    return Equation(inputs=inputs, output=output, sizes=sizes)


def _from_right(label: Label) -> int:
    return int(label[3:])


def _letters(equation: str, term: str) -> list[str]:
    """A term's letters, `...` as one of them."""
    before, dots, after = term.partition("...")
    for letter in before + after:
        if not (letter.isascii() and letter.isalpha()):
            raise BadInput(f"einsum {equation!r}: {letter!r} is no index: write letters, commas, '->' and '...'")
    return [*before, *([dots] if dots else []), *after]


def _labels(equation: str, term: str, dims: int) -> Labels:
    letters = _letters(equation, term)
    if (missing := dims - len([letter for letter in letters if letter != "..."])) < 0 or (
        missing and "..." not in letters
    ):
        raise BadInput(f"einsum {equation!r}: {term!r} does not fit a tensor of {dims} dimensions")
    more = [f"...{place}" for place in range(missing, 0, -1)]
    return tuple(label for letter in letters for label in (more if letter == "..." else [letter]))


def path(terms: Sequence[Collection[Label]], output: Collection[Label], sizes: Sizes) -> list[Pair]:
    """The pairs in their order: with the fewest operations, of those with the smallest results between.

    >>> sizes = {"a": 2, "b": 1000, "c": 1000, "d": 3}
    >>> path([{"a", "b"}, {"b", "c"}, {"c", "d"}], {"a", "d"}, sizes)  # (2x1000 @ 1000x1000) @ 1000x3
    [(0, 1), (0, 1)]
    """
    found = _best_tree(terms, output, sizes) if len(terms) <= MOST_EXACT else None
    return _greedy(terms, output, sizes) if found is None else _pairs_of(found, len(terms))


Tree = tuple["Tree", "Tree"] | int


def kept(terms: Sequence[Collection[Label]], inside: Collection[int], output: Collection[Label]) -> frozenset[Label]:
    """The indices of the contraction of the terms `inside` that the rest still needs."""
    own = {label for place in inside for label in terms[place]}
    needed = set(output).union(*(labels for place, labels in enumerate(terms) if place not in inside))
    return frozenset(own & needed)


def _work(labels: Collection[Label], sizes: Sizes) -> int:
    return math.prod(sizes[label] for label in labels)


def _best_tree(terms: Sequence[Collection[Label]], output: Collection[Label], sizes: Sizes) -> Tree:
    """The best order, by dynamic programming: a set's best tree is its best split into two, each with its best tree."""
    count = len(terms)
    members = [[place for place in range(count) if bits >> place & 1] for bits in range(1 << count)]
    labels = [frozenset(terms[inside[0]]) if len(inside) == 1 else kept(terms, inside, output) for inside in members]
    best: dict[int, tuple[int, int, Tree]] = {1 << place: (0, 0, place) for place in range(count)}
    for bits in range(1, 1 << count):
        if bits in best:
            continue
        size = _work(labels[bits], sizes)
        part, options = (bits - 1) & bits, []
        while part > bits ^ part:  # each split once
            one, other = best[part], best[bits ^ part]
            work = one[0] + other[0] + _work(labels[part] | labels[bits ^ part], sizes)
            options.append((work, one[1] + other[1] + size, (other[2], one[2])))
            part = (part - 1) & bits
        best[bits] = min(options, key=lambda option: option[:2])
    return best[(1 << count) - 1][2]


def _pairs_of(tree: Tree, count: int) -> list[Pair]:
    places: list[Tree] = list(range(count))
    pairs: list[Pair] = []

    def contract(node: Tree) -> None:
        if isinstance(node, int):
            return
        contract(node[0])
        contract(node[1])
        one, other = sorted((places.index(node[0]), places.index(node[1])))
        pairs.append((one, other))
        del places[other], places[one]
        places.append(node)

    contract(tree)
    return pairs


def _greedy(terms: Sequence[Collection[Label]], output: Collection[Label], sizes: Sizes) -> list[Pair]:
    left = [frozenset(labels) for labels in terms]
    pairs: list[Pair] = []
    while len(left) > 1:

        def price(pair: Pair, left: list[frozenset[Label]] = left) -> tuple[int, int]:
            one, other = (left[place] for place in pair)
            grown = _work(kept(left, pair, output), sizes) - _work(one, sizes) - _work(other, sizes)
            return grown, _work(one | other, sizes)

        pair = min(((one, other) for other in range(len(left)) for one in range(other)), key=price)
        result = kept(left, pair, output)
        left = [labels for place, labels in enumerate(left) if place not in pair] + [result]
        pairs.append(pair)
    return pairs


def pair_cost(one: Labels, other: Labels, result: Labels, sizes: Sizes, dtype: str) -> Cost:
    """Read both, write the result; a product where an index is summed over, a multiplication an element elsewhere."""
    shapes = [[sizes[label] for label in labels] for labels in (one, other, result)]
    a, b, c = (dense(dtype, *shape) for shape in shapes)
    work = _work({*one, *other}, sizes)
    is_product = bool({*one, *other} - {*result})
    flops = {matmul_limit(dtype): 2.0 * work} if is_product else {vector_limit(dtype): float(work)}
    return over([a, b], [c], flops=flops)


def einsum_cost(equation: str, shapes: Sequence[tuple[int, ...]], dtype: str) -> Cost:
    """What is in one tensor alone summed first, then all pairs in the best order, each as an op of its own.

    >>> einsum_cost("ij,jk->ik", [(2, 3), (3, 4)], "bfloat16").total_flops
    48.0
    """
    parsed = parse(equation, shapes)
    sizes, output = parsed.sizes, parsed.output
    terms = [
        tuple(dict.fromkeys(label for label, size in zip(labels, shape, strict=True) if size == sizes[label]))
        for labels, shape in zip(parsed.inputs, shapes, strict=True)
    ]
    total, left = NOTHING, [tuple(sorted(kept(terms, (place,), output))) for place in range(len(terms))]
    for before, after in zip(terms, left, strict=True):
        if len(after) < len(before):
            x, y = (dense(dtype, *(sizes[label] for label in labels)) for labels in (before, after))
            total = total + over([x], [y], operations=x.numel)
    for one, other in path(left, output, sizes):
        result = tuple(sorted(kept(left, (one, other), output)))
        total = total + pair_cost(left[one], left[other], result, sizes, dtype)
        left = [labels for place, labels in enumerate(left) if place not in (one, other)] + [result]
    return total
