"""Reductions over any axis of any layout; ties, NaN and infinities; the order of additions does not change."""

from __future__ import annotations

import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from sublight import correct
from sublight.errors import BadInput
from sublight.op import Op
from sublight.ops.kernels import plane
from sublight.ops.movement.plans_test import check_plans, check_second_derivatives, launched
from sublight.ops.random_test import random_cases
from sublight.ops.reduce import reduce

LAUNCHES = {
    "sum": (reduce.launch_sum, reduce.sum_reference),
    "max": (reduce.launch_max, reduce.max_reference),
    "argmax": (reduce.launch_argmax, reduce.argmax_reference),
}
EACH = pytest.mark.parametrize("name", LAUNCHES)


@EACH
@random_cases
@given(data=st.data(), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), keepdim=st.booleans())
def test_any_axis_of_any_layout(name: str, data: st.DataObject, sizes: list[int], keepdim: bool, device: str) -> None:
    long = data.draw(st.integers(0, len(sizes) - 1))
    sizes[long] = data.draw(st.integers(1, 3000 if math.prod(sizes) < 100 else 40))
    order = data.draw(st.permutations(range(len(sizes))))
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first, len(sizes) - 1))
    dim = data.draw(st.sampled_from([None, tuple(range(first, last + 1)), first, last - len(sizes)]))
    launch, reference = LAUNCHES[name]

    def draw(seed: int) -> list[correct.Error]:
        x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).round(decimals=1)  # most rows have equals
        x = x.to(device).permute(order)
        return correct.forward_errors(*(partial(f, dim=dim, keepdim=keepdim) for f in (launch, reference)), (x,))

    error = correct.settled(draw, times=64)
    assert error.ok, error
    if name == "max":
        assert error.largest == 0


