"""How long an op takes by its shape and the GPU's figures alone: waves of tiles, bytes, and what every launch costs.

A few parameters (`efficiency.json`) say how near to each limit kernels come, and what they wait for. They were fitted
to published times on an H100, for every GPU, and to this project's own run where a GPU has one; `docs/predict.md` shows
how far off the model is on rows that it never saw, and on another GPU.

What a kernel waits for is so many cycles: its seconds are those of an H100, and longer where the clock is slower
(`Rates.pace`). Tensor cores of Hopper and its successors work beside the rest of an SM; before them, an attention's
softmax waits for its products and they for it.

`cold` is the share of an op's inputs that comes from the memory and not from the L2: 1 in a model, whose weights and
caches push each other out; less where a benchmark runs the same few buffers again (`cold_share`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Parameters = Mapping[str, float]
TILES = (
    *((16, 64), (32, 64), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256)),
    *((128, 64), (128, 128), (128, 256), (256, 64), (256, 128)),
)
SPLITS = (1, 2, 4, 8, 16, 32)  # of k over several blocks
LEAST_K = 128  # that a block of a split has
K_STEP = 64
FEW_ROWS = 8  # of a product whose weight has few bits: up to so many by a kernel of their own
TILE = 128 * 128  # elements of a product, in which `store_s` is given
ROWS = 128  # queries of a block of attention, and keys that it takes at a time
BLOCKS = 2  # of one sequence and head in decoding that an SM holds
ON_CHIP = 1 << 18  # bytes of registers, in which a program keeps its row
ALIGNED = 16  # elements: Triton knows of a row's length only whether this divides it
PROGRAM_BYTES = 1 << 14  # that one program of a flat op moves
SORTED = 512  # elements, for which `sort_s` is given
SIDE, LARGE_SIDE, TURNED_EACH = 64, 128, 4  # of a tile that is turned; the large one where an SM has four of them
SUMMED = 8192  # elements of the rows that an SM has at once, where sums by column go along
SHARE_ROWS = 4  # that a program of these takes at least, once every SM has one
COLUMNS, COLUMN_ROWS, COLUMN_PROGRAMS = 128, 64, 8  # a program's of a sum by column alone; and programs of an SM
KEPT, LOST = 0.4, 0.8  # of the L2: what less than that is touched in turn stays there, more than this does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the analytic model needs of a GPU."""

    flops_per_s: float  # of products in the op's data type, reached
    bytes_per_s: float
    sms: int
    l2_bytes_per_s: float = 0.0  # 0: as fast as the memory
    pace: float = 1.0  # how many times an H100's its clock cycle is
    vectors: float = 1.0  # how many times an H100's its vector units do in a cycle
    overlaps: bool = True  # its tensor cores work beside its vector units


def cold_share(touched_bytes: float, l2_bytes: float) -> float:
    """Of inputs that come again after `touched_bytes` were touched: what the L2 has lost by then.

    >>> cold_share(10e6, 50e6), round(cold_share(30e6, 50e6), 6), cold_share(60e6, 50e6)
    (0.0, 0.5, 1.0)
    """
    return min(1.0, max(0.0, (touched_bytes / l2_bytes - KEPT) / (LOST - KEPT)))


def product_s(
    m: int,
    n: int,
    k: int,
    groups: int,
    moved_bytes: int,
    rates: Rates,
    fitted: Parameters,
    cold: float = 1.0,
) -> float:
    """The fastest of several tiles and splits, as a library would choose. Weights of few bits (`unpack_s`) are made
    whole by every tile that takes them, in a way of its own where there are few rows.

    Blocks run in waves over the SMs, each over its part of k, and then stores its tile; parts of a split are added up
    after that. A tile smaller than `least` elements takes as long as one of these: tensor cores have a least shape, and
    there are too few of it to fill them. All bytes come once through the memory, which takes many SMs to saturate.
    """
    sms, power = rates.sms, fitted["blend"]
    per_sm = rates.flops_per_s / sms
    full_rate = fitted["stream"] * rates.bytes_per_s
    sm_rate = fitted["sm_share"] * rates.bytes_per_s / sms
    rows = m / groups
    unpack_s = rates.pace * fitted.get("unpack_s", 0.0) * (fitted.get("unpack_few", 1.0) if m <= FEW_ROWS else 1.0)
    kept = cold + (1 - cold) * rates.bytes_per_s / max(rates.l2_bytes_per_s, rates.bytes_per_s)
    best = math.inf
    for tile_m, tile_n in TILES:
        tiles = groups * math.ceil(rows / tile_m) * math.ceil(n / tile_n)
        along_k = max(2.0 * max(tile_m * tile_n, fitted["least"]) / per_sm, tile_n * unpack_s)
        ends = rates.pace * (fitted["prologue_s"] + fitted["store_s"] * tile_m * tile_n / TILE)
        for split in SPLITS:
            if split > 1 and k / split < LEAST_K:
                break
            depth = math.ceil(k / split / K_STEP) * K_STEP
            blocks = tiles * split
            compute = math.ceil(blocks / sms) * (along_k * depth + ends)
            partial = fitted["split"] * 4 * m * n * split if split > 1 else 0.0
            memory = (moved_bytes + partial) * kept / min(full_rate, min(blocks, sms) * sm_rate)
            added = rates.pace * fitted["split_s"] if split > 1 else 0.0
            best = min(best, (compute**power + memory**power) ** (1 / power) + added)
    return rates.pace * (fitted["launch_s"] + cold * fitted["cold_s"]) + best


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


