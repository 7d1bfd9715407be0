"""The time of one op: its floor, what a good kernel should take, how that is known and how far it may be off."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from sublight import gpus
from sublight.cost.dtypes import find_dtype
from sublight.cost.record import Cost, Direction, Shape
from sublight.gpus import Gpu
from sublight.predict import analytic, links, table
from sublight.predict.analytic import Heads, Parameters, Rates, Rows
from sublight.predict.machine import Machine
from sublight.predict.operation import Operation

How = Literal["measured", "carried over", "analytic"]  # on this GPU; on one of its architecture; by figures alone
ROW_LENGTHS = ("cols", "n", "vocab")  # names of a row's length in shapes; the first that is there
ROW_COUNTS = ("rows", "outer", "tokens")  # and of how many
FLAT = ("add", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu")  # ops without rows, whatever their shape is given by
LARGEST = ("sample", "softmax_topk")  # ops that keep the largest of every GROUP, and sort these by BUNDLEs
GROUP, BUNDLE = 64, 4
NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")  # whose backward pass sums up by column
OVERLAPPING = ("Hopper", "Blackwell")  # whose tensor cores work beside their vector units,
CONSUMER_BLACKWELL = 12  # but for GPUs of this compute capability, which multiply as an Ampere does
LAUNCH_EARLY = ("Hopper", "Blackwell")  # where a kernel begins before the one before it has ended
# What a product of one row takes beyond its floor when its weight is read ahead: a layer's four of Llama 8B took
# 103.2 µs on an H200, their floors 97.0 (docs/engines.md).
CHAINED_S, CHAINED_GPU = 1.55e-6, "h200"
# Of the rate of products, what cuBLAS reaches where rows do not begin every 16 bytes: lengths that 2 divides (4096 x
# 100000 x 700 and 8192 x 8190 x 512 on an H200, 0.27 and 0.31), and odd ones (8192 x 50257 x 768 and 128 x 8192 x 4095,
# 0.125 and 0.15), docs/products.md. What other architectures do with such rows was not measured.
UNALIGNED_SHARES, UNALIGNED_ON = {4: 0.29, 2: 0.29, 1: 0.137}, "Hopper"
HALF = ("bfloat16", "float16")  # what the tables were measured in, but for those of products in fewer bits
FP8 = "float8_e4m3fn"
# Of attention, in forward passes: five products where that has two, at 0.89 of its rate, as six shapes on an H200 have
# it (docs/attention.md, cuDNN): they are off by -9 to +7 %.
BACKWARD = 2.5 / 0.89
PACKED_ROWS = 128  # that kernels for weights of four bits take; of more rows the weight is made whole first
# Bytes that finding the scales of each number of an fp8 product's input and rounding it take: 16 bits are read twice,
# and 8 are written.
ROUNDED_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run of an op on one GPU."""

    floor_s: float
    bound: str  # the limit behind the floor
    expected_s: float
    how: How
    error: float  # relative, the 90th percentile of rows that were held out

    @property
    def efficiency(self) -> float:
        return self.floor_s / self.expected_s if self.expected_s else 1.0


def timed(op: Operation, machine: Machine, cold: float = 1.0) -> Timed:
    """No op is faster than its floor, whatever a table says. `cold`: see `analytic`."""
    if op.kind == "product":
        machine.rate(op.dtype)  # or one line: this GPU has no such products
    if "l2" in machine.factors:
        op = replace(op, cost=with_l2(op, machine.gpu.l2_bytes or 1, machine.factors["l2"]))
    floor = machine.limits.floor(op.cost)
    floor_s, bound = (floor.seconds, floor.bound) if floor else (0.0, "unknown")
    kind, sizes = _looked_up(op)
    near = table.find(kind, machine.key, machine.gpu.architecture, machine.tables)
    found = near if sizes else None
    if op.direction != "fwd" and not found:  # tables are of forward passes
        near = None
    fitted = near.parameters if near and near.parameters else table.parameters(kind)
    expected_s = _analytic_s(op, machine, fitted, cold) * (found.correction(sizes) if found else 1.0)
    source = found.gpu if found else ""
    begins_early = op.chained and op.dtype in HALF and machine.gpu.architecture in LAUNCH_EARLY
    if begins_early and floor_s + CHAINED_S < expected_s:
        expected_s = floor_s + CHAINED_S
        source = CHAINED_GPU if found else ""
    same = source == machine.key and not machine.changed
    error = table.analytic_error(kind, machine.key)
    if not sizes:  # of a kind that was not checked there: no better known than on a GPU without rows
        error = max(error, table.analytic_error(kind))
    if found:
        error = found.p90_error if same else max(found.p90_error, error)
    return Timed(
        floor_s=floor_s,
        bound=bound,
        expected_s=max(expected_s, floor_s),
        how="measured" if same else "carried over" if found else "analytic",
        error=error,
    )


