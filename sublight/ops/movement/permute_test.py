"""Copies in any order of dimensions, of any layout and data type."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.movement import permute
from sublight.ops.random_test import random_cases


@random_cases
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    step=st.sampled_from([1, 1, 2]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64, torch.int8]),
)
def test_any_order_of_any_layout(
    data: st.DataObject, sizes: list[int], step: int, dtype: torch.dtype, device: str
) -> None:
    sizes[data.draw(st.integers(0, len(sizes) - 1))] = data.draw(st.integers(1, 140))
    sizes[-1] *= step
    x = (
        torch.randint(-100, 100, sizes)
        .to(device, dtype)[..., ::step]
        .permute(data.draw(st.permutations(range(len(sizes)))))
    )
    dims = tuple(data.draw(st.permutations(range(len(sizes)))))
    result = permute.launch(x, dims)
    assert torch.equal(result, x.permute(dims)) and result.is_contiguous()


@pytest.mark.parametrize("last", range(5))
def test_every_order_of_five_dimensions(last: int, device: str) -> None:
    x = torch.arange(2 * 3 * 4 * 5 * 6, device=device).view(2, 3, 4, 5, 6)
    for dims in itertools.permutations([dim for dim in range(5) if dim != last]):
        assert torch.equal(permute.launch(x, (*dims, last)), x.permute(*dims, last))


def test_repeated_values(device: str) -> None:
    x = torch.arange(5, device=device).view(5, 1).expand(5, 7)
    assert torch.equal(permute.launch(x), x.T)


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [((0, 1, 2), [24]), ((1, 0, 2), [3, 2, 4]), ((2, 0, 1), [4, 6]), ((1, 2, 0), [12, 2]), ((0, 2, 1), [2, 4, 3])],
)
def test_neighbours_are_made_one(dims: tuple[int, ...], sizes: list[int]) -> None:
    assert [run.size for run in permute.runs_of(torch.empty(2, 3, 4).permute(dims))] == sizes


def test_the_gradient_goes_back(device: str) -> None:
    x = torch.randn(3, 4, 5, device=device)
    for dims in itertools.permutations(range(3)):
        dy = torch.randn(x.permute(dims).shape, device=device)
        (ours,) = correct.gradients(lambda x, dims=dims: torch.ops.sublight.permute(x, list(dims)), (x,), dy)
        assert torch.equal(ours, dy.permute(permute.inverse(dims)))


def test_more_dimensions_than_the_kernel_takes_go_to_pytorch(device: str) -> None:
    x = torch.arange(2**6, device=device).view(2, 2, 2, 2, 2, 2)
    assert len(permute.runs_of(x.permute(5, 4, 3, 2, 1, 0))) > permute.MAX_DIMS
    assert permute.plan(x).provider == "torch" and "dimensions" in permute.plan(x).reason
    assert torch.equal(permute.permute(x), x.permute(5, 4, 3, 2, 1, 0))
    with pytest.raises(BadInput, match="6 dimensions"):
        permute.launch(x)


@pytest.mark.parametrize(
    ("dims", "kernel"), [((0, 1, 2), "_move_kernel"), ((1, 0, 2), "_move_kernel"), ((0, 2, 1), "_turn_kernel")]
)
def test_the_last_dimension_decides(dims: tuple[int, ...], kernel: str, device: str) -> None:
    x = torch.zeros(2, 33, 40, device=device)
    assert permute.plan(x, dims).kernel == kernel
    assert permute.plan(x[..., ::2], dims).kernel == "_move_kernel"  # nothing lies side by side


def test_a_gradient_is_a_view(device: str) -> None:
    x = torch.randn(4, 5, 6, device=device, requires_grad=True)
    dy = torch.randn(6, 5, 4, device=device)
    (dx,) = torch.autograd.grad(permute.permute(x), x, dy)
    assert dx.data_ptr() == dy.data_ptr() and torch.equal(dx, dy.permute(2, 1, 0))


def test_wrong_dims_are_refused() -> None:
    for dims in ((0, 0), (0,), (0, 2), (0, -3)):
        with pytest.raises(BadInput, match="dims"):
            permute.permute(torch.zeros(2, 3), dims)
    with pytest.raises(BadInput, match="two or more"):
        permute.transpose(torch.zeros(3))


@pytest.mark.parametrize("shape", [(8, 2**31), (2**31, 8), (24, 2**31 + 16), (16, 8, 2**28)])
def test_numbers_past_32_bits_come_whole(shape: tuple[int, ...]) -> None:
    """The kernel multiplies numbers by their unit in the bits in which they come."""
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    (step,) = permute.plan_permute(x, [len(shape) - 1, *range(len(shape) - 1)]).steps
    rows, cols, x_row, y_col, *_ = step.numbers
    x_unit, y_unit = step.constants["X_UNIT"], step.constants["Y_UNIT"]
    for number, unit in ((cols, x_unit), (x_row, x_unit), (rows, y_unit), (y_col, y_unit)):
        assert number >= 2**31 or number * unit < 2**31
    assert x_unit * cols == shape[-1] and y_unit * y_col == x.numel() // shape[-1]


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
@pytest.mark.parametrize("shape", [(2**16 + 3, 2**15 + 8), (2**30 + 20, 2), (8, 2**31 + 16)])
def test_past_two_to_the_thirty_one_elements(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, device="cuda", dtype=torch.int8)
    x[-1, -1], x[5, -1], x[-1, 0] = 1, 2, 3
    y = permute.launch(x)
    assert y[-1, -1] == 1 and y[-1, 5] == 2 and y[0, -1] == 3
    parts = y.view(-1).split(2**28)  # a mask of all would take as much memory again
    assert sum(int(part.count_nonzero()) for part in parts) == 3
