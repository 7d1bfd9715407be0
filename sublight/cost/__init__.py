"""The work that an op cannot do without, by arithmetic alone: FLOPs and bytes; nothing heavy is imported here.

A file a family. Each has its ops twice over: by operands (`norm.forward(x, weight)`), which is where bytes and FLOPs
are written, and by name for a shape (`norm.rms_norm(shape, dtype, direction)`), which only says what the operands are.
Traces use the first, the ops' records and predictions the second; `find` gives it by the op's name.
"""

from collections.abc import Callable

from sublight.cost import (
    attention,
    communication,
    convolution,
    loss,
    matmul,
    moe,
    movement,
    norm,
    optimizer,
    pointwise,
    quantize,
    reduce,
    rotary,
    softmax,
    sparse,
)
from sublight.cost.dtypes import DTYPES, ITEMSIZE, SPELLINGS, matmul_limit, parse_dtype, size_bytes, vector_limit
from sublight.cost.record import DIRECTIONS, NOTHING, Cost, Direction, Shape, parse_shape, shape_text, shapes
from sublight.errors import BadInput, nearest

__all__ = [
    "COSTS", "DIRECTIONS", "DTYPES", "ITEMSIZE", "NOTHING", "SPELLINGS", "Cost", "CostFunction", "Direction", "Shape",
    "find", "matmul_limit", "parse_dtype", "parse_shape", "shape_text", "shapes", "size_bytes", "vector_limit",
]  # fmt: skip

CostFunction = Callable[[Shape, str, Direction], Cost]
COSTS: dict[str, CostFunction] = {
    "add": pointwise.add,
    "gelu": pointwise.activation,
    "gelu_tanh": pointwise.activation,
    "relu2": pointwise.activation,
    "bias_gelu": pointwise.bias_gelu,
    "bias_dropout_residual": pointwise.bias_dropout_residual,
    "swiglu": pointwise.gated_activation,
    "geglu": pointwise.gated_activation,
    "softmax": softmax.softmax,
    "log_softmax": softmax.log_softmax,
    "online_softmax": softmax.online_softmax,
    "softmax_topk": softmax.softmax_topk,
    "sample": softmax.sample,
    "layer_norm": norm.layer_norm,
    "rms_norm": norm.rms_norm,
    "add_layer_norm": norm.add_layer_norm,
    "add_rms_norm": norm.add_rms_norm,
    "rms_norm_int8": quantize.rms_norm_quantize,
    "rms_norm_fp8": quantize.rms_norm_quantize,
    "quantize_int8": quantize.quantize,
    "quantize_fp8": quantize.quantize,
    "quantize_int8_blocks": quantize.quantize_blocks,
    "quantize_fp8_blocks": quantize.quantize_blocks,
    "rope": rotary.rope,
    "rope_": rotary.rope,
    "qk_norm_rope": rotary.qk_norm_rope,
    "embedding": movement.embedding,
    "permute": movement.permute,
    "transpose": movement.permute,
    "compact": movement.compact,
    "reduce_sum": reduce.reduce_sum,
    "reduce_max": reduce.reduce_max,
    "reduce_argmax": reduce.reduce_argmax,
    "cumsum": reduce.cumsum,
    "adamw": optimizer.adamw,
    "adamw_clipped": optimizer.adamw_clipped,
    "cross_entropy": loss.cross_entropy,
    "linear_cross_entropy": loss.linear_cross_entropy,
    "matmul": matmul.matmul,
    "linear": matmul.linear,
    "batched_matmul": matmul.batched_matmul,
    "low_bit_matmul": matmul.low_bit_matmul,
    "scaled_matmul": matmul.scaled_matmul,
    "rms_norm_linear": matmul.rms_norm_linear,
    "row_linear": matmul.row_linear,
    "grouped_matmul": matmul.grouped_matmul,
    "sparsify_24": sparse.sparsify_24,
    "moe_routing": moe.moe_routing,
    "moe_experts": moe.moe_experts,
    "attention": attention.attention,
    "packed_attention": attention.packed_attention,
    "paged_attention": attention.paged_attention,
    "paged_prefill": attention.paged_prefill,
    "kv_write": attention.kv_write,
    "rope_kv_write": attention.rope_kv_write,
    "kv_copy": attention.kv_copy,
    "kv_gather": attention.kv_gather,
    "mla_decode": attention.mla_decode,
    "cascade": attention.cascade,
    "conv2d": convolution.conv2d,
    "all_reduce": communication.all_reduce,
    "all_gather": communication.all_gather,
    "reduce_scatter": communication.reduce_scatter,
    "all_to_all": communication.all_to_all,
}


def find(name: str) -> CostFunction:
    """The cost of the op of this name.

    >>> find("rms_norm")({"rows": 2, "cols": 8}, "bfloat16", "fwd").bytes  # read x and weight, write y
    80
    """
    if name not in COSTS:
        raise BadInput(f"unknown op {name!r}: did you mean {nearest(name, list(COSTS))}?")
    return COSTS[name]