def products_s(cost: Cost, machine: Machine) -> float:
    """The products' part of a floor."""
    rates = ((flops, machine.limits.value(name)) for name, flops in cost.flops.items() if name.startswith("matmul"))
    return max((flops / rate for flops, rate in rates if rate), default=0.0)


def with_l2(op: Operation, l2_bytes: int, factor: float) -> Cost:
    """What comes through the memory, once the L2 is larger: of activations, which the op before has just written, it
    then keeps more until they are read. Weights and caches push each other out as before.
    """
    if op.kind == "link" or (op.kind == "attention" and op.shape["q_len"] == 1):
        return op.cost
    read = op.cost.read_bytes
    if op.kind == "product":
        read = min(read, round(op.shape["m"] * op.shape["k"] * find_dtype(op.dtype).bits / 8))
    kept = analytic.cold_share(op.cost.bytes, l2_bytes / factor) - analytic.cold_share(op.cost.bytes, l2_bytes)
    return replace(op.cost, read_bytes=op.cost.read_bytes - round(kept * read))


def rates_of(machine: Machine, dtype: str | None = None) -> Rates:
    """The vendor's memory rate, and the products' rate that somebody reached; none for an op without products."""
    gpu = machine.gpu
    return Rates(
        flops_per_s=machine.reached(dtype) if dtype else 0.0,
        bytes_per_s=gpu.memory_bytes_per_s or 0.0,
        sms=gpu.sms or 1,
        pace=_fitted_clock_hz() / (gpu.boost_clock_hz or _fitted_clock_hz()),
        vectors=machine.factors.get("flops", 1.0),
        overlaps=_overlaps(gpu),
    )


def _overlaps(gpu: Gpu) -> bool:
    """A GPU of an architecture that is not known is one to come."""
    is_consumer = (gpu.compute_capability or (0, 0))[0] == CONSUMER_BLACKWELL
    return not is_consumer and (not gpu.architecture or gpu.architecture in OVERLAPPING)


@functools.cache
def _fitted_clock_hz() -> float:
    """Of the GPU whose seconds the parameters are."""
    return gpus.find("h100").boost_clock_hz or 1.0


def _looked_up(op: Operation) -> tuple[str, tuple[float, ...]]:
    """The kind of table, and the sizes that it is looked up by; none: there is no table."""
    shape = op.shape
    if op.kind == "link":
        return "link", ()
    if op.kind == "stream":
        sizes = stream_sizes(op.cost.bytes, rows_of(op.op, op.shape, op.direction)) if op.dtype in HALF else ()
        return f"stream {op.op} {op.direction}", sizes
    if op.kind == "product":
        kind = _product_kind(op)
        is_plain = shape.get("groups", 1) == 1 and op.op != "conv2d" and op.dtype in (*HALF, FP8) and op.row_step == 8
        return kind, (shape["m"], shape["n"], shape["k"]) if is_plain and kind != table.FEW_BITS else ()
    heads = _heads(op)
    kind = "decode attention" if heads.queries == 1 else "prefill attention"
    is_plain = heads.causal and not heads.window and "value_dim" not in shape
    is_half = op.dtype in HALF and (op.stored or op.dtype) in HALF
    is_measured = is_half and heads.head_dim <= 256 and op.direction == "fwd" and (heads.queries == 1 or is_plain)
    return kind, sizes_of(heads) if is_measured else ()


def _product_kind(op: Operation) -> str:
    """By the data types that tables were measured in; what has fewer bits and no table is known less well."""
    stored = op.stored or op.dtype
    if op.dtype == FP8 == stored:
        return "product fp8"
    if op.dtype in HALF and stored == "int4" and op.shape["m"] <= PACKED_ROWS and op.direction == "fwd":
        return "product int4"
    is_wide = find_dtype(op.dtype).bits >= 16 and find_dtype(stored).bits >= 16
    return "product" if is_wide else table.FEW_BITS


