"""Elementwise ops in traces: which arguments are tensors, and what shape and data type come out."""

from __future__ import annotations

from sublight.cost import Cost, pointwise
from sublight.cost.dtypes import is_floating
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown, aten, broadcast, op_cost, promoted

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


def elementwise(arity: int, *, result: str | None = None, each: int = 1) -> Handler:
    """`result` is the data type that comes out; float32 only where integers went in. At least `each` operations."""

    def handler(args: Args) -> OpCost:
        operands = [args.tensor(place) for place in range(arity)]
        tensors = [tensor for tensor in operands if tensor is not None]
        if not tensors:
            raise Unknown
        return _cost(args, tensors, result, each)

    return handler


def _cost(args: Args, tensors: list[Tensor], result: str | None, each: int) -> OpCost:
    dtype = promoted(tensors)
    if args.inplace:
        shape, out_dtype = tensors[0].shape, tensors[0].dtype
    else:
        shape, out_dtype = broadcast(tensor.shape for tensor in tensors), result or dtype
        if result == "float32" and (is_floating(dtype) or dtype.endswith("byte")):
            out_dtype = dtype
    return _elementwise(args, _from_memory(tensors), Tensor(shape=shape, dtype=out_dtype), dtype, each=each)


def _elementwise(args: Args, reads: list[Tensor], out: Tensor, dtype: str, *, each: int = 1, shape: str = "") -> OpCost:
    cost = pointwise.elementwise(reads, out, each=each, dtype=dtype)
    return op_cost(args, "pointwise", cost, dtype=dtype, shape=shape or reads)


def _from_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Without the numbers: PyTorch wraps them in tensors of no dimensions, which travel with the launch."""
    return [tensor for tensor in tensors if tensor.shape] or tensors


def where(args: Args) -> OpCost:
    """(condition, a, b): the result has the type of a and b."""
    condition = args.need(0)
    values = [tensor for tensor in (args.tensor(1), args.tensor(2)) if tensor is not None]
    if not values:
        raise Unknown
    dtype = promoted(values)
    out = Tensor(shape=broadcast(tensor.shape for tensor in (condition, *values)), dtype=dtype)
    return _elementwise(args, _from_memory([condition, *values]), out, dtype)


def masked_fill(args: Args) -> OpCost:
    """(x, mask, value): in place, x is written and need not be read; memory takes no smaller writes."""
    x, mask = args.need(0), args.need(1)
    shape = x.shape if args.inplace else broadcast((x.shape, mask.shape))
    reads = [mask] if args.inplace else [x, mask]
    out = Tensor(shape=shape, dtype=x.dtype)
    return _elementwise(args, reads, out, x.dtype, shape=f"{x.text}, {mask.text}")


def dropout(args: Args) -> OpCost:
    """Keeps a mask where it is asked for: native_dropout and fused_dropout return it."""
    x = args.need(0)
    trains = args.flag(2)
    keeps_mask = args.name in ("native_dropout", "_fused_dropout") and trains is not False
    cost = pointwise.dropout(x, keeps_mask=keeps_mask)
    if args.name in ("dropout", "feature_dropout", "alpha_dropout") and trains is False:
        cost = Cost(read_bytes=0, write_bytes=0)  # the identity
    return op_cost(args, "dropout", cost, dtype=x.dtype, shape=x.text)


def dropout_backward(args: Args) -> OpCost:
    grad, mask = args.need(0), args.need(1)
    cost = pointwise.dropout_backward(grad, mask)
    return op_cost(args, "dropout", cost, dtype=grad.dtype, shape=[grad, mask])


def fill(family: str) -> Handler:
    """Constants, or random numbers, into a tensor: written, never read."""

    def handler(args: Args) -> OpCost:
        x = args.need(0)
        return op_cost(args, family, pointwise.fill(x), dtype=x.dtype, shape=x.text)

    return handler


def like(args: Args) -> OpCost:
    """A new tensor of another's shape; its data type may be asked for."""
    x = args.need(0)
    dtype = args.dtype(1 if args.name in _LIKE_DTYPE_FIRST else 2) or x.dtype
    family = "memset" if args.name in ("zeros_like", "ones_like", "full_like") else "pointwise"
    return op_cost(args, family, pointwise.fill(Tensor(shape=x.shape, dtype=dtype)), dtype=dtype, shape=x.text)


_LIKE_DTYPE_FIRST = ("zeros_like", "ones_like", "rand_like", "randn_like")


def create(args: Args) -> OpCost:
    """A new tensor of a given size: (size, …, dtype, layout, device)."""
    place = {"randint": 1}.get(args.name, 0)
    size = args.integers(place)
    if size is None and args.name == "randint":
        place, size = 2, args.integers(2)
    if size is None:
        raise Unknown
    after = place + (2 if args.name == "full" else 1)
    dtype = args.dtype(after) or ("int64" if args.name == "randint" else "float32")
    family = "memset" if args.name in ("zeros", "ones", "full") else "pointwise"
    new = Tensor(shape=tuple(size), dtype=dtype)
    return op_cost(args, family, pointwise.fill(new), dtype=dtype, shape=new.text)


OPS: dict[str, Handler] = {
    **aten(UNARY, elementwise(1)),
    **aten(UNARY_FLOAT, elementwise(1, result="float32")),
    **aten(UNARY_BOOL, elementwise(1, result="bool")),
    **aten(BINARY, elementwise(2)),
    **aten(BINARY_FLOAT, elementwise(2, result="float32")),
    **aten(BINARY_BOOL, elementwise(2, result="bool")),
    **aten(TERNARY, elementwise(3, each=2)),
    "aten::where": where,
    "aten::masked_fill": masked_fill,
    **aten("dropout native_dropout _fused_dropout feature_dropout", dropout),
    "aten::native_dropout_backward": dropout_backward,
    "aten::_masked_scale": dropout_backward,
    **aten("fill zero", fill("memset")),
    **aten("uniform normal exponential random log_normal cauchy", fill("pointwise")),
    **aten("geometric bernoulli", fill("pointwise")),
    **{f"aten::{name}": like for name in (*_LIKE_DTYPE_FIRST, "full_like", "randint_like")},
    **aten("zeros ones full rand randn randint", create),
}
