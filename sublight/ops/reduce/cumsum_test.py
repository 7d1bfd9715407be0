"""Running sums along any dimension, from either end, over parts that wait for one another."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.movement.plans_test import check_plans, check_second_derivatives
from sublight.ops.random_test import random_cases
from sublight.ops.reduce import cumsum
from sublight.ops.reduce.cumsum import CUMSUM


@random_cases
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), reverse=st.booleans())
def test_any_dimension_of_any_layout(data: st.DataObject, sizes: list[int], reverse: bool, device: str) -> None:
    long = data.draw(st.integers(0, len(sizes) - 1))
    sizes[long] = data.draw(st.integers(1, 20_000 if math.prod(sizes) < 20 else 50))
    order = data.draw(st.permutations(range(len(sizes))))
    dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))

    def draw(seed: int) -> list[correct.Error]:
        x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(device).permute(order)
        truth, theirs = (cumsum._by_torch(y, dim, reverse) for y in (x.double(), x))
        return [correct.error("cumsum", cumsum.launch(x, dim, reverse), theirs, truth)]

    error = correct.settled(draw, times=64)
    assert error.ok, error


# parts in four groups, as they are made; in three blocks of groups, as only far longer rows would have them
@pytest.mark.parametrize(("size", "group"), [(200_003, cumsum.GROUP), (90_003, 4)])
def test_whole_numbers_are_exact_over_many_parts(
    size: int, group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cumsum, "GROUP", group)
    x = torch.arange(size, device=device).remainder(7).float()
    assert torch.equal(cumsum.launch(x), x.double().cumsum(0).float())
    assert torch.equal(cumsum.launch(x, -1, True), x.double().flip(0).cumsum(0).flip(0).float())


def test_parts_that_sum_to_zero_are_seen(device: str) -> None:
    x = torch.zeros(50_000, device=device)
    x[-1] = 3.0
    assert torch.equal(cumsum.launch(x), x)


def test_an_infinity_reaches_the_end_of_its_row_alone(device: str) -> None:
    x = torch.ones(2, 20_000, device=device)
    x[0, 5000] = math.inf
    y = cumsum.launch(x)
    assert torch.isfinite(y[0, :5000]).all() and (y[0, 5000:] == math.inf).all() and y[1, -1] == 20_000


def test_each_kernel_is_reached(device: str) -> None:
    plans = [CUMSUM.plan(*CUMSUM.inputs(shape, "float32", device, 0)) for shape in CUMSUM.test_shapes]
    assert {plan.kernel for plan in plans} == {"_tile_kernel", "_parts_kernel"}
    assert any(step.grid[0] > 4 for plan in plans for step in plan.steps if step.name == "_parts_kernel")
    assert cumsum.plan(torch.zeros(9, 70, device=device), 0).kernel == "_columns_kernel"


@pytest.mark.parametrize("shape", [{"rows": 17, "cols": 129}, {"rows": 2, "cols": 9000}], ids=str)
def test_why_names_what_is_launched_and_plans_fit(shape: dict[str, int], device: str) -> None:
    check_plans(CUMSUM, shape, device)


def test_second_derivatives_are_as_right_as_pytorchs(device: str) -> None:
    check_second_derivatives(CUMSUM, {"rows": 17, "cols": 129}, device)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_runs_from_the_other_end(dim: int, device: str) -> None:
    x, dy = torch.randn(2, 30, 50, 70, device=device)
    by = lambda dy, x: correct.gradients(lambda x: torch.ops.sublight.cumsum(x, dim, False), (x,), dy)  # noqa: E731
    error = correct.worst(correct.backward_errors(by, lambda x: x.cumsum(dim), (x,), dy))
    assert error.ok, error
    ours = correct.gradients(lambda x: cumsum.cumsum(x, dim), (x,), dy)
    assert torch.equal(ours[0], cumsum.launch(dy, dim, True))


def test_few_columns_go_to_pytorch(device: str) -> None:
    x = torch.randn(cumsum.COLUMNS + 1, 2, device=device)
    assert cumsum.plan(x, 0).provider == "torch" and "columns" in cumsum.plan(x, 0).reason
    assert torch.equal(cumsum.cumsum(x, 0), x.cumsum(0))
    assert cumsum.plan(x[: cumsum.COLUMNS], 0).provider == "sublight"


def test_a_compiler_traces_every_dimension(device: str) -> None:
    x = torch.randn(cumsum.COLUMNS + 1, 3, 5, device=device)
    for dim in range(3):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, dim=dim: cumsum.cumsum(x, dim), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), cumsum.cumsum(x, dim))


def test_a_wrong_dim_is_refused() -> None:
    with pytest.raises(BadInput, match="dim 2"):
        cumsum.cumsum(torch.zeros(3, 4), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2**22 + 5, device="cuda", dtype=dtype)
    first = cumsum.launch(x)
    assert all(torch.equal(first, cumsum.launch(x)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
def test_a_row_past_two_to_the_thirty_one() -> None:
    x = torch.zeros(2**31 + 40, device="cuda", dtype=torch.bfloat16)
    x[5], x[-3] = 1.0, 2.0
    y = cumsum.launch(x)
    assert y[4] == 0 and y[5] == 1 and y[2**31] == 1 and y[-4] == 1 and y[-3:].tolist() == [3, 3, 3]
