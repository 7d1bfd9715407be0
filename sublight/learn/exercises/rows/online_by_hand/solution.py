"""Two pieces of a row: each sum is brought to the common maximum, then they are added."""

import math


def online_by_hand(tops: list[float], totals: list[float]) -> tuple[float, float]:
    top = max(tops)
    total = totals[0] * math.exp(tops[0] - top) + totals[1] * math.exp(tops[1] - top)
    return top, total
