"""Activations, gated blocks, rotary embeddings, softmax and losses by our kernels."""

from __future__ import annotations

import contextlib

from sublight.fix.cure.patching import LINE, WHERE, patched
from sublight.fix.cure.record import Changes, Cure

NAME = "patch activations"


def install(changes: Changes) -> contextlib.AbstractContextManager[None]:
    return patched(changes, NAME, ("lm_head", "rope", "mlp", "activation", "softmax", "embedding", "loss"))


POINTWISE = Cure(name=NAME, treats=("unfused-pointwise",), line=LINE, where=WHERE, install=install)
