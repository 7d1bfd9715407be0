"""Sectors and passes, against a count by hand that looks at one lane after another."""

from __future__ import annotations

import numpy as np
import pytest

from sublight.xray.ptx.transactions import copy_wavefronts_of, matrix_wavefronts_of, sectors_of, wavefronts_of

LANES = np.arange(32)
ON = np.ones(32, np.bool_)


def sectors_by_hand(addresses: np.ndarray, active: np.ndarray, width: int) -> tuple[int, int, int]:
    requests = sectors = ideal = 0
    for warp in range(0, len(addresses), 32):
        touched = {
            byte
            for lane in range(warp, warp + 32)
            if active[lane]
            for byte in range(addresses[lane], addresses[lane] + width)
        }
        requests += bool(touched)
        sectors += len({byte // 32 for byte in touched})
        ideal += -(-len(touched) // 32)
    return requests, sectors, ideal


def passes_by_hand(addresses: np.ndarray, active: np.ndarray, width: int) -> int:
    """Of a store: lanes in parts of 128 bytes, each as many passes as its fullest bank has words."""
    part = 32 * 4 // max(width, 4)
    passes = 0
    for start in range(0, len(addresses), part):
        words = {
            int(addresses[lane]) // 4 + k
            for lane in range(start, start + part)
            if active[lane]
            for k in range(max(1, width // 4))
        }
        passes += max((sum(word % 32 == bank for word in words) for bank in range(32)), default=0)
    return passes


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_addresses(width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    addresses = random.integers(0, 200, 96) * width
    active = random.random(96) < (0.0, 0.1, 0.7, 1.0)[seed]
    outcome = sectors_of(addresses, active, width)
    assert (outcome.requests, outcome.sectors, outcome.ideal) == sectors_by_hand(addresses, active, width)
    assert wavefronts_of(addresses, active, width, is_load=False).wavefronts == passes_by_hand(addresses, active, width)


@pytest.mark.parametrize(
    ("addresses", "width", "sectors", "ideal", "shifted"),
    [
        (4 * LANES, 4, 4, 4, 0),
        (16 * LANES, 16, 16, 16, 0),
        (2 * LANES, 2, 2, 2, 0),
        (4 * LANES + 4, 4, 5, 4, 1),  # misaligned by one element
        (8 * LANES, 4, 8, 4, 0),  # stride 2
        (4096 * LANES, 4, 32, 4, 0),  # transposed
        (0 * LANES, 4, 1, 1, 0),  # the same for all
        (4 * LANES[::-1], 4, 4, 4, 0),  # backwards is as good
    ],
)
def test_known_patterns(addresses: np.ndarray, width: int, sectors: int, ideal: int, shifted: int) -> None:
    outcome = sectors_of(addresses + 2**41, ON, width)
    assert (outcome.sectors, outcome.ideal, outcome.shifted) == (sectors, ideal, shifted)


@pytest.mark.parametrize(
    ("addresses", "width", "passes", "ideal"),
    [
        (128 * LANES, 4, 32, 1),  # a column of a 32 × 32 tile
        (132 * LANES, 4, 1, 1),  # the same, padded
        (8 * LANES, 4, 2, 1),
        (2 * LANES, 2, 1, 1),  # halves of one word
        (8 * LANES, 8, 2, 2),
        (16 * LANES, 8, 4, 2),
        (16 * LANES, 16, 4, 4),
        (32 * LANES, 16, 8, 4),
        (8 * (LANES // 2), 8, 1, 1),  # neighbours ask for the same: both halves of the warp go together
        (16 * (LANES // 2), 16, 2, 2),
        (16 * (LANES % 2 + LANES // 4 * 2), 16, 2, 2),  # n and n^2 do
        (16 * (LANES // 8), 16, 2, 2),
        (0 * LANES, 4, 1, 1),
    ],
)
def test_passes_of_loads(addresses: np.ndarray, width: int, passes: int, ideal: int) -> None:
    outcome = wavefronts_of(addresses, ON, width, is_load=True)
    assert (outcome.wavefronts, outcome.ideal, outcome.requests) == (passes, ideal, 1)


def test_stores_of_neighbours_do_not_merge() -> None:
    assert wavefronts_of(8 * (LANES // 2), ON, 8, is_load=False).wavefronts == 2


@pytest.mark.parametrize(
    ("pitch", "matrices", "passes"), [(128, 4, 32), (144, 4, 4), (16, 4, 4), (128, 1, 8), (32, 2, 4)]
)
def test_matrix_loads(pitch: int, matrices: int, passes: int) -> None:
    outcome = matrix_wavefronts_of(pitch * LANES, ON, matrices)
    assert (outcome.wavefronts, outcome.ideal, outcome.requests) == (passes, matrices, 1)


@pytest.mark.parametrize(
    ("sources", "targets", "width", "passes", "split"),
    [
        (16 * LANES, 16 * LANES, 16, 4, 0),
        (16 * LANES + 64, 16 * LANES, 16, 4, 1),  # five lines
        (64 * LANES, 16 * LANES, 16, 4, 12),  # two lanes a line
        (4 * LANES, 4 * LANES, 4, 1, 0),
        (4096 * LANES, 4 * LANES, 4, 1, 31),  # a gather
        (4 * LANES, 128 * LANES, 4, 32, 0),  # one line, one bank
        (4096 * LANES, 128 * LANES, 4, 32, 0),  # banks part them already
    ],
)
def test_copies_come_line_by_line(
    sources: np.ndarray, targets: np.ndarray, width: int, passes: int, split: int
) -> None:
    outcome = copy_wavefronts_of(targets, ON, width, sources=sources, fetching=ON)
    assert (outcome.wavefronts, outcome.split, outcome.requests) == (passes, split, 1)
    twice = copy_wavefronts_of(
        np.tile(targets, 2), np.tile(ON, 2), width, sources=np.tile(sources, 2), fetching=np.tile(ON, 2)
    )
    assert (twice.wavefronts, twice.split) == (2 * passes, 2 * split), "a line is fetched for each warp"


def test_zeros_come_from_no_line() -> None:
    outcome = copy_wavefronts_of(16 * LANES, ON, 16, sources=4096 * LANES, fetching=~ON)
    assert (outcome.wavefronts, outcome.split) == (4, 0)


def test_nobody_asks() -> None:
    assert sectors_of(LANES, ~ON, 4).requests == 0
    assert wavefronts_of(LANES, ~ON, 4, is_load=True).wavefronts == 0
