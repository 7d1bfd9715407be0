"""Norms by our kernels, the sum before them included."""

from __future__ import annotations

import contextlib

from sublight.fix.cure.patching import LINE, WHERE, patched
from sublight.fix.cure.record import Changes, Cure

NAME = "patch norms"


def install(changes: Changes) -> contextlib.AbstractContextManager[None]:
    return patched(changes, NAME, ("norm", "residual_norm"))


NORMS = Cure(name=NAME, treats=("unfused-norm",), line=LINE, where=WHERE, install=install)
