"""Online softmax on paper. Page: `sublight learn show online_by_hand`. Check: `sublight learn check online_by_hand`."""

import math


def online_by_hand(tops: list[float], totals: list[float]) -> tuple[float, float]:
    """Of two pieces of a row: tops are their maxima, totals their sums of exp(x - top), each with its own top."""
    top = max(tops)
    total = totals[0] + totals[1]  # TODO: these two were taken with different maxima
    return top, total
