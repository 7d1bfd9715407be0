"""Elementwise ops: read what comes in once at its own size, write the broadcast result."""

from __future__ import annotations

import math

from sublight.trace.costs.shapes import (
    ITEMSIZE,
    Args,
    Handler,
    OpCost,
    Tensor,
    aten,
    broadcast,
    is_floating,
    promoted,
    simple,
)

# By how many leading arguments may be tensors. What follows them (alpha, out=) is not read.
UNARY = """
    abs neg sign sgn square ceil floor round trunc frac relu relu6 silu mish gelu elu selu celu leaky_relu hardtanh
    hardswish hardsigmoid hardshrink softshrink softplus log_sigmoid log_sigmoid_forward threshold logical_not
    bitwise_not nan_to_num positive tanhshrink softsign
"""
UNARY_FLOAT = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh
    atanh sigmoid logit erf erfc erfinv lgamma digamma rad2deg deg2rad sinc i0
"""  # of integers they give float32
UNARY_BOOL = "isnan isinf isfinite isneginf isposinf signbit"
BINARY = """
    add sub rsub mul floor_divide remainder fmod pow float_power maximum minimum fmax fmin atan2 hypot
    bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __iand__ __ior__ __ixor__ bitwise_left_shift
    bitwise_right_shift __lshift__ __rshift__ logaddexp xlogy copysign prelu _prelu_kernel heaviside dequantize
    sigmoid_backward tanh_backward gelu_backward silu_backward mish_backward threshold_backward elu_backward
    leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward logit_backward
    hardshrink_backward softshrink_backward gcd lcm clamp_min clamp_max subtract multiply
"""
BINARY_FLOAT = "div true_divide divide"
BINARY_BOOL = """
    eq ne lt le gt ge logical_and logical_or logical_xor isclose not_equal less less_equal greater greater_equal
"""
TERNARY = "clamp clip addcmul addcdiv lerp log_sigmoid_backward"


def elementwise(arity: int, *, result: str | None = None, operations: int = 1) -> Handler:
    """`result` is the data type that comes out; float32 only where integers went in."""

    def cost(args: Args) -> OpCost:
        found = [args.tensor(place) for place in range(arity)]
        tensors = [tensor for tensor in found if tensor is not None]
        if not tensors:
            args.need(0)
        return _cost(args, tensors, result, operations)

    return cost


def _cost(args: Args, tensors: list[Tensor], result: str | None, operations: int) -> OpCost:
    dtype = promoted(tensors)
    if args.inplace:
        shape, out_dtype = tensors[0].shape, tensors[0].dtype
    else:
        shape, out_dtype = broadcast(tensor.shape for tensor in tensors), result or dtype
        if result == "float32" and (is_floating(dtype) or dtype.endswith("byte")):
            out_dtype = dtype
    numel = math.prod(shape)
    written = numel * ITEMSIZE[out_dtype]
    reads = _from_memory(tensors)
    return simple(args, "pointwise", reads=reads, write_bytes=written, dtype=dtype, operations=operations * numel)


def _from_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Without the numbers: PyTorch wraps them in tensors of no dimensions, which travel with the launch."""
    return [tensor for tensor in tensors if tensor.shape] or tensors


def where(args: Args) -> OpCost:
    """(condition, a, b): the result has the type of a and b."""
    condition = args.need(0)
    values = [tensor for tensor in (args.tensor(1), args.tensor(2)) if tensor is not None]
    if not values:
        args.need(1)
    numel = math.prod(broadcast(tensor.shape for tensor in (condition, *values)))
    dtype = promoted(values)
    written = numel * ITEMSIZE[dtype]
    return simple(
        args, "pointwise", reads=_from_memory([condition, *values]), write_bytes=written, dtype=dtype, operations=numel
    )


def masked_fill(args: Args) -> OpCost:
    """(x, mask, value): in place, x is written and need not be read; memory takes no smaller writes."""
    x, mask = args.need(0), args.need(1)
    numel = x.numel if args.inplace else math.prod(broadcast((x.shape, mask.shape)))
    reads = [mask] if args.inplace else [x, mask]
    written = numel * x.itemsize
    return simple(
        args,
        "pointwise",
        reads=reads,
        write_bytes=written,
        dtype=x.dtype,
        operations=numel,
        shape=f"{x.text}, {mask.text}",
    )


