"""Stream compaction of any size, mask and data type."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.movement import compact
from sublight.ops.random_test import random_cases


@random_cases
@given(
    n=st.one_of(st.integers(1, 300), st.integers(1, 9000), st.sampled_from([2047, 2048, 2049, 4096])),
    share=st.sampled_from([0.0, 0.001, 0.5, 0.999, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8]),
)
def test_any_size_and_mask(n: int, share: float, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randint(0, 200, (n,), generator=generator).to(device, dtype)
    mask = (torch.rand(n, generator=generator) < share).to(device)
    y, count, index = compact.launch_with_indices(x, mask, True)
    expected, chosen = compact.reference(x, mask)
    assert torch.equal(y, expected) and count == chosen and count.dtype == torch.int64
    assert torch.equal(index, compact._order(mask))


def test_many_chunks_make_a_group(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "MOST_GROUPS", 4)
    x = torch.arange(30_001, device=device)
    mask = x % 3 == 1
    y, count = compact.launch(x, mask)
    assert torch.equal(y, torch.cat([x[mask], x[~mask]])) and count == 10_000


def test_the_gradient_goes_back_to_its_place(device: str) -> None:
    x, dy = torch.randn(2, 5000, device=device)
    mask = x > 0.3
    (expected,) = correct.gradients(lambda x: compact.reference(x, mask)[0], (x,), dy)
    assert torch.equal(compact.launch_backward(dy, mask), expected)
    assert torch.equal(compact._backward_by_torch(dy, mask), expected)
    assert torch.equal(correct.gradients(lambda x: compact.compact(x, mask)[0], (x,), dy)[0], expected)


def test_what_a_user_gets(device: str) -> None:
    x = torch.tensor([[3.0, 1.0], [2.0, 5.0]], device=device)
    y, count, index = compact.compact(x, x > 1.5, indices=True)
    assert y.tolist() == [3, 2, 5, 1] and count == 3 and index.tolist() == [0, 2, 3, 1]
    assert len(compact.compact(x, x > 1.5)) == 2
    empty, none = compact.compact(x[:0], x[:0] > 0)
    assert empty.shape == (0,) and none == 0


def test_a_wrong_mask_is_refused(device: str) -> None:
    x = torch.zeros(4, device=device)
    for mask in (torch.ones(4), torch.ones(3, dtype=torch.bool), torch.ones(1, dtype=torch.bool)):
        for call in (compact.compact, compact.plan, compact.launch):
            with pytest.raises(BadInput, match="the mask is"):
                call(x, mask.to(device))


def test_the_mask_is_not_copied_for_its_bytes(device: str) -> None:
    x = torch.randn(3000, device=device)
    assert compact.plan(x, x > 0).copies == ()
    assert compact.plan(x[::2], (x > 0)[::2]).copies == ("x", "mask")


def test_nothing_to_move(device: str) -> None:
    """Who calls the registered op by itself gets no error either."""
    none = torch.zeros(0, device=device)
    y, count, _ = torch.ops.sublight.compact(none, none > 0, False)
    assert y.shape == (0,) and count == 0


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
def test_past_two_to_the_thirty_one_elements() -> None:
    n = 2**31 + 40
    x = torch.zeros(n, device="cuda", dtype=torch.uint8)
    mask = torch.ones(n, device="cuda", dtype=torch.bool)
    x[7], mask[7], x[-1] = 9, False, 5
    y, count = compact.launch(x, mask)
    assert count == n - 1 and y[-1] == 9 and y[-2] == 5
