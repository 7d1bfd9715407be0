"""Every exercise, in the order of the path; a folder each."""

from __future__ import annotations

from sublight.errors import BadInput, nearest
from sublight.learn.exercises.first.add import ADD
from sublight.learn.exercises.first.add_2d import ADD_2D
from sublight.learn.exercises.first.blocks import BLOCKS
from sublight.learn.exercises.first.copy import COPY
from sublight.learn.exercises.first.multiply_add import MULTIPLY_ADD
from sublight.learn.exercises.movement.rope import ROPE
from sublight.learn.exercises.movement.transpose import TRANSPOSE
from sublight.learn.exercises.rows.cross_entropy import CROSS_ENTROPY
from sublight.learn.exercises.rows.layer_norm import LAYER_NORM
from sublight.learn.exercises.rows.online_softmax import ONLINE_SOFTMAX
from sublight.learn.exercises.rows.rms_norm import RMS_NORM
from sublight.learn.exercises.rows.row_sum import ROW_SUM
from sublight.learn.exercises.rows.softmax import SOFTMAX
from sublight.learn.record import Exercise

CHAPTERS = {"first": "First kernels", "rows": "Rows", "movement": "Movement"}
EXERCISES = (
    COPY, ADD, ADD_2D, MULTIPLY_ADD, BLOCKS,
    ROW_SUM, SOFTMAX, ONLINE_SOFTMAX, LAYER_NORM, RMS_NORM, CROSS_ENTROPY,
    TRANSPOSE, ROPE,
)  # fmt: skip


def find(name: str) -> Exercise:
    """The exercise of that name; a near miss is answered with the names that come close."""
    for exercise in EXERCISES:
        if exercise.name == name:
            return exercise
    known = [exercise.name for exercise in EXERCISES]
    raise BadInput(f"unknown exercise {name!r}: did you mean {nearest(name, known)}? `sublight learn` shows all")