def dropout(args: Args) -> OpCost:
    """Keeps a mask of one byte an element where it is asked for: native_dropout and fused_dropout return it."""
    x = args.need(0)
    trains = args.flag(2)
    keeps_mask = args.name in ("native_dropout", "_fused_dropout") and trains is not False
    if args.name in ("dropout", "feature_dropout", "alpha_dropout") and trains is False:
        return simple(args, "dropout", reads=[], write_bytes=0, dtype=x.dtype, shape=x.text)  # the identity
    written = x.bytes + (x.numel if keeps_mask else 0)
    return simple(
        args, "dropout", reads=[x], write_bytes=written, dtype=x.dtype, operations=2 * x.numel, output_bytes=written
    )


def dropout_backward(args: Args) -> OpCost:
    grad, mask = args.need(0), args.need(1)
    return simple(
        args, "dropout", reads=[grad, mask], write_bytes=grad.bytes, dtype=grad.dtype, operations=2 * grad.numel
    )


def fill(args: Args) -> OpCost:
    x = args.need(0)
    return simple(args, "memset", reads=[], write_bytes=x.real_bytes, dtype=x.dtype, shape=x.text)


def draw(args: Args) -> OpCost:
    """Random numbers into a tensor: written, never read."""
    x = args.need(0)
    return simple(args, "pointwise", reads=[], write_bytes=x.real_bytes, dtype=x.dtype, shape=x.text)


def like(args: Args) -> OpCost:
    """A new tensor of another's shape; its data type may be asked for."""
    x = args.need(0)
    dtype = args.dtype(1 if args.name in _LIKE_DTYPE_FIRST else 2) or x.dtype
    family = "memset" if args.name in ("zeros_like", "ones_like", "full_like") else "pointwise"
    return simple(args, family, reads=[], write_bytes=x.numel * ITEMSIZE[dtype], dtype=dtype, shape=x.text)


_LIKE_DTYPE_FIRST = ("zeros_like", "ones_like", "rand_like", "randn_like")


def create(args: Args) -> OpCost:
    """A new tensor of a given size: (size, …, dtype, layout, device)."""
    place = {"randint": 1}.get(args.name, 0)
    size = args.integers(place)
    if size is None and args.name == "randint":
        place, size = 2, args.integers(2)
    if size is None:
        args.need(-1)
    after = place + (2 if args.name == "full" else 1)
    dtype = args.dtype(after) or ("int64" if args.name == "randint" else "float32")
    family = "memset" if args.name in ("zeros", "ones", "full") else "pointwise"
    shape = tuple(size or ())
    written = math.prod(shape) * ITEMSIZE[dtype]
    return simple(args, family, reads=[], write_bytes=written, dtype=dtype, shape="x".join(map(str, shape)) or "1")


OPS: dict[str, Handler] = {
    **aten(UNARY, elementwise(1)),
    **aten(UNARY_FLOAT, elementwise(1, result="float32")),
    **aten(UNARY_BOOL, elementwise(1, result="bool")),
    **aten(BINARY, elementwise(2)),
    **aten(BINARY_FLOAT, elementwise(2, result="float32")),
    **aten(BINARY_BOOL, elementwise(2, result="bool")),
    **aten(TERNARY, elementwise(3, operations=2)),
    "aten::where": where,
    "aten::masked_fill": masked_fill,
    **aten("dropout native_dropout _fused_dropout feature_dropout", dropout),
    "aten::native_dropout_backward": dropout_backward,
    "aten::_masked_scale": dropout_backward,
    **aten("fill zero", fill),
    **aten("uniform normal exponential random log_normal cauchy", draw),
    **aten("geometric bernoulli", draw),
    **{f"aten::{name}": like for name in (*_LIKE_DTYPE_FIRST, "full_like", "randint_like")},
    **aten("zeros ones full rand randn randint", create),
}
