"""Rows that `fit` reads: shapes drawn by chance, and how long ops of these shapes take on this machine.

Products are torch's (cuBLAS), attention is torch's (cuDNN's), with the write of the new keys and values into the
cache before it, as an engine runs it; memory-bound ops are this project's, as a user calls them. Shapes are drawn
evenly over the logarithm of each size, by a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from sublight import cost, timing

COUNTS = {"product": 320, "prefill attention": 120, "decode attention": 120, "memory-bound op": 120}
TINY = {"product": 3, "prefill attention": 2, "decode attention": 2, "memory-bound op": 2}
MEMORY_OPS = ("rms_norm", "add_rms_norm", "layer_norm", "softmax", "swiglu", "gelu")
MOST_SETS = {"memory-bound op": 512}  # of inputs that take turns; 64 of the others
MOST_BYTES = 12 << 30  # of one case
MOST_FLOPS = 40 * 10**12  # of one case, not a rate
EACH_S = 0.06  # of measuring, for a case


def cases(
    seed: int,
    *,
    tiny: bool = False,
    only: Collection[str] = tuple(COUNTS),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Shapes that fit, kinds in turn: what is cut short has some of each."""
    found = []
    for kind in only:
        draw = random.Random(f"sublight {seed} {kind}")
        count = (TINY if tiny else COUNTS)[kind]
        seen: set[tuple[Any, ...]] = set()
        while len(seen) < count:
            shape = shape_of(kind, draw, tiny)
            spent = cost_of(kind, shape)
            if spent.bytes <= MOST_BYTES and spent.total_flops <= MOST_FLOPS and tuple(shape.values()) not in seen:
                seen.add(tuple(shape.values()))
                found.append((len(seen) / count, kind, shape))
    yield from ((kind, shape) for _, kind, shape in sorted(found, key=lambda each: each[0]))


def shape_of(kind: str, draw: random.Random, tiny: bool) -> dict[str, Any]:
    if kind == "product":
        return product_shape(draw, tiny)
    if kind == "memory-bound op":
        return memory_shape(draw, tiny)
    return attention_shape(draw, tiny, decode=kind == "decode attention")


def power(draw: random.Random, low: float, high: float, multiple: int = 1) -> int:
    return max(multiple, round(2 ** draw.uniform(low, high) / multiple) * multiple)


def product_shape(draw: random.Random, tiny: bool) -> dict[str, int]:
    top = 7 if tiny else 15
    return {"m": power(draw, 0, top - 1), "n": power(draw, 6, top, 64), "k": power(draw, 6, top, 64)}


def attention_shape(draw: random.Random, tiny: bool, *, decode: bool) -> dict[str, int]:
    kv_heads = draw.choice((1, 2) if tiny else (1, 2, 4, 8, 16, 32))
    group = draw.choice((1, 2, 4, 8))
    length = power(draw, 4, 6 if tiny else 16 if decode else 14, 1 if decode else 16)
    batch = power(draw, 0, 1 if tiny else 8 if decode else 4)
    sizes = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads}
    return sizes | {"q_len": 1 if decode else length, "kv_len": length, "head_dim": draw.choice((64, 128)), "causal": 1}


def memory_shape(draw: random.Random, tiny: bool) -> dict[str, Any]:
    """A quarter of a megabyte at least, so that there are buffers enough for the L2 to lose them."""
    cols = power(draw, 8, 9 if tiny else 14, 64)
    rows = power(draw, 18 - math.log2(cols), 18 - math.log2(cols) if tiny else 28 - math.log2(cols))
    return {"op": draw.choice(MEMORY_OPS), "rows": rows, "cols": cols}


def op_of(kind: str, shape: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The op's name, and its shape without that."""
    names = {"product": "matmul", "memory-bound op": shape.get("op", "")}
    return names.get(kind, "attention"), {name: size for name, size in shape.items() if name != "op"}


def cost_of(kind: str, shape: dict[str, Any]) -> cost.Cost:
    op, sizes = op_of(kind, shape)
    return cost.find(op)(sizes, "bfloat16", "fwd")


def measured(kind: str, shape: dict[str, Any], device: str) -> dict[str, Any]:
    """One row in the format of benchmarks/<gpu>.json."""
    spent = cost_of(kind, shape)
    op, sizes = op_of(kind, shape)
    sets = buffer_sets(kind, spent.bytes, device)
    samples = timing.measure(
        [call_of(kind, op, sizes, device) for _ in range(sets)], device=device, time_limit_s=EACH_S
    )
    return {
        "op": op,
        "direction": "fwd",
        "shape": sizes,
        "dtype": "bfloat16",
        "provider": "sublight" if kind == "memory-bound op" else "torch",
        "ours": kind == "memory-bound op",
        "cache": "cold",
        "bound": "memory" if spent.bytes > spent.total_flops / 100 else "matmul_bf16",
        "median_s": samples.median_s,
        "spread_s": samples.spread_s,
        "n": samples.n,
        "buffer_sets": sets,
        "bytes": spent.bytes,
        "flops": spent.total_flops,
    }


def buffer_sets(kind: str, set_bytes: int, device: str) -> int:
    """How many sets of inputs take turns. Of small ones too few to leave the L2: the row says how many there were."""
    cache_bytes = 64 << 20 if device == "cuda" else 1 << 20
    sets = min(timing.sets_for(set_bytes, cache_bytes), 8 if device == "cpu" else MOST_SETS.get(kind, 64))
    return max(1, min(sets, MOST_BYTES // max(set_bytes, 1)))


def call_of(kind: str, op: str, shape: dict[str, int], device: str) -> Callable[[], Any]:
    if kind == "memory-bound op":
        return memory_call(op, shape, device)
    return product_call(shape, device) if kind == "product" else attention_call(shape, device)


def product_call(shape: dict[str, int], device: str) -> Callable[[], Any]:
    import torch

    x = torch.randn(shape["m"], shape["k"], dtype=torch.bfloat16, device=device)
    weight = torch.randn(shape["n"], shape["k"], dtype=torch.bfloat16, device=device)
    return lambda: torch.nn.functional.linear(x, weight)


def attention_call(shape: dict[str, int], device: str) -> Callable[[], Any]:
    """The new keys and values go into the cache, then attention reads it."""
    import torch

    batch, queries, head_dim = shape["batch"], shape["q_len"], shape["head_dim"]
    q = torch.randn(batch, shape["heads"], queries, head_dim, dtype=torch.bfloat16, device=device)
    cache = torch.randn(2, batch, shape["kv_heads"], shape["kv_len"], head_dim, dtype=q.dtype, device=device)
    new = torch.randn(2, batch, shape["kv_heads"], queries, head_dim, dtype=q.dtype, device=device)

    def call() -> Any:
        cache[:, :, :, -queries:].copy_(new)
        return torch.nn.functional.scaled_dot_product_attention(
            q, cache[0], cache[1], is_causal=queries > 1, enable_gqa=True
        )

    return call


def memory_call(op: str, shape: dict[str, int], device: str) -> Callable[[], Any]:
    from sublight import ops

    record = ops.find(op)
    return partial(record.call, *record.inputs(shape, "bfloat16", device, 0))
