"""A plan's launches one by one, for ops that do more than launch: tensors and numbers go by the steps' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sublight.backend.launch import Step
from sublight.op import Plan


def buffers_of(plan: Plan, device: torch.device) -> dict[str, torch.Tensor]:
    """The plan's buffers, made."""
    return {
        name: (torch.zeros if buffer.is_zero else torch.empty)(buffer.shape, dtype=buffer.dtype, device=device)
        for name, buffer in plan.buffers.items()
    }


def tensors_of(plan: Plan, **arguments: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments, copied where the plan says so, and the plan's buffers; all on the first argument's device."""
    device = next(iter(arguments.values())).device
    given = {name: x.contiguous() if name in plan.copies else x for name, x in arguments.items()}
    return given | buffers_of(plan, device)


def take(step: Step, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any] | None = None) -> None:
    """Launch the step on what it names; `numbers` are the values of its free ones."""
    free = tuple([numbers[name] for name in step.free]) if numbers else ()
    step(*[tensors[name] for name in step.on], free=free)
