"""What `sublight why` does: make the plan of a call on tensors without data, for a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from typing import Any

from sublight.cost import shape_text
from sublight.errors import BadInput

DEFAULT_GPU = "h200"  # its limits and choices were measured


def planned(name: str, shape_words: str, dtype_words: str, gpu_name: str) -> dict[str, Any]:
    """The plan of a plain call, without gradients; at the benchmark's first shape unless one is given."""
    from sublight import gpus, ops
    from sublight.backend.record import compilable
    from sublight.xray.compile import recording

    op = ops.find(name)
    shape = op.parse_shape(shape_words) if shape_words else op.shapes[0]
    dtype = op.parse_dtype(dtype_words)
    here = gpus.detect()
    gpu = gpus.find(gpu_name) if gpu_name else here if here and here.compute_capability else gpus.find(DEFAULT_GPU)
    try:
        inputs = op.inputs(shape, dtype, "meta", 0)
    except (RuntimeError, OverflowError):  # PyTorch counts bytes in 63 bits
        raise BadInput(f"shape {shape_text(shape)} is too large for a tensor") from None
    with recording(compilable(gpu), gpu):
        plan = op.plan(*inputs)
    return {
        "op": op.name,
        "shape": dict(shape),
        "dtype": dtype,
        "gpu": gpu.key,
        "is_here": here is not None and here.key == gpu.key,
        "provider": plan.provider,
        "kernel": plan.kernel,
        "tile": tile_text(plan.tile) if plan.tile is not None else None,
        "grid": list(plan.grid),
        "reason": plan.reason,
    }


def tile_text(tile: Any) -> str:
    """What a program takes, without what is as usual.

    >>> from sublight.ops.record.tuning import Tile
    >>> tile_text(Tile(block=1024, warps=4, packed=True))
    'block 1024, warps 4, packed'
    """
    if not dataclasses.is_dataclass(tile):
        return str(tile)
    values = [(each.name, getattr(tile, each.name), each.default) for each in dataclasses.fields(tile)]
    return ", ".join(name if value is True else f"{name} {value}" for name, value, usual in values if value != usual)


def page(plan: dict[str, Any]) -> str:
    where = plan["gpu"] if plan["is_here"] else f"{plan['gpu']}, which is not here"
    lines = [f"{plan['op']} {shape_text(plan['shape'])} {plan['dtype']} on {where}: {plan['provider']}"]
    lines.append(f"  kernel  {plan['kernel']}")
    if plan["tile"]:
        lines.append(f"  tile    {plan['tile']}, {'x'.join(map(str, plan['grid']))} programs")
    return "\n".join([*lines, f"  reason  {plan['reason']}"])
