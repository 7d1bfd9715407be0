"""Rows that `fit` reads: shapes drawn by chance, and how long ops of these shapes take on this machine.

Products are torch's (cuBLAS), attention is torch's (cuDNN's), with the write of the new keys and values into the
cache before it, as an engine runs it; memory-bound ops (`memory_ops`) are this project's, as a captured step runs them:
called one by one, small ones would be PyTorch's, where the host decides. Shapes are drawn evenly over the logarithm of
each size, by a seed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

from sublight import cost, timing
from sublight.cost.record import Direction
from sublight.predict import memory_ops
from sublight.predict.memory_ops import MemoryOp, power

COUNTS = {"product": 320, "prefill attention": 120, "decode attention": 120, "memory-bound op": 440}
TINY = {"product": 3, "prefill attention": 2, "decode attention": 2, "memory-bound op": 3}
MOST_SETS = {"memory-bound op": 512}  # of inputs that take turns; 64 of the others
MOST_BYTES = 12 << 30  # of one case
MOST_FLOPS = 40 * 10**12  # of one case, not a rate
EACH_S = {"memory-bound op": 0.03}  # of measuring, for a case; 0.06 of the others
KEPT_BYTES = 128 << 20  # outputs of memory-bound ops below this have memory of their own: the L2 must not hold them


def cases(
    seed: int,
    *,
    tiny: bool = False,
    only: Collection[str] = tuple(COUNTS),
    streams: Sequence[MemoryOp] = memory_ops.OPS,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Shapes that fit, kinds in turn: what is cut short has some of each."""
    found, streams = [], memory_ops.TINY if tiny else streams
    for kind in only:
        draw = random.Random(f"sublight {seed} {kind}")
        count = (TINY if tiny else COUNTS)[kind]
        seen: set[tuple[Any, ...]] = set()
        while len(seen) < count:
            shape = shape_of(kind, draw, tiny, streams[len(seen) % len(streams)])
            spent = cost_of(kind, shape)
            if spent.bytes <= MOST_BYTES and spent.total_flops <= MOST_FLOPS and tuple(shape.values()) not in seen:
                seen.add(tuple(shape.values()))
                found.append((len(seen) / count, kind, shape))
    yield from ((kind, shape) for _, kind, shape in sorted(found, key=lambda each: each[0]))


def shape_of(kind: str, draw: random.Random, tiny: bool, stream: MemoryOp) -> dict[str, Any]:
    if kind == "product":
        return product_shape(draw, tiny)
    if kind == "memory-bound op":
        return memory_ops.shape_of(stream, draw, tiny)
    return attention_shape(draw, tiny, decode=kind == "decode attention")


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


def op_of(kind: str, shape: dict[str, Any]) -> tuple[str, Direction, dict[str, int]]:
    """The op's name, its direction, and its shape without these."""
    names = {"product": "matmul", "memory-bound op": shape.get("op", "")}
    sizes = {name: size for name, size in shape.items() if name not in ("op", "direction")}
    return names.get(kind, "attention"), shape.get("direction", "fwd"), sizes


def cost_of(kind: str, shape: dict[str, Any]) -> cost.Cost:
    op, direction, sizes = op_of(kind, shape)
    return cost.find(op)(sizes, "bfloat16", direction)


def measured(kind: str, shape: dict[str, Any], device: str) -> dict[str, Any]:
    """One row in the format of benchmarks/<gpu>.json."""
    spent = cost_of(kind, shape)
    op, direction, sizes = op_of(kind, shape)
    sets = buffer_sets(kind, spent.bytes, device)
    provider = provider_of(op, sizes, device) if kind == "memory-bound op" else "torch"
    samples = timing.measure(
        calls_of(kind, shape, device, sets),
        device=device,
        time_limit_s=EACH_S.get(kind, 0.06),
        keep_outputs=kind != "memory-bound op" or spent.bytes < KEPT_BYTES,
    )
    return {
        "op": op,
        "direction": direction,
        "shape": sizes,
        "dtype": "bfloat16",
        "provider": provider,
        "ours": provider == "sublight",
        "cache": "cold",
        "bound": "memory" if spent.bytes > spent.total_flops / 100 else "matmul_bf16",
        "median_s": samples.median_s,
        "spread_s": samples.spread_s,
        "n": samples.n,
        "method": samples.method,
        "buffer_sets": sets,
        "bytes": spent.bytes,
        "flops": spent.total_flops,
    }


def buffer_sets(kind: str, set_bytes: int, device: str) -> int:
    """How many sets of inputs take turns. Of small ones too few to leave the L2: the row says how many there were."""
    cache_bytes = 64 << 20 if device == "cuda" else 1 << 20
    sets = min(timing.sets_for(set_bytes, cache_bytes), 8 if device == "cpu" else MOST_SETS.get(kind, 64))
    return max(1, min(sets, MOST_BYTES // max(set_bytes, 1)))


def calls_of(kind: str, shape: dict[str, Any], device: str, sets: int) -> list[Callable[[], Any]]:
    """One call for each set of inputs."""
    op, direction, sizes = op_of(kind, shape)
    if kind == "memory-bound op":
        return memory_calls(op, direction, sizes, device, sets)
    make = product_call if kind == "product" else attention_call
    return [make(sizes, device) for _ in range(sets)]


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


def provider_of(op: str, shape: dict[str, int], device: str) -> str:
    """The provider whose kernels a memory-bound op of this shape runs."""
    from sublight import ops

    record = ops.find(op)
    with as_captured():
        return record.plan(*record.inputs(shape, "bfloat16", device, 0)).provider


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Inside, calls take the kernels that a captured graph would: the host's time does not count."""
    from sublight.ops.record import call

    with mock.patch.object(call, "SMALL_BYTES", 0.0):
        yield


def memory_calls(
    op: str, direction: Direction, shape: dict[str, int], device: str, sets: int
) -> list[Callable[[], Any]]:
    from sublight import ops
    from sublight.bench.measure import Backward

    record = ops.find(op)
    first = record.inputs(shape, "bfloat16", device, 0)

    def forward(*given: Any) -> Any:
        with as_captured():
            return record.call(*given)

    every = [first, *(copied(first) for _ in range(sets - 1))]  # to draw them anew takes longer than the measuring
    if direction == "fwd":
        return [partial(forward, *inputs) for inputs in every]
    bind = lambda given: partial(forward, *given)  # noqa: E731
    return [Backward(bind, inputs, record.wrt, alone=direction == "bwd") for inputs in every]


def copied(x: Any) -> Any:
    """Tensors in memory of their own, also those in lists; the rest as it is."""
    if isinstance(x, list | tuple):
        return type(x)(map(copied, x))
    return x.detach().clone().requires_grad_(x.requires_grad) if hasattr(x, "detach") else x
