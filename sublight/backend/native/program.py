"""A plan as the native path takes it: buffers, launches with their parameters as the compiled kernels have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sublight.backend.device import is_interpreted
from sublight.backend.launch import Step

Program = tuple[list[Any], list[dict[str, Any]], list[int]]  # buffers, launches, outputs: for `teach` in call.cpp


def program_of(plan: Any, names: Sequence[str]) -> Program | None:
    """Buffers, launches and outputs of an op.Plan; None where it holds what the native path does not do.

    `names` are the arguments'. The plan has run once, so that its kernels are compiled.
    """
    if plan.copies or any(buffer.bits for buffer in plan.buffers.values()):
        return None
    places = {name: place for place, name in enumerate((*names, *plan.buffers))}
    launches = [_launch(step, places) for step in plan.steps]
    if any(launch is None for launch in launches):
        return None
    buffers = [
        (list(buffer.shape), list(buffer.strides), buffer.dtype, buffer.is_zero) for buffer in plan.buffers.values()
    ]
    return buffers, launches, [places[name] for name in plan.outputs]  # type: ignore[return-value]


def _launch(step: Step, places: dict[str, int]) -> dict[str, Any] | None:
    tensors = [("tensor", places[name], "") for name in step.on]
    if is_interpreted():
        return {"python": step, "parameters": tensors} if not step.free else None
    compiled = step.compiled
    if compiled is None or not is_plain(compiled):
        return None
    signature = compiled.src.signature  # argument name -> its type, or "constexpr" for a constant
    parameters: list[tuple[str, Any, str]] = []
    for parameter, value in zip(step.kernel.params, (*tensors, *step.numbers), strict=False):
        kind = signature[parameter.name]
        if kind == "constexpr":
            continue
        if isinstance(value, tuple):
            parameters.append(value)
        elif isinstance(value, str):
            parameters.append(("free", places[value], kind))
        elif kind in NUMBERS:
            parameters.append(("literal", float(value) if kind.startswith("fp") else int(value), kind))
        else:
            return None
    return {
        "function": compiled.function,
        "grid": list((*step.grid, 1, 1)[:3]),
        "threads": 32 * compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
        "parameters": parameters,
    }


NUMBERS = ("i32", "i64", "u32", "u64", "i1", "u1", "fp32", "fp64")


def is_plain(compiled: Any) -> bool:
    """A launch that cuLaunchKernel makes by itself: no clusters, no cooperation, no scratch memory, no descriptors."""
    launcher, metadata = compiled.run, compiled.metadata
    return not (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or launcher.launch_cooperative_grid
        or launcher.launch_pdl
        or metadata.num_ctas != 1
        or metadata.tensordesc_meta
    )
