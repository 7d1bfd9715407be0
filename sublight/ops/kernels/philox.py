"""Random bits from a counter: Philox 4x32 in Triton and in plain PyTorch, bit for bit the same.

A number depends on the seed and on its element's place alone, so whoever needs it again (a backward pass, another tile,
another machine) computes it again, and nothing is kept. One run of the cipher gives four numbers, for four neighbours.
Seven rounds pass every test of BigCrush (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
"""

from __future__ import annotations

import torch

from sublight.backend.jit import tl, triton

ROUNDS = 7
BITS = 24  # of a number that are compared with the probability: as many as an fp32 number between 0 and 1 has
_LOW = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """What is below it is dropped: all of it for p = 1, nothing for p = 0.

    >>> threshold_of(0.0), threshold_of(0.5), threshold_of(1.0)
    (0, 8388608, 16777216)
    """
    return round(p * (1 << BITS))


@triton.jit
def four_words(seed, counter, ROUNDS: tl.constexpr):
    """What tl.randint4x gives, whose two halves of a product are two multiplications; here they are one."""
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = c0 * 0
    if counter.dtype.primitive_bitwidth == 64:
        c1 = (counter >> 32).to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(ROUNDS):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = a.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def is_kept(seed, counter, lane, threshold, ROUNDS: tl.constexpr):
    """Whether the element that is the lane-th of four (lane modulo 4) at this counter is kept."""
    w0, w1, w2, w3 = four_words(seed, counter, ROUNDS)
    lane = lane & 3
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    # upper 24 bits >= threshold, without shifting them down; 2**24 wraps to a limit above which nothing is
    limit = ((tl.full([], 0, tl.uint32) + threshold) << 8) - 1
    return (word > limit) | (threshold == 0)


def words(seed: torch.Tensor, count: int, rounds: int = ROUNDS) -> torch.Tensor:
    """The first `count` numbers of 32 bits, as int64: what `is_kept` compares, for elements 0, 1, 2, …"""
    counter = torch.arange((count + 3) // 4, device=seed.device)
    key = seed.reshape(()) & _LOW, (seed.reshape(()) >> 32) & _LOW
    c0, c1, c2, c3 = counter & _LOW, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # they wrap at 2**64: the bits are right, as of unsigned numbers
        c0, c1 = ((b >> 32) & _LOW) ^ c1 ^ key[0], b & _LOW
        c2, c3 = ((a >> 32) & _LOW) ^ c3 ^ key[1], a & _LOW
        key = (key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW
    return torch.stack((c0, c1, c2, c3), -1).reshape(-1)[:count]


def kept(seed: torch.Tensor, shape: torch.Size | tuple[int, ...], p: float) -> torch.Tensor:
    """The mask of a tensor of that shape: True where an element is kept, which happens with probability 1 - p."""
    size = torch.Size(shape)
    return (words(seed, size.numel()) >> (32 - BITS) >= threshold_of(p)).view(size)