def _per_key_s(head_dim: int, rates: Rates, fitted: Parameters, work: float, passes: float) -> float:
    """Of a block of queries over one key: its products, and what its scores take in vector units."""
    products = work * 4.0 * ROWS * head_dim / (rates.flops_per_s / rates.sms * fitted["rate"])
    scores = passes * ROWS * fitted["score_s"] * rates.pace / rates.vectors
    if not rates.overlaps:
        return products + scores
    power = fitted["overlap"]
    return float((products**power + scores**power) ** (1 / power))


def prefill_s(
    shape: Heads,
    moved_bytes: int,
    rates: Rates,
    fitted: Parameters,
    work: float = 1.0,
    passes: float = 1.0,
    cold: float = 1.0,
) -> float:
    """Blocks of 128 queries, each over the keys that it sees: whole waves of equal blocks; of causal ones, which
    differ, the longest, or the work of all over all SMs and a part of the longest at the end. Where prompts are shorter
    than a block, some kernels for tensor cores that overlap put the heads of a group into one (`packs`).

    `work` and `passes`: products for each pair and walks over the scores, where the forward pass has one share.
    """
    is_packed = fitted["packs"] and rates.overlaps and shape.queries < ROWS
    packed = shape.heads // shape.kv_heads if is_packed else 1
    heads = shape.batch * shape.heads // packed
    blocks = math.ceil(shape.queries * packed / ROWS)
    per_key = _per_key_s(shape.head_dim, rates, fitted, work, passes)
    prologue = fitted["prologue_s"] * rates.pace
    whole = math.ceil(shape.keys / ROWS) * ROWS
    seen = min(whole, shape.window + ROWS) if shape.window else whole
    every = heads * blocks
    longest = prologue + seen * per_key
    if shape.causal and blocks > 1 and packed == 1:
        ramp = min(math.ceil(seen / ROWS), blocks)
        visited = ROWS * (ramp * (ramp + 1) / 2) + (blocks - ramp) * seen
        spread = heads * (visited * per_key + blocks * prologue) / rates.sms
        compute = max(longest, spread + (fitted["tail"] * longest if every > rates.sms else 0.0))
    else:
        compute = math.ceil(every / rates.sms) * longest
    memory, power = moved_bytes / (fitted["stream"] * rates.bytes_per_s), fitted["blend"]
    fixed = rates.pace * (fitted["launch_s"] + cold * fitted["cold_s"])
    return fixed + float((compute**power + memory**power) ** (1 / power))


