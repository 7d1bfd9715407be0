"""Every exercise, in the order of the path; a folder each."""

from __future__ import annotations

from sublight.errors import BadInput, nearest
from sublight.learn.exercises.attention.attention_by_hand import ATTENTION_BY_HAND
from sublight.learn.exercises.attention.flash_attention import FLASH_ATTENTION
from sublight.learn.exercises.attention.flash_backward import FLASH_BACKWARD
from sublight.learn.exercises.attention.naive_attention import NAIVE_ATTENTION
from sublight.learn.exercises.attention.online_attention import ONLINE_ATTENTION
from sublight.learn.exercises.attention.paged_decode import PAGED_DECODE
from sublight.learn.exercises.cuda import CUDA_EXERCISES as CUDA_EXERCISES
from sublight.learn.exercises.diagnosis.histogram import HISTOGRAM
from sublight.learn.exercises.diagnosis.read_xray import READ_XRAY
from sublight.learn.exercises.diagnosis.slow_columns import SLOW_COLUMNS
from sublight.learn.exercises.diagnosis.slow_double import SLOW_DOUBLE
from sublight.learn.exercises.diagnosis.slow_few import SLOW_FEW
from sublight.learn.exercises.diagnosis.slow_passes import SLOW_PASSES
from sublight.learn.exercises.diagnosis.slow_reread import SLOW_REREAD
from sublight.learn.exercises.diagnosis.slow_spills import SLOW_SPILLS
from sublight.learn.exercises.first.add import ADD
from sublight.learn.exercises.first.add_2d import ADD_2D
from sublight.learn.exercises.first.blocks import BLOCKS
from sublight.learn.exercises.first.copy import COPY
from sublight.learn.exercises.first.multiply_add import MULTIPLY_ADD
from sublight.learn.exercises.first.strides import STRIDES
from sublight.learn.exercises.movement.compact import COMPACT
from sublight.learn.exercises.movement.embedding_backward import EMBEDDING_BACKWARD
from sublight.learn.exercises.movement.permute_rows import PERMUTE_ROWS
from sublight.learn.exercises.movement.rope import ROPE
from sublight.learn.exercises.movement.transpose import TRANSPOSE
from sublight.learn.exercises.products.dequantize import DEQUANTIZE
from sublight.learn.exercises.products.gemv import GEMV
from sublight.learn.exercises.products.matmul import MATMUL
from sublight.learn.exercises.products.sparse_24 import SPARSE_24
from sublight.learn.exercises.products.split_k import SPLIT_K
from sublight.learn.exercises.products.swizzle import SWIZZLE
from sublight.learn.exercises.rows.cross_entropy import CROSS_ENTROPY
from sublight.learn.exercises.rows.layer_norm import LAYER_NORM
from sublight.learn.exercises.rows.layer_norm_backward import LAYER_NORM_BACKWARD
from sublight.learn.exercises.rows.layer_norm_by_hand import LAYER_NORM_BY_HAND
from sublight.learn.exercises.rows.online_by_hand import ONLINE_BY_HAND
from sublight.learn.exercises.rows.online_softmax import ONLINE_SOFTMAX
from sublight.learn.exercises.rows.rms_norm import RMS_NORM
from sublight.learn.exercises.rows.row_sum import ROW_SUM
from sublight.learn.exercises.rows.softmax import SOFTMAX
from sublight.learn.exercises.rows.softmax_topk import SOFTMAX_TOPK
from sublight.learn.record import Exercise

CHAPTERS = {
    "first": "First kernels",
    "rows": "Rows",
    "movement": "Movement",
    "products": "Products",
    "attention": "Attention",
    "diagnosis": "Diagnosis",
}
EXERCISES = (
    COPY, ADD, STRIDES, ADD_2D, MULTIPLY_ADD, BLOCKS,
    ROW_SUM, SOFTMAX, ONLINE_BY_HAND, ONLINE_SOFTMAX, LAYER_NORM, LAYER_NORM_BY_HAND, LAYER_NORM_BACKWARD, RMS_NORM,
    CROSS_ENTROPY, SOFTMAX_TOPK,
    TRANSPOSE, PERMUTE_ROWS, ROPE, COMPACT, EMBEDDING_BACKWARD,
    MATMUL, SWIZZLE, SPLIT_K, GEMV, DEQUANTIZE, SPARSE_24,
    NAIVE_ATTENTION, ONLINE_ATTENTION, ATTENTION_BY_HAND, FLASH_ATTENTION, FLASH_BACKWARD, PAGED_DECODE,
    SLOW_PASSES, SLOW_FEW, SLOW_COLUMNS, READ_XRAY, SLOW_DOUBLE, SLOW_SPILLS, SLOW_REREAD, HISTOGRAM,
)  # fmt: skip


def find(name: str) -> Exercise:
    """The exercise of that name; a near miss is answered with the names that come close."""
    for exercise in (*EXERCISES, *CUDA_EXERCISES):
        if exercise.name == name:
            return exercise
    known = [exercise.name for exercise in (*EXERCISES, *CUDA_EXERCISES)]
    raise BadInput(f"unknown exercise {name!r}: did you mean {nearest(name, known)}? `sublight learn` shows all")
