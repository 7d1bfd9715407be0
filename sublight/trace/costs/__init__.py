"""What an op in a trace must do at least, from the shapes that the profiler recorded.

The cost is a lower bound: each input is read once at the size it has in memory, each output written once; where the
trace leaves a size open (which rows an index touches, which dimensions a sum reduces), the smallest possible counts.
An op whose cost cannot be known is None, never zero. Each file here holds a table of ops; `TABLES` lists them by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sublight.cost import movement
from sublight.trace.costs import (
    attention,
    bookkeeping,
    communication,
    conv,
    data,
    fused,
    libraries,
    matmul,
    normalization,
    optimizer,
    pointwise,
    reduction,
)
from sublight.trace.costs.families import family_of
from sublight.trace.costs.kernels import kernel_dtype, kernel_family
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown
from sublight.trace.record import EMPTY, Detail

__all__ = ("FAMILIES", "OpCost", "cost_of", "family_of", "kernel_dtype", "kernel_family", "no_cost")

FAMILIES = (
    *("matmul", "conv", "attention", "norm", "softmax", "pointwise", "reduction", "embedding", "loss", "optimizer"),
    *("copy", "memset", "index", "sort", "dropout", "fft", "communication", "fused", "other"),
    *("activation", "rope", "moe", "sampling", "quantize"),  # of serving engines: whole ops in a kernel each
)
TABLES = (
    matmul.OPS,
    conv.OPS,
    attention.OPS,
    normalization.OPS,
    pointwise.OPS,
    reduction.OPS,
    data.OPS,
    optimizer.OPS,
    libraries.OPS,
)
WAYS: dict[str, movement.Way] = {"HtoD": "from_host", "DtoH": "to_host", "PtoP": "peer", "HtoH": "on_host"}
MOST = 2**62  # bytes or operations of one call; beyond this the trace is damaged
OPS: dict[str, Handler] = {name: handler for table in TABLES for name, handler in table.items()}
PATTERNS: tuple[tuple[re.Pattern[str], Handler], ...] = (
    (fused.KERNEL, fused.inductor),
    (fused.TEMPLATE, fused.template),
    (communication.NAME, communication.collective),
)


def cost_of(name: str, detail: Detail, *, kernels: Sequence[str] = (), bytes: int = -1) -> OpCost | None:
    """The least that this op, copy or memset must do; None where the trace does not tell enough.

    `kernels` are the names of what it ran on the device: they tell TF32 from float32, and the data type where the
    trace does not. `bytes` is the size of a copy or memset.
    """
    if name.startswith(("Memcpy", "Memset")):
        return _transfer(name, bytes) if bytes >= 0 else None
    inplace = name.endswith("_") and not name.endswith("__")
    base = name[:-1] if inplace and name not in OPS else name
    handler = OPS.get(base) or next((handler for pattern, handler in PATTERNS if pattern.search(name)), None)
    if handler is None:
        return None
    inplace = inplace or base.startswith("aten::__i")
    args = Args(name=base.rpartition("::")[2], detail=detail, kernels=kernels, inplace=inplace)
    try:
        known = handler(args)
    except (Unknown, IndexError, ValueError, OverflowError):  # shapes that do not fit the op's schema
        return None
    figures = (known.cost.read_bytes, known.cost.write_bytes, *known.cost.flops.values())
    return known if all(0 <= figure < MOST for figure in figures) else None


def _transfer(name: str, size_bytes: int) -> OpCost:
    copies = name.startswith("Memcpy")
    way = next((way for word, way in WAYS.items() if word in name), None)
    cost = movement.transfer(size_bytes, way or "on_device") if copies else movement.memset(size_bytes)
    family = "copy" if copies else "memset"
    return OpCost(family=family, cost=cost, dtype="uint8", shape=str(size_bytes), output_bytes=size_bytes)


def no_cost(name: str, detail: Detail = EMPTY) -> bool:
    """Whether an op does no work of its own: a view, an allocation, a range around other ops.

    `to`, `contiguous` and `type_as` do where the detail shows that the bytes change.
    """
    return bookkeeping.touches_no_data(name, detail)
