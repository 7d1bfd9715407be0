"""A model over batches and contexts: where its bottleneck moves, and where it no longer fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sublight.predict.estimate import Prediction, predict
from sublight.predict.machine import Machine
from sublight.predict.model import Model
from sublight.predict.step import Mode, Step

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Predictions of one step on one GPU, by batch and context."""

    machine: Machine
    mode: Mode
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    cells: tuple[tuple[Prediction, ...], ...]  # a row a context


def contexts_for(model: Model) -> tuple[int, ...]:
    """The grid's contexts: up to the length that the model was trained for; an image has a single length."""
    if model.tokens or model.family == "convolution":
        return (model.tokens or 1,)
    return tuple(length for length in CONTEXTS if length <= (model.longest or CONTEXTS[-1])) or (model.longest or 1,)


def grid(model: Model, machine: Machine, like: Step) -> Grid:
    """All that the step says but its batch and its context."""
    batches = tuple(batch * like.parallel.data for batch in BATCHES)
    contexts = contexts_for(model)
    cells = tuple(
        tuple(predict(model, machine, replace(like, batch=batch, context=context)) for batch in batches)
        for context in contexts
    )
    return Grid(machine=machine, mode=like.mode, batches=batches, contexts=contexts, cells=cells)
