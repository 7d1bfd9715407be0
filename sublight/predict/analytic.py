"""How long an op takes by its shape and the GPU's figures alone: waves of tiles, bytes, and what every launch costs.

A dozen dimensionless parameters (`efficiency.json`) say how near to each limit kernels come; they were fitted to
published times on an H100, and `docs/predict.md` shows how far off the model is on rows that it never saw, and on
another GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Parameters = Mapping[str, float]
TILES = (
    *((16, 64), (32, 64), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256)),
    *((128, 64), (128, 128), (128, 256), (256, 64), (256, 128)),
)
SPLITS = (1, 2, 4, 8, 16)  # of k over several blocks
LEAST_K = 128  # that a block of a split has
K_STEP = 64
ROWS = 128  # queries of a block of attention, and keys that it takes at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the analytic model needs of a GPU."""

    flops_per_s: float  # of products in the op's data type, reached
    bytes_per_s: float
    sms: int
    clock_hz: float | None


def product_s(
    m: int, n: int, k: int, groups: int, moved_bytes: int, itemsize: float, rates: Rates, fitted: Parameters
) -> float:
    """The fastest of several tiles and splits, as a library would choose.

    Blocks run in waves over the SMs; a tile is fed from the L2; all bytes come once through the memory, which takes
    nearly all SMs to saturate.
    """
    sms, power = rates.sms, fitted["blend"]
    per_sm = rates.flops_per_s / sms
    feed = fitted["feed_bytes_per_clock"] * sms * rates.clock_hz if rates.clock_hz else math.inf
    full_rate = fitted["stream"] * rates.bytes_per_s
    sm_rate = fitted["sm_share"] * rates.bytes_per_s / sms
    rows = m / groups
    best = math.inf
    for tile_m, tile_n in TILES:
        tiles = groups * math.ceil(rows / tile_m) * math.ceil(n / tile_n)
        fill = 2.0 * tile_m * tile_n / per_sm
        for split in SPLITS:
            if split > 1 and k / split < LEAST_K:
                break
            depth = math.ceil(k / split / K_STEP) * K_STEP
            blocks = tiles * split
            compute = math.ceil(blocks / sms) * (fill * depth + fitted["prologue_s"])
            partial = fitted["split"] * 4 * m * n * split if split > 1 else 0.0
            memory = (moved_bytes + partial) / min(full_rate, min(blocks, sms) * sm_rate)
            fed = itemsize * blocks * (tile_m + tile_n) * depth / feed
            best = min(best, (compute**power + memory**power + fed**power) ** (1 / power))
    return fitted["launch_s"] + best


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of an attention."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int = 0


def _efficiency(head_dim: int, fitted: Parameters) -> float:
    return fitted["rate"] * (fitted["rate_64"] if head_dim <= 64 else 1.0)


def prefill_s(shape: Heads, moved_bytes: int, rates: Rates, fitted: Parameters, work: float = 1.0) -> float:
    """Blocks of 128 queries, each over the keys that it sees; the longest block, or all of them over all SMs.

    `work`: products for each pair, where the forward pass has one share.
    """
    blocks = math.ceil(shape.queries / ROWS)
    per_key = work * 4.0 * ROWS * shape.head_dim / (rates.flops_per_s / rates.sms * _efficiency(shape.head_dim, fitted))
    whole = math.ceil(shape.keys / ROWS) * ROWS
    seen = min(whole, shape.window + ROWS) if shape.window else whole
    if shape.causal:
        ramp = min(math.ceil(seen / ROWS), blocks)
        visited = ROWS * (ramp * (ramp + 1) / 2) + (blocks - ramp) * seen
    else:
        visited = blocks * seen
    compute = max(seen * per_key, shape.batch * shape.heads * visited * per_key / rates.sms)
    return fitted["launch_s"] + compute + moved_bytes / (fitted["stream"] * rates.bytes_per_s)


def decode_s(shape: Heads, moved_bytes: int, rates: Rates, fitted: Parameters) -> float:
    """One block for each sequence and head of keys, split over the keys where that leaves SMs idle."""
    sms, power = rates.sms, fitted["blend"]
    chunks = math.ceil(shape.keys / ROWS)
    units = shape.batch * shape.kv_heads
    splits = min(max(sms // units, 1), chunks)
    waves = math.ceil(units * splits / sms)
    keys = math.ceil(chunks / splits) * ROWS
    rows = math.ceil(shape.heads / shape.kv_heads / fitted["rows"]) * fitted["rows"]
    compute = waves * (4.0 * rows * keys * shape.head_dim / (rates.flops_per_s / sms * fitted["rate"]))
    compute += waves * fitted["prologue_s"]
    memory = moved_bytes / (fitted["stream"] * rates.bytes_per_s)
    combine = fitted["combine_s"] if splits > 1 else 0.0
    return fitted["launch_s"] + combine + float((compute**power + memory**power) ** (1 / power))


def stream_s(moved_bytes: int, launches: int, rate_bytes_per_s: float, fitted: Parameters) -> float:
    """A launch, then bytes at nearly the memory's rate."""
    return launches * fitted["launch_s"] + moved_bytes / (fitted["stream"] * rate_bytes_per_s)
