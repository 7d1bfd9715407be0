"""The ops, one a file; adding one is a file and a line here."""

from sublight.errors import BadInput, nearest
from sublight.op import Op
from sublight.ops.adamw.adamw import ADAMW, ADAMW_CLIPPED
from sublight.ops.attention.attention import ATTENTION
from sublight.ops.attention.cascade import CASCADE
from sublight.ops.attention.kv_copy import KV_COPY
from sublight.ops.attention.kv_gather import KV_GATHER
from sublight.ops.attention.kv_write import KV_WRITE
from sublight.ops.attention.mla_decode import MLA_DECODE
from sublight.ops.attention.packed_attention import PACKED_ATTENTION
from sublight.ops.attention.paged_attention import PAGED_ATTENTION
from sublight.ops.attention.paged_prefill import PAGED_PREFILL
from sublight.ops.attention.rope_kv_write import ROPE_KV_WRITE
from sublight.ops.cross_entropy.cross_entropy import CROSS_ENTROPY
from sublight.ops.cross_entropy.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from sublight.ops.gated.gated import GEGLU, SWIGLU
from sublight.ops.matmul.grouped_matmul import GROUPED_MATMUL
from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL
from sublight.ops.matmul.matmul import MATMUL
from sublight.ops.matmul.row_linear import ROW_LINEAR
from sublight.ops.matmul.scaled_matmul import SCALED_MATMUL
from sublight.ops.moe.moe_experts import MOE_EXPERTS
from sublight.ops.movement.compact import COMPACT
from sublight.ops.movement.embedding import EMBEDDING
from sublight.ops.movement.permute import PERMUTE, TRANSPOSE
from sublight.ops.norm.add_layer_norm import ADD_LAYER_NORM
from sublight.ops.norm.add_rms_norm import ADD_RMS_NORM
from sublight.ops.norm.layer_norm import LAYER_NORM
from sublight.ops.norm.rms_norm import RMS_NORM
from sublight.ops.norm.rms_norm_linear import RMS_NORM_LINEAR
from sublight.ops.pointwise.activation import GELU, GELU_TANH, RELU2
from sublight.ops.pointwise.add import ADD
from sublight.ops.pointwise.bias_dropout_residual import BIAS_DROPOUT_RESIDUAL
from sublight.ops.pointwise.bias_gelu import BIAS_GELU
from sublight.ops.quantize.quantize import QUANTIZE_FP8, QUANTIZE_FP8_BLOCKS, QUANTIZE_INT8, QUANTIZE_INT8_BLOCKS
from sublight.ops.quantize.rms_norm_quantize import RMS_NORM_FP8, RMS_NORM_INT8
from sublight.ops.reduce.cumsum import CUMSUM
from sublight.ops.reduce.reduce import REDUCE_ARGMAX, REDUCE_MAX, REDUCE_SUM
from sublight.ops.rotary.qk_norm_rope import QK_NORM_ROPE
from sublight.ops.rotary.rope import ROPE, ROPE_IN_PLACE
from sublight.ops.softmax.log_softmax import LOG_SOFTMAX
from sublight.ops.softmax.online_softmax import ONLINE_SOFTMAX
from sublight.ops.softmax.sample import SAMPLE
from sublight.ops.softmax.softmax import SOFTMAX
from sublight.ops.softmax.softmax_topk import SOFTMAX_TOPK
from sublight.ops.sparse.sparsify_24 import SPARSIFY_24

OPS = (
    ADD,
    MATMUL,
    SCALED_MATMUL,
    LOW_BIT_MATMUL,
    GROUPED_MATMUL,
    MOE_EXPERTS,
    SPARSIFY_24,
    SOFTMAX,
    LOG_SOFTMAX,
    ONLINE_SOFTMAX,
    SOFTMAX_TOPK,
    SAMPLE,
    LAYER_NORM,
    RMS_NORM,
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    RMS_NORM_LINEAR,
    ROW_LINEAR,
    EMBEDDING,
    ADAMW,
    ADAMW_CLIPPED,
    ROPE,
    ROPE_IN_PLACE,
    QK_NORM_ROPE,
    REDUCE_SUM,
    REDUCE_MAX,
    REDUCE_ARGMAX,
    PERMUTE,
    TRANSPOSE,
    CUMSUM,
    COMPACT,
    SWIGLU,
    GEGLU,
    GELU,
    GELU_TANH,
    RELU2,
    BIAS_GELU,
    BIAS_DROPOUT_RESIDUAL,
    QUANTIZE_INT8,
    QUANTIZE_FP8,
    QUANTIZE_INT8_BLOCKS,
    QUANTIZE_FP8_BLOCKS,
    RMS_NORM_INT8,
    RMS_NORM_FP8,
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    ATTENTION,
    PACKED_ATTENTION,
    PAGED_ATTENTION,
    PAGED_PREFILL,
    KV_WRITE,
    ROPE_KV_WRITE,
    KV_COPY,
    KV_GATHER,
    MLA_DECODE,
    CASCADE,
)


def find(name: str) -> Op:
    """The op of that name; a near miss is answered with the names that come close."""
    for op in OPS:
        if op.name == name:
            return op
    raise BadInput(f"unknown op {name!r}: did you mean {nearest(name, [op.name for op in OPS])}?")
