"""Groups of every size, none and all; rows after the last end; gradients that are wanted; bad input."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.matmul.grouped_matmul import grouped_matmul, launch, launch_backward, reference


def made(ends: list[int], rows: int, k: int, n: int, seed: int, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rows, k, generator=generator), torch.randn(len(ends), k, n, generator=generator)
    return a.to(device), b.to(device), torch.tensor(ends, device=device)


@pytest.mark.parametrize("ends", [[70], [0, 70], [70, 70], [1, 1, 2, 70], [0, 0, 0], [64, 65, 66], [10, 20, 30]])
@pytest.mark.parametrize(("k", "n"), [(16, 64), (33, 70)])
def test_groups_of_every_size(ends: list[int], k: int, n: int, device: str) -> None:
    def forward(seed: int) -> list[correct.Error]:
        return correct.forward_errors(launch, reference, made(ends, 70, k, n, seed, device))

    def backward(seed: int) -> list[correct.Error]:
        inputs = made(ends, 70, k, n, seed, device)
        grad = torch.randn(70, n, generator=torch.Generator().manual_seed(seed)).to(device)
        return correct.backward_errors(launch_backward, reference, inputs, grad, wrt=(0, 1))

    for draw in (forward, backward):
        error = correct.settled(draw)
        assert error.ok, error


def test_fp32_keeps_what_additions_lose(device: str) -> None:
    """Blocks of k whose sums are 2**24, then ones, which fp32 cannot add to it, then -2**24: the ones are left."""
    a, b = torch.zeros(4, 16 * 10, device=device), torch.ones(1, 16 * 10, 5, device=device)
    a[:, ::16] = torch.tensor([2.0**24, *[1.0] * 8, -(2.0**24)], device=device)
    ends = torch.tensor([4], device=device)
    assert torch.equal(launch(a, b, ends), torch.full((4, 5), 8.0, device=device))
    _, db = launch_backward(torch.ones(160, 5, device=device), a[:1].T.contiguous(), b[:, :1], ends * 40)
    assert torch.equal(db, torch.full((1, 1, 5), 8.0, device=device))
    assert launch(torch.full_like(a, 3e38), b, ends).isposinf().all()  # a sum that has left fp32's range stays there


def test_only_the_gradients_that_are_wanted(device: str) -> None:
    a, b, ends = made([3, 8], 8, 16, 12, 0, device)
    a.requires_grad_()
    (found,) = torch.autograd.grad(grouped_matmul(a, b, ends).sum(), a)
    (expected,) = torch.autograd.grad(reference(a, b, ends).sum(), a)
    torch.testing.assert_close(found, expected)


def test_ends_outside_of_the_rows_read_nothing_outside(device: str) -> None:
    a, b, ends = made([3, 99], 8, 16, 12, 0, device)
    inside = torch.tensor([3, 8], device=device)
    assert torch.equal(launch(a, b, ends), launch(a, b, inside))
    grad = torch.ones(8, 12, device=device)
    assert all(map(torch.equal, launch_backward(grad, a, b, ends), launch_backward(grad, a, b, inside)))


def test_bad_input_is_refused_in_one_line(device: str) -> None:
    a, b, ends = made([3, 8], 8, 16, 12, 0, device)
    for call, words in (
        (lambda: grouped_matmul(a, b, ends.float()), "whole ends"),
        (lambda: grouped_matmul(a[:, :8], b, ends), "do not fit together"),
        (lambda: grouped_matmul(a, b, ends[:1]), "do not fit together"),
        (lambda: grouped_matmul(a[0], b, ends), "takes a"),
        (lambda: reference(a, b, ends.flip(0)), "they rise"),
        (lambda: reference(a, b, ends + 1), "at most the 8 rows"),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    assert grouped_matmul(a[:0], b, ends * 0).shape == (0, 12)