def sizes_of(heads: Heads) -> tuple[float, ...]:
    """What attention's tables are looked up by: heads over the whole batch, of keys in decoding, and the rest."""
    every = heads.batch * (heads.kv_heads if heads.queries == 1 else heads.heads)
    return every, heads.keys, heads.heads / heads.kv_heads, heads.head_dim


def rows_of(op: str, shape: Shape, direction: Direction) -> Rows:
    """Of an op that moves bytes: what lies together in memory, and how often; all of it where each element is its own
    affair, or where a shape has no rows."""
    kept = 2 if direction != "fwd" else 1
    if op in FLAT:
        return Rows(kept=kept)
    if "head_dim" in shape:
        width = (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
        return Rows(length=width, count=shape["batch"] * shape["q_len"], kept=kept)
    if shape.get("inner", 1) > 1:
        is_column_sum = op == "reduce_sum" and shape["outer"] == 1
        count = shape["outer"] * shape["n"]
        return Rows(length=shape["inner"], count=count, kept=kept, sums="alone" if is_column_sum else "none")
    length = next((shape[name] for name in ROW_LENGTHS if name in shape), 1)
    count = next((shape[name] for name in ROW_COUNTS if name in shape), 0)
    if op == "embedding" and direction == "bwd":
        count += shape["vocab"]  # the gradient has all of the table's rows, however few tokens there are
    if op in LARGEST:
        groups = -(-length // GROUP)
        bundles = 1 << max(6, (-(-groups // BUNDLE) - 1).bit_length())  # a power of two, 64 at least
        return Rows(length=length, count=count, kept=kept, sorted=bundles, sorted_odd=groups % analytic.ALIGNED != 0)
    has_sums = op in NORMS and direction != "fwd"
    return Rows(
        length=length, count=count, kept=kept, turned=op == "transpose", sums="with rows" if has_sums else "none"
    )


def stream_sizes(moved_bytes: int, rows: Rows) -> tuple[float, ...]:
    """What tables of memory-bound ops are looked up by: bytes, the block that holds a row, how far its length
    is from whole vectors. Kernels hold rows in blocks of powers of two: 4,608 columns run like 8,192, not 4,096."""
    return max(moved_bytes, 1), rows.block, rows.unaligned


def _analytic_s(op: Operation, machine: Machine, fitted: Parameters, cold: float) -> float:
    shape = op.shape
    if op.kind == "link":
        return links.seconds(op, machine)
    if op.kind == "stream":
        rows = rows_of(op.op, op.shape, op.direction)
        return analytic.stream_s(op.cost.bytes, op.cost.launches, rates_of(machine), fitted, rows, cold)
    rates = rates_of(machine, op.dtype)
    if op.kind == "product":
        if op.dtype in HALF and machine.gpu.architecture == UNALIGNED_ON:
            rates = replace(rates, flops_per_s=rates.flops_per_s * UNALIGNED_SHARES.get(op.row_step, 1.0))
        m, n, k, groups = shape["m"], shape["n"], shape["k"], shape.get("groups", 1)
        moved_bytes = op.cost.bytes + (ROUNDED_BYTES * m * k if _product_kind(op) == "product fp8" else 0)
        return analytic.product_s(m, n, k, groups, moved_bytes, rates, fitted, cold)
    heads = _heads(op)
    if heads.queries == 1:
        return analytic.decode_s(heads, op.cost.bytes, rates, fitted, cold)
    work = passes = 1.0 if op.direction == "fwd" else BACKWARD
    if value_dim := shape.get("value_dim"):
        work *= (heads.head_dim + value_dim) / (2 * heads.head_dim)
    return analytic.prefill_s(heads, op.cost.bytes, rates, fitted, work, passes, cold)


def _heads(op: Operation) -> Heads:
    shape = op.shape
    return Heads(
        batch=shape["batch"],
        queries=shape["q_len"],
        keys=shape["kv_len"],
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        causal=bool(shape.get("causal", 0)),
        window=shape.get("window", 0),
    )