@pytest.mark.parametrize("shape", [(3, 40), (3, 2049), (2, 2064), (1, 30_001), (3, 700, 5)])
def test_the_first_of_equals_and_the_first_nan(shape: tuple[int, ...], device: str) -> None:
    n = shape[1]
    for values, index in (
        ((), 0),
        (((n - 1, 2.0), (n // 2, 2.0)), n // 2),
        (((n - 1, math.nan), (3, math.inf)), n - 1),
        (((n - 1, math.nan), (n // 3, math.nan), (3, math.inf)), n // 3),
        (((0, -0.0), (5, 0.0)), 0),
    ):
        x = torch.full(shape, -math.inf if not values else -1.0, device=device)
        for place, value in values:
            x[:, place] = value
        assert (reduce.launch_argmax(x, 1) == index).all(), (values, index)
        expected = x.double().amax(1).float()
        torch.testing.assert_close(reduce.launch_max(x, 1), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 40), (3, 2049), (3, 700, 5)])
def test_sums_with_infinities(shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(shape, device=device)
    x[0, 7], x[1, 3], x[1, 9] = math.inf, math.inf, -math.inf
    result = reduce.launch_sum(x, 1)
    assert (result[0] == math.inf).all() and torch.isnan(result[1]).all() and (result[2] == shape[1]).all()


def test_each_kernel_is_reached(device: str) -> None:
    plans = [reduce.REDUCE_SUM.plan(*reduce.inputs(shape, "float32", device, 0)) for shape in reduce.TEST_SHAPES]
    first = {plan.steps[0].name for plan in plans}
    assert first == {"_tile_kernel", "_rows_kernel", "_columns_kernel"}
    assert {plan.steps[0].name for plan in plans if len(plan.steps) > 1} == {"_rows_kernel", "_columns_kernel"}  # split


def test_where_a_row_begins_decides_how_it_is_read(device: str) -> None:
    """By vectors that fill it, by vectors between its ends, or, where even the first row is at no boundary, singly."""
    x = torch.zeros(3 * 2065 + 1, device=device)
    for view, vector in ((x[: 3 * 2064].view(3, -1), 1), (x[:-1].view(3, -1), 4), (x[1:].view(3, -1), 1)):
        (step,) = reduce.REDUCE_MAX.plan(view).steps
        assert (step.name, step.constants["VECTOR"]) == ("_rows_kernel", vector)


CASES = (
    (reduce.REDUCE_SUM, {"outer": 5, "n": 700, "inner": 16}),
    (reduce.REDUCE_SUM, {"outer": 2, "n": 2064, "inner": 1}),
    (reduce.REDUCE_MAX, {"outer": 3, "n": 127, "inner": 1}),
    (reduce.REDUCE_MAX, {"outer": 2, "n": 33, "inner": 300}),
    (reduce.REDUCE_ARGMAX, {"outer": 70, "n": 9, "inner": 3}),
)
EACH_CASE = pytest.mark.parametrize(("op", "shape"), CASES, ids=lambda x: x.name if isinstance(x, Op) else "")


@EACH_CASE
def test_why_names_what_is_launched_and_plans_fit(op: Op, shape: dict[str, int], device: str) -> None:
    check_plans(op, shape, device)


@pytest.mark.parametrize(("op", "shape"), CASES[:4], ids=lambda x: x.name if isinstance(x, Op) else "")
def test_second_derivatives_are_as_right_as_pytorchs(op: Op, shape: dict[str, int], device: str) -> None:
    check_second_derivatives(op, shape, device)


def test_indices_are_found_where_a_gradient_needs_them(device: str) -> None:
    x = torch.randn(3, 127, device=device)
    leaf = x.clone().requires_grad_()
    for plan, kind in ((reduce.REDUCE_MAX.plan(x), "max"), (reduce.REDUCE_MAX.plan(leaf), "argmax")):
        assert plan.steps[0].constants["KIND"] == kind
    with torch.no_grad():
        assert reduce.REDUCE_MAX.plan(leaf).steps[0].constants["KIND"] == "max"
    dy = torch.ones(3, device=device)
    assert launched(lambda: torch.autograd.grad(reduce.reduce_max(leaf), leaf, dy)) == "_tile_kernel, _spread_kernel"


def test_an_index_has_no_gradient(device: str) -> None:
    x = torch.randn(3, 127, device=device, requires_grad=True)
    index = reduce.reduce_argmax(x)
    assert not index.requires_grad and torch.equal(index, x.argmax(-1))
    assert reduce.REDUCE_ARGMAX.plan(x).provider == "sublight"


def test_the_gradient_of_a_sum_is_a_view(device: str) -> None:
    x = torch.randn(4, 5, 6, device=device, requires_grad=True)
    dy = torch.randn(4, 6, device=device)
    (dx,) = torch.autograd.grad(reduce.reduce_sum(x, 1), x, dy)
    assert dx.data_ptr() == dy.data_ptr() and torch.equal(dx, dy.unsqueeze(1).expand(x.shape))


@pytest.mark.parametrize(
    ("order", "dim", "copies"),
    [((0, 1, 2), 2, False), ((0, 1, 2), 1, False), ((0, 2, 1), 2, False), ((0, 1, 2), 0, False), ((2, 0, 1), 1, True)],
)
def test_layouts_are_read_in_place(order: tuple[int, ...], dim: int, copies: bool) -> None:
    x = torch.empty(4, 5, 6).permute(order)
    assert plane.plane_of(x, dim, dim).is_copy == copies


@pytest.mark.parametrize("dim", [(0, 2), (1, 1), 3, -4, ()])
def test_a_wrong_dim_is_refused(dim: reduce.Dims) -> None:
    for call in (reduce.reduce_sum, reduce.reduce_max, reduce.reduce_argmax):
        with pytest.raises(BadInput, match="dim"):
            call(torch.zeros(2, 3, 4), dim)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 1), (0, 1), (2, 2), (0, 2)])
def test_the_gradient_of_a_maximum(first: int, last: int, device: str) -> None:
    x = torch.randn(5, 7, 6, device=device).round()
    dy = torch.randn(reduce.left_of(x, first, last, False), device=device)
    dims = tuple(range(first, last + 1))
    indices = reduce.launch_argmax(x, dims)
    (expected,) = correct.gradients(lambda x: reduce.max_reference(x, dims), (x,), dy)
    assert torch.equal(reduce._reduce_max_backward.by_kernels(dy, indices, x.shape, first, last), expected)
    assert torch.equal(reduce._spread_by_torch(dy, indices, x.shape, first, last), expected)
    library = lambda x: torch.ops.sublight.reduce_max(x, first, last, False)[0]  # noqa: E731
    assert torch.equal(correct.gradients(library, (x,), dy)[0], expected)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("shape", [(1, 2**24), (3, 2**20 + 1), (4096, 96)])
def test_it_repeats_bit_for_bit(name: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda")
    for dim in (0, 1, None):
        first = LAUNCHES[name][0](x, dim)
        assert all(torch.equal(first, LAUNCHES[name][0](x, dim)) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
def test_a_row_past_two_to_the_thirty_one() -> None:
    x = torch.zeros(2**31 + 40, device="cuda", dtype=torch.bfloat16)
    x[-3] = 2.0
    assert reduce.launch_argmax(x) == 2**31 + 37 and reduce.launch_sum(x) == 2 and reduce.launch_max(x) == 2
    assert reduce.launch_argmax(x.view(-1, 8), 0).tolist() == [0, 0, 0, 0, 0, (2**31 + 37) // 8, 0, 0]
