"""Rings of places in shared memory that a copying warp fills and others empty."""

from __future__ import annotations

from sublight.backend.jit import gl, gluon


@gluon.jit
def slot_of(turn, STAGES: gl.constexpr):
    """Where the block of a turn lies, and the phase of that place's barriers."""
    return turn % STAGES, turn // STAGES & 1
