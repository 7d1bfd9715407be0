"""Pieces along k: their sums are as right as PyTorch's and the same every time; when tiles are split at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.device import PRETEND, Facts
from sublight.conftest import HAS_GPU
from sublight.ops.matmul import tiles
from sublight.ops.matmul.matmul import MATMUL, plan_by, reference
from sublight.ops.matmul.tiles import Split, Tile, split_blocks, split_of, splits

SMALL = Tile(bm=32, bn=32, bk=16, warps=4, stages=4, group=2)
LARGE = Tile(bm=128, bn=256, bk=64, warps=8, stages=4)


@pytest.fixture(
    params=[
        # m, n, k, multiprocessors, rounds, pieces: equal, with a last one that is shorter, after whole rounds
        (33, 40, 64, 8, 0, 2),
        (33, 40, 70, 13, 0, 3),
        (40, 72, 60, 5, 1, 3),
    ],
    ids=lambda case: "x".join(map(str, case)),
)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    m, n, k, multiprocessors, rounds, pieces = request.param
    tile = SMALL
    if HAS_GPU:  # the same with its own tiles and multiprocessors: 154 tiles are a round and 22
        tile, k = LARGE, 64 * k + 8
        m, n = (1290, 3500) if rounds else (8 * m, 16 * n)
    split = Split(tile=tile, rounds=rounds, pieces=pieces)
    tokens = tiles.TRIED_SPLIT.set(split), PRETEND.set(Facts(multiprocessors=multiprocessors))
    yield m, n, k
    tiles.TRIED_SPLIT.reset(tokens[0])
    PRETEND.reset(tokens[1])


def test_as_right_as_pytorch_and_the_same_every_time(shared: tuple[int, int, int], device: str) -> None:
    m, n, k = shared
    made: dict[str, Any] = {"dtype": torch.float16, "device": device}

    def ours(*given: Any) -> Any:
        return MATMUL.providers["split_k"].launch(*given, "gelu")

    def theirs(*given: Any) -> Any:
        return reference(*given, "gelu")

    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        inputs = (
            torch.randn(m, k, **made), torch.randn(n, k, **made).T, torch.randn(n, **made), torch.randn(m, n, **made)
        )  # fmt: skip
        assert "_split_kernel" in plan_by("split_k", *inputs, "gelu", False).kernel
        assert torch.equal(ours(*inputs), ours(*inputs))
        return correct.forward_errors(ours, theirs, inputs)

    error = correct.settled(draw)
    assert error.ok, error


def test_rows_of_c_that_begin_anywhere(device: str) -> None:
    if HAS_GPU:
        pytest.skip("test_as_right_as_pytorch at n = 1000 + 1 stands for it there")
    token = tiles.TRIED_SPLIT.set(Split(tile=SMALL, rounds=1, pieces=2))
    facts = PRETEND.set(Facts(multiprocessors=3))
    try:
        a, b = torch.randn(40, 40, dtype=torch.float16), torch.randn(45, 40, dtype=torch.float16).T
        plan = plan_by("split_k", a, b, None, None, "none", False)
        assert not plan.steps[0].constants["BY_ENGINE"] and plan.grid == (3,)
        error = correct.settled(
            lambda seed: correct.forward_errors(MATMUL.providers["split_k"].launch, reference, (a, b))
        )
        assert error.ok, error
    finally:
        tiles.TRIED_SPLIT.reset(token)
        PRETEND.reset(facts)


def test_there_is_a_program_for_every_piece() -> None:
    for m, n, k in ((256, 6144, 4096), (512, 10240, 8192), (1024, 6144, 4096), (300, 5000, 700), (8192, 28672, 4096)):
        for split in splits(m, n, k, Facts())[1:]:
            left = split.tile.count(m, n) - split.rounds * 132
            assert 0 < left * split.pieces <= 132


@pytest.mark.parametrize(
    ("m", "n", "k", "is_split"),
    [(512, 10240, 8192, True), (256, 4096, 14336, True), (4096, 4096, 4096, False), (256, 4096, 64, False)],
)
def test_tiles_are_split_where_whole_ones_leave_multiprocessors_idle(m: int, n: int, k: int, is_split: bool) -> None:
    split = split_of(m, n, k, Facts())
    assert (split.pieces > 1) == is_split
    assert split_blocks(split, m, n, k, Facts()) <= split_blocks(splits(m, n, k, Facts())[0], m, n, k, Facts())


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("has_residual", [False, True])
def test_blocks_and_what_changes_hands_fit_into_shared_memory(pieces: int, has_residual: bool) -> None:
    """A residual and pieces of sums go through it in fp32, beside the tile on its way out."""
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    inputs = (
        torch.empty(512, 8192, **made), torch.empty(10240, 8192, **made).T, torch.empty(10240, **made),
        torch.empty(512, 10240, **made) if has_residual else None,
    )  # fmt: skip
    tokens = tiles.TRIED_SPLIT.set(Split(tile=LARGE, rounds=1, pieces=pieces)), PRETEND.set(Facts())
    try:
        step = plan_by("split_k", *inputs, "gelu", False).steps[0]
    finally:
        tiles.TRIED_SPLIT.reset(tokens[0])
        PRETEND.reset(tokens[1])
    c = step.constants
    blocks = c["num_stages"] * (c["BM"] + c["BN"]) * c["BK"] * 2
    through = max(4 * c["BM"] * c["C_COLS"] if has_residual else 0, 4 * c["BM"] * c.get("PART_COLS", 0))
    assert blocks + 2 * c["BM"] * c["C_COLS"] + through + 64 <= Facts().shared_bytes
