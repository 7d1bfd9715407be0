"""Exercises that can be done in CUDA C++, too: `sublight learn start add.cu`."""

from __future__ import annotations

from sublight.learn.exercises.diagnosis.histogram import HISTOGRAM
from sublight.learn.exercises.first.add import ADD
from sublight.learn.exercises.first.blocks import BLOCKS
from sublight.learn.exercises.first.copy import COPY
from sublight.learn.exercises.first.multiply_add import MULTIPLY_ADD
from sublight.learn.exercises.movement.transpose import TRANSPOSE
from sublight.learn.exercises.products.matmul import MATMUL
from sublight.learn.exercises.rows.rms_norm import RMS_NORM
from sublight.learn.exercises.rows.row_sum import ROW_SUM
from sublight.learn.exercises.rows.softmax import SOFTMAX
from sublight.learn.record import Goal, in_cuda

CUDA_EXERCISES = (
    in_cuda(COPY),
    in_cuda(ADD),
    in_cuda(MULTIPLY_ADD),
    in_cuda(BLOCKS),
    in_cuda(ROW_SUM),
    in_cuda(SOFTMAX),
    in_cuda(RMS_NORM),
    in_cuda(TRANSPOSE),
    in_cuda(MATMUL, goal=Goal(shape={"m": 1024, "n": 1024, "k": 512}, fraction=0.3)),
    in_cuda(HISTOGRAM, dtypes=("int32",)),
)
