"""Random equations against torch.einsum, bit by bit on whole numbers; paths, views, costs; bad equations."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import sublight
from sublight import correct
from sublight.backend.launch import watching
from sublight.cost import einsum as costs
from sublight.errors import BadInput
from sublight.ops.matmul import einsum as op

CASES = 400


def random_case(seed: int) -> tuple[str, list[Any]]:
    """An equation with indices that repeat, ellipses, sizes of 0 and 1, and tensors that lie anyhow in memory."""
    draw = random.Random(seed)
    letters = draw.sample("abcxyzABC", 5)
    sizes = {
        letter: draw.choice((0, 1, 2, 3, 3, 4, 5)) if draw.random() < 0.3 else draw.choice((2, 3)) for letter in letters
    }
    dots = [draw.choice((1, 2, 3)) for _ in range(draw.choice((0, 0, 1, 2)))]
    terms, tensors = [], []
    for _ in range(draw.choice((1, 2, 2, 3, 4))):
        own = [draw.choice(letters) for _ in range(draw.choice((0, 1, 2, 3)))]
        shape = [sizes[letter] for letter in own]
        if len(set(own)) == len(own):
            shape = [1 if draw.random() < 0.1 else size for size in shape]  # others stretch it
        words = list(own)
        if dots and draw.random() < 0.7:
            at, mine = draw.randint(0, len(own)), dots[draw.randint(0, len(dots)) :]
            words.insert(at, "...")
            shape[at:at] = [1 if draw.random() < 0.2 else size for size in mine]
        terms.append("".join(words))
        tensors.append(laid_out(shape, draw))
    used = sorted({letter for term in terms for letter in term if letter != "."})
    equation = (" , " if draw.random() < 0.2 else ",").join(terms)
    if draw.random() < 0.8:
        output = draw.sample(used, draw.randint(0, len(used)))
        if draw.random() < 0.8:
            output.insert(draw.randint(0, len(output)), "...")
        equation += "->" + "".join(output)
    return equation, tensors


def laid_out(shape: list[int], draw: random.Random) -> Any:
    """Whole numbers, so that every order of adding gives the same."""
    order = draw.sample(range(len(shape)), len(shape))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    wide = [2 * shape[place] if draw.random() < 0.3 else shape[place] for place in order]
    x = torch.randint(-3, 4, wide, generator=generator).double()
    x = x[
        tuple(
            slice(None, None, 2) if size != shape[place] else slice(None)
            for size, place in zip(wide, order, strict=True)
        )
    ]
    return x.permute([order.index(place) for place in range(len(shape))])


def test_random_equations_are_torchs() -> None:
    kinds = set()
    for seed in range(CASES):
        equation, tensors = random_case(seed)
        expected = torch.einsum(equation, *tensors)
        found = sublight.einsum(equation, *tensors)
        assert found.shape == expected.shape and torch.equal(found, expected), (seed, equation)
        plan = op.plan(equation, *tensors)
        kinds |= {(step.way, bool(step.copies)) for step in plan.steps}
        shapes = [tuple(x.shape) for x in tensors]
        assert costs.einsum_cost(equation, shapes, "float64").flops == plan.cost.flops, (seed, equation)
    assert {("product", False), ("product", True), ("multiplication", False), ("sum", False)} <= kinds


def test_gradients_are_torchs() -> None:
    for seed in range(60):
        equation, tensors = random_case(seed)
        leaves = [x.requires_grad_() for x in tensors]
        expected = torch.autograd.grad(torch.einsum(equation, *leaves).square().sum(), leaves, allow_unused=True)
        found = torch.autograd.grad(sublight.einsum(equation, *leaves).square().sum(), leaves, allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None and other is None) or torch.equal(one, other), (seed, equation)


def test_our_kernels_multiply(device: str) -> None:
    """Batches, a product that needs a swap, three tensors: in fp32, by the rule."""
    for equation, shapes in (
        ("bhqd,bhkd->bhqk", ((2, 3, 5, 16), (2, 3, 7, 16))),
        ("ij,jk,kl->li", ((9, 17), (17, 5), (5, 20))),
    ):

        def draw(seed: int, equation: str = equation, shapes: Any = shapes) -> list[correct.Error]:
            generator = torch.Generator().manual_seed(seed)
            inputs = tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)
            return correct.forward_errors(
                lambda *x: sublight.einsum(equation, *x), lambda *x: torch.einsum(equation, *x), inputs
            )

        with watching() as steps:
            error = correct.settled(draw)
        assert error.ok, (equation, error)
        assert steps or device == "cuda"  # where the plan takes cuBLAS


def test_no_copy_where_strides_allow() -> None:
    x, y = torch.randn(2, 5, 3, 16), torch.randn(2, 7, 3, 16)  # as attention has them, heads behind the length
    for equation, copied in (
        ("bqhd,bkhd->bhqk", ("tensor 0", "tensor 1")),  # batch and head have no one stride
        ("qhd,khd->hqk", ()),
        ("qhd,khd->qk", ()),  # head and width together are one dimension
        ("qhd,hkd->qk", ("tensor 1",)),
        ("hqd,khd->hkq", ()),
    ):
        tensors = (x, y) if equation[0] == "b" else (x[0], y[0])
        if equation.startswith("hqd"):
            tensors = (x[0].transpose(0, 1), y[0])
        if ",hkd" in equation:
            tensors = (x[0], y[0].transpose(0, 1).contiguous())
        (step,) = op.plan(equation, *tensors).steps
        assert step.copies == copied, (equation, step)
        assert sublight.einsum(equation, *tensors).shape == torch.einsum(equation, *tensors).shape


def test_the_result_lies_as_it_is_wanted() -> None:
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    assert sublight.einsum("ij,jk->ik", a, b).is_contiguous() and sublight.einsum("ij,jk->ki", a, b).is_contiguous()


def brute_force(terms: list[frozenset[str]], output: set[str], sizes: dict[str, int]) -> int:
    """The least work over all orders, without anything clever."""
    if len(terms) == 1:
        return 0
    found = []
    for pair in itertools.combinations(range(len(terms)), 2):
        rest = [labels for place, labels in enumerate(terms) if place not in pair]
        both = terms[pair[0]] | terms[pair[1]]
        result = both & (output.union(*rest))
        found.append(math.prod(sizes[label] for label in both) + brute_force([*rest, result], output, sizes))
    return min(found)


def work_of(terms: list[frozenset[str]], output: set[str], sizes: dict[str, int], path: list[tuple[int, int]]) -> int:
    total = 0
    for pair in path:
        total += math.prod(sizes[label] for label in terms[pair[0]] | terms[pair[1]])
        result = costs.kept(terms, pair, output)
        terms = [labels for place, labels in enumerate(terms) if place not in pair] + [result]
    assert len(terms) == 1
    return total


@pytest.mark.parametrize("seed", range(6))
def test_the_path_is_the_best(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {letter: draw.choice((2, 3, 7, 20)) for letter in "abcdef"}
    terms = [frozenset(draw.sample("abcdef", draw.choice((1, 2, 3)))) for _ in range(4)]
    output = {letter for letter in "abcdef" if draw.random() < 0.3}
    terms = [term & output.union(*(other for other in terms if other is not term)) for term in terms]
    best = brute_force(terms, output, sizes)
    assert work_of(terms, output, sizes, costs.path(terms, output, sizes)) == best
    assert work_of(terms, output, sizes, costs._greedy(terms, output, sizes)) >= best


def test_many_tensors_go_by_the_cheapest_pair() -> None:
    letters = "abcdefghijk"
    terms = [a + b for a, b in itertools.pairwise(letters)]  # ten matrices in a row
    tensors = [torch.randint(-2, 3, (2, 2)).double() for _ in terms]
    equation = ",".join(terms) + "->ak"
    assert torch.equal(sublight.einsum(equation, *tensors), torch.linalg.multi_dot(tensors))


def test_why_shows_the_path_and_its_cost() -> None:
    a, b, c = torch.empty(2, 1000), torch.empty(1000, 1000), torch.empty(1000, 3)
    plan: Any = sublight.why("einsum", "ij,jk,kl->il", a, b, c)
    assert [step.equation for step in plan.steps] == ["ij,jk->ik", "kl,ik->il"]
    assert plan.cost.total_flops == 2 * (2 * 1000 * 1000 + 2 * 1000 * 3)
    assert "2x1000 @ 1000x1000" in str(plan) and "times fewer operations than at once" in str(plan)
    assert (
        plan.cost.total_flops == costs.einsum_cost("ij,jk,kl->il", [x.shape for x in (a, b, c)], "float32").total_flops
    )


def test_bad_input_is_refused_in_one_line() -> None:
    x = torch.ones(2, 3)
    for args, words in (
        (("ij,jk", x), "has 2 terms, for 1 tensors"),
        (("ijk", x), "does not fit a tensor of 2 dimensions"),
        (("i", x), "does not fit a tensor of 2 dimensions"),
        (("ii", x), "i is 2 and 3 in one tensor"),
        (("ij,ij->i", x, x.T), "i is 2 and 3"),
        (("ij->ik", x), "k of the result is in no tensor"),
        (("ij->ii", x), "one index twice"),
        (("i1", x), "'1' is no index"),
        (("ij->i->j", x), "is no index"),
        ((x, "ij"), "takes an equation first"),
        (("ij",), "takes tensors"),
    ):
        with pytest.raises(BadInput, match=words) as error:
            sublight.einsum(*args)
        assert "\n" not in str(error.value)