def decode_s(shape: Heads, moved_bytes: int, rates: Rates, fitted: Parameters, cold: float = 1.0) -> float:
    """One block for each sequence and head of keys: it walks along them, up to where the keys are split over blocks;
    where there are more blocks than fit, in waves. Bytes come meanwhile; the new keys and values are written before.
    """
    power = fitted["blend"]
    units = shape.batch * shape.kv_heads
    walked = min(1.0, shape.keys * shape.head_dim / fitted["walk_elements"])
    waves = math.ceil(units / (BLOCKS * rates.sms))
    queued = rates.pace * (waves - 1) * (fitted["wave_s"] + fitted["wave_walk_s"] * walked)
    rows = math.ceil(shape.heads / shape.kv_heads / fitted["rows"]) * fitted["rows"]
    compute = 4.0 * rows * units * shape.keys * shape.head_dim / (rates.flops_per_s * fitted["rate"])
    memory = moved_bytes / (fitted["stream"] * rates.bytes_per_s)
    fixed = rates.pace * (fitted["launch_s"] + cold * fitted["cold_s"] + fitted["walk_s"] * walked)
    written = rates.pace * fitted["write_s"] * units * shape.head_dim
    return fixed + written + float((queued**power + compute**power + memory**power) ** (1 / power))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How an op that moves bytes walks: along so many rows of so many elements, or flat over all of them (length 1)."""

    length: int = 1
    count: int = 0  # 0: flat
    kept: int = 1  # rows that a program holds in float32 until it writes: two in a backward pass
    turned: bool = False  # what was a column is a row of the result
    sorted: int = 0  # elements that a program of a second launch sorts for each row
    sorted_odd: bool = False  # which do not begin at whole vectors
    sums: Literal["none", "with rows", "alone"] = "none"  # by column, over all rows: of kernels that write rows, too

    @property
    def is_long(self) -> bool:
        """Too long to stay on the chip."""
        return self.kept * self.length * 4 >= ON_CHIP

    @property
    def unaligned(self) -> int:
        """16 over what divides the length of a row, of the result as well where that is turned: 1 to 16.

        >>> [Rows(length=length, count=9).unaligned for length in (1, 64, 24, 50257)]
        [1, 1, 2, 16]
        """
        divided = math.gcd(ALIGNED, self.length, self.count if self.turned else 0)
        return ALIGNED // divided if self.length > 1 else 1

    @property
    def block(self) -> int:
        """What a kernel holds of a row: the next power of two."""
        return 1 << max(0, self.length - 1).bit_length()

    def shares(self, sms: int) -> int:
        """Programs that take many rows each, and leave their share of the sums to a second launch.

        >>> norm = lambda count, length: Rows(count=count, length=length, sums="with rows").shares(132)
        >>> norm(100, 4096), norm(400, 4096), norm(800, 4096), norm(8000, 4096), norm(8000, 1024)
        (100, 132, 200, 264, 1056)
        >>> [Rows(count=count, length=4096, sums="alone").shares(132) for count in (100, 1000, 8000)]
        [1, 16, 33]
        """
        if self.sums == "alone":
            most = COLUMN_PROGRAMS * sms // math.ceil(self.length / COLUMNS)
            return 1 if self.count <= 2 * COLUMN_ROWS else max(1, min(most, math.ceil(self.count / COLUMN_ROWS)))
        most = sms * max(1, SUMMED // self.block)
        return max(1, min(self.count, most, max(sms, math.ceil(self.count / SHARE_ROWS))))

    def programs(self, sms: int) -> int:
        """One for each row, but where programs take many rows, or tiles of rows and columns; 0: of a flat op.

        >>> [Rows(count=rows, length=4096, turned=True).programs(132) for rows in (960, 4096)]
        [960, 1024]
        """
        if self.turned:
            is_large = self.count * self.length >= TURNED_EACH * sms * LARGE_SIDE**2
            side = LARGE_SIDE if is_large else SIDE
            return math.ceil(self.count / side) * math.ceil(self.length / side)
        if self.sums == "none":
            return self.count
        return self.shares(sms) * (math.ceil(self.length / COLUMNS) if self.sums == "alone" else 1)

    @property
    def is_odd(self) -> bool:
        """Triton does not know that rows begin where whole vectors do, and loads element by element."""
        return self.unaligned > 1

    @property
    def is_plain(self) -> bool:
        return not self.is_long and not self.is_odd


def stream_s(moved_bytes: int, launches: int, rates: Rates, fitted: Parameters, rows: Rows, cold: float = 1.0) -> float:
    """Launches, then bytes at nearly the memory's rate, which takes many SMs to saturate: rows go to the SMs in waves.

    The rate is less where a row is too long to stay on the chip, or where rows do not begin at whole vectors. The more
    programs there are, up to some for each SM, the longer the first loads, the last programs and what they leave to be
    added up take. A sum over many rows alone has a second launch (`join_s`). Parameters that were fitted before there
    was such a part lack it: it is 0 there.
    """
    share = 1.0
    if rows.is_long:
        share *= fitted["long"] if rows.kept == 1 else fitted["long_backward"]
    if rows.is_odd:
        most = math.log2(rows.unaligned / 2) / math.log2(ALIGNED / 2)  # 0 where 8 divides a row, 1 where 2 does not
        share *= fitted["odd"] ** (1 - most) * fitted.get("odd_most", fitted["odd"]) ** most
    programs = max(1, rows.programs(rates.sms) or math.ceil(moved_bytes / PROGRAM_BYTES))
    waves = math.ceil(programs / rates.sms)
    power = fitted["blend"]
    of_memory = moved_bytes / (fitted["stream"] * rates.bytes_per_s)
    of_sm = waves * moved_bytes / programs / (fitted["sm_share"] * rates.bytes_per_s / rates.sms)
    moving = float((of_memory**power + of_sm**power) ** (1 / power)) / share
    ramp = fitted.get("ramp_s", 0.0) * (1 - math.exp(-programs / rates.sms / fitted.get("ramp", 1.0)))
    sorting = _sorting_s(rows, rates.sms, fitted) if rows.sorted else 0.0
    joining = fitted.get("join_s", 0.0) if rows.sums == "alone" and rows.shares(rates.sms) > 1 else 0.0
    waiting = launches * (fitted["launch_s"] + cold * fitted["cold_s"]) + ramp + sorting + joining
    return rates.pace * waiting + moving


def _sorting_s(rows: Rows, sms: int, fitted: Parameters) -> float:
    """One program a row; those of an SM share it, so the second takes a part of what the first took."""
    one_s = fitted.get("sort_s", 0.0) * float((rows.sorted / SORTED) ** fitted.get("sort_power", 1.0))
    if rows.sorted_odd:
        one_s *= fitted.get("sort_odd", 1.0) * float((rows.sorted / SORTED) ** fitted.get("sort_odd_power", 0.0))
    if rows.is_odd:
        one_s += fitted.get("odd_s", 0.0)
    return one_s * (1 + fitted.get("sort_next", 1.0) * (math.ceil(rows.count / sms) - 1))
