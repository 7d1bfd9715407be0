"""What `sublight why` does: make the plan of a call on tensors without data, for a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from typing import Any

from sublight.cost import shape_text

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
    with recording(compilable(gpu), gpu):
        plan = op.plan(*op.inputs(shape, dtype, "meta", 0))
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


def page(found: dict[str, Any]) -> str:
    where = found["gpu"] if found["is_here"] else f"{found['gpu']}, which is not here"
    lines = [f"{found['op']} {shape_text(found['shape'])} {found['dtype']} on {where}: {found['provider']}"]
    lines.append(f"  kernel  {found['kernel']}")
    if found["tile"]:
        lines.append(f"  tile    {found['tile']}, {'x'.join(map(str, found['grid']))} programs")
    return "\n".join([*lines, f"  reason  {found['reason']}"])
