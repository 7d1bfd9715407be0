"""How linear_cross_entropy cuts its matrix products: rows into chunks, the vocabulary into parts."""

from __future__ import annotations

from collections.abc import Iterator

from sublight.backend.jit import cdiv

MOST_ROUNDINGS = 8  # of the weight's gradient as it grows by chunks; past that, or where there is room, it is fp32
ROW_STEP, TILE_FEATURES = 128, 256  # what a tile of a matrix product takes; rows of a chunk are a multiple
EVEN = 64  # a vocabulary that 8 does not divide is cut where this does
WAVE_COST = 3  # a wave of tiles, in passes over the weight's gradient: 1.5 ms against 0.5 for 4096 features on an H200


def chunks_of(
    rows: int, row_bytes: int, chunk_bytes: int, *, features: int = 1, multiprocessors: int = 132
) -> Iterator[slice]:
    """Rows shared out evenly in steps of a tile, each chunk's logits within `chunk_bytes` where one step is.

    Of the counts that do this it is the cheapest: a chunk costs a pass over the weight's gradient, and its product with
    the weight takes a tile for so many rows and features, in whole waves over the multiprocessors.

    >>> [chunk.stop - chunk.start for chunk in chunks_of(1000, 2 * 50257, 2**25)]
    [256, 256, 256, 232]
    >>> {chunk.stop - chunk.start for chunk in chunks_of(8192, 2 * 128256, 352 * 2**20, features=4096)}
    {1024}
    """
    most = max(1, chunk_bytes // (row_bytes * ROW_STEP))
    steps, across = cdiv(rows, ROW_STEP), cdiv(features, TILE_FEATURES)
    fewest = cdiv(steps, most)

    def cost(count: int) -> int:
        each = (steps * (i + 1) // count - steps * i // count for i in range(count))
        return count + WAVE_COST * sum(cdiv(size * across, multiprocessors) for size in each)

    most_chunks = max(fewest, min(2 * fewest, steps, MOST_ROUNDINGS))
    count = min(range(fewest, most_chunks + 1), key=cost)
    for i in range(count):
        yield slice(steps * i // count * ROW_STEP, min(rows, steps * (i + 1) // count * ROW_STEP))


def parts_of(classes: int) -> list[slice]:
    """The vocabulary as products take it: one of odd width is several times as slow, so its end is one of its own, and
    the first: its small sums are rounded then, not the large ones.

    >>> parts_of(50257), parts_of(128256)
    ([slice(50240, 50257, None), slice(0, 50240, None)], [slice(0, 128256, None)])
    """
    whole = classes // EVEN * EVEN
    return [slice(whole, classes), slice(0, whole)] if classes % 8 and whole else [slice(0, classes)]
