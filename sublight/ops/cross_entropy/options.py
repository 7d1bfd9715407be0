"""What the loss is, beyond logits and labels, and what has none."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from sublight.errors import BadInput

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


class Options(NamedTuple):
    """The options of a loss, in the order of `OPTIONS_SCHEMA`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"


OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction"


def is_late(logits: torch.Tensor, options: Options) -> bool:
    """Whether one over the count waits for the backward pass: it would push most of an fp16 gradient below what fp16
    can hold, and a loss scale could not bring it back."""
    return options.reduction == "mean" and logits.dtype == torch.float16


def check(logits: torch.Tensor, labels: torch.Tensor, options: Options) -> None:
    """Refuse what has no loss."""
    if labels.dtype != torch.int64:
        raise BadInput(f"labels are {str(labels.dtype).removeprefix('torch.')}: they must be class numbers of int64")
    if labels.shape != logits.shape[:-1]:
        wanted = tuple(logits.shape[:-1])
        raise BadInput(f"labels have shape {tuple(labels.shape)}, logits are {tuple(logits.shape)}: pass {wanted}")
    if labels.device != logits.device:
        raise BadInput(f"logits are on {logits.device}, labels on {labels.device}: move one of them")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise BadInput(f"label_smoothing is {options.label_smoothing}: it must be between 0 and 1")
    if not 0.0 <= options.softcap < math.inf:
        raise BadInput(f"softcap is {options.softcap}: it must be positive, or 0 for none")
    if not 0.0 <= options.z_loss < math.inf:
        raise BadInput(f"z_loss is {options.z_loss}: it must be positive, or 0 for none")
    if options.reduction not in REDUCTIONS:
        raise BadInput(f"unknown reduction {options.reduction!r}: use one of {', '.join(REDUCTIONS)}")
