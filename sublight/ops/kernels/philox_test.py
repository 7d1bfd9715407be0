"""The same bits from Triton, from PyTorch and from the paper, and bits that look random."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.jit import tl, triton
from sublight.ops.kernels import philox

COUNT = 2**18


@triton.jit
def _words_kernel(seed_ptr, counter_ptr, out_ptr, OURS: tl.constexpr, ROUNDS: tl.constexpr):
    lane = tl.arange(0, 16)
    seed, counter = tl.load(seed_ptr), tl.load(counter_ptr + lane)
    if OURS:
        words = philox.four_words(seed, counter, ROUNDS)
    else:
        words = tl.randint4x(seed, counter, ROUNDS)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * lane + i, words[i].to(tl.uint32, bitcast=True).to(tl.int64))


def by_kernel(seed: int, counters: torch.Tensor, *, ours: bool, rounds: int, device: str) -> torch.Tensor:
    out = torch.empty(64, dtype=torch.int64, device=device)
    seeds = torch.tensor([seed], device=device)
    _words_kernel[(1,)](seeds, counters, out, OURS=ours, ROUNDS=rounds)
    return out


@pytest.mark.parametrize(
    ("rounds", "first"),
    [  # the paper's known answers for counter and key 0
        (7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_known_answers(rounds: int, first: tuple[int, ...]) -> None:
    assert tuple(philox.words(torch.tensor(0), 4, rounds).tolist()) == first


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 17, -(2**63)])
@pytest.mark.parametrize("rounds", [7, 10])
def test_pytorch_and_triton_agree(seed: int, rounds: int, device: str) -> None:
    counters = torch.arange(16, dtype=torch.int32, device=device)
    expected = philox.words(torch.tensor(seed, device=device), 64, rounds)
    for ours in (True, False):
        assert torch.equal(by_kernel(seed, counters, ours=ours, rounds=rounds, device=device), expected)


def test_counters_of_more_than_32_bits(device: str) -> None:
    small = torch.arange(16, device=device)
    words = [by_kernel(5, small + base, ours=True, rounds=7, device=device) for base in (0, 2**32, 2**33)]
    assert torch.equal(words[1], by_kernel(5, small + 2**32, ours=False, rounds=7, device=device))
    assert not torch.equal(words[0], words[1])
    assert not torch.equal(words[1], words[2])


def share(mask: torch.Tensor) -> float:
    return float(mask.double().mean())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_right_share_is_kept(p: float) -> None:
    kept = philox.kept(torch.tensor(3), (COUNT,), p)
    assert abs(share(kept) - (1 - p)) < 5 * (p * (1 - p) / COUNT) ** 0.5  # five standard deviations
    for lane in range(4):
        assert abs(share(kept[lane::4]) - (1 - p)) < 5 * (p * (1 - p) / (COUNT // 4)) ** 0.5


def test_all_and_nothing() -> None:
    assert philox.kept(torch.tensor(3), (1000,), 0.0).all()
    assert not philox.kept(torch.tensor(3), (1000,), 1.0).any()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """In standard deviations of what independent masks show."""
    one, other = one.double() - one.double().mean(), other.double() - other.double().mean()
    return float((one * other).mean() / (one.square().mean() * other.square().mean()).sqrt()) * len(one) ** 0.5


@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8, 32, 768, 4096])
def test_neighbours_are_independent(apart: int) -> None:
    kept = philox.kept(torch.tensor(11), (COUNT,), 0.5)
    assert abs(correlation(kept[:-apart], kept[apart:])) < 5


@pytest.mark.parametrize("other", [12, 10, -11, 11 + 2**32, 11 + 2**31])
def test_seeds_are_independent(other: int) -> None:
    one, two = (philox.kept(torch.tensor(seed), (COUNT,), 0.5) for seed in (11, other))
    assert abs(correlation(one, two)) < 5
    assert abs(correlation(one[1:], two[:-1])) < 5


def test_the_test_of_independence_finds_dependence() -> None:
    kept = philox.kept(torch.tensor(11), (COUNT,), 0.5)
    assert abs(correlation(kept, kept)) > 100
    tied = torch.where(torch.rand(COUNT, generator=torch.Generator().manual_seed(0)) < 0.05, kept, kept.roll(1))
    assert abs(correlation(kept.roll(1), tied)) > 100


def test_fours_take_every_pattern() -> None:
    kept = philox.kept(torch.tensor(2), (COUNT,), 0.5).view(-1, 4)
    counts = torch.bincount((kept.long() * torch.tensor([1, 2, 4, 8])).sum(1), minlength=16).double()
    expected = len(kept) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 50  # chi square with 15 degrees: 1 in 100,000 is above
