"""Reductions, pools and losses in traces; where no dimensions were recorded, one element comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sublight.cost import loss, reduce
from sublight.cost.dtypes import is_floating
from sublight.cost.tensor import Tensor, dense
from sublight.trace.costs.pointwise import elementwise
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown, aten, op_cost, shape_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The position of the dimensions in an op's schema, and what comes out of each reduced row."""

    dims: int = 1
    dtype: int | None = None  # place of a data type asked for
    result: str | None = None  # its data type where that is fixed
    results: int = 1  # var_mean gives two
    indices: bool = False  # max over a dimension gives values and places
    each: int = 1  # operations an element


def reduction(plan: Reduction) -> Handler:
    def handler(args: Args) -> OpCost:
        x = args.need(0)
        kept = _kept(args, x, plan.dims)
        dtype = plan.result or (args.dtype(plan.dtype) if plan.dtype is not None else None) or x.dtype
        if args.name in ("sum", "prod") and not is_floating(dtype) and not dtype.endswith("byte"):
            dtype = "int64"
        results = [dense(dtype, kept)] * plan.results
        if plan.indices and args.integer(plan.dims) is not None:
            results.append(dense("int64", kept))
        return op_cost(args, "reduction", reduce.reduction(x, results, each=plan.each), dtype=x.dtype, shape=x.text)

    return handler


def _kept(args: Args, x: Tensor, place: int) -> int:
    """Elements of the result."""
    dims = args.integers(place)
    if dims is None:
        dim = args.integer(place)
        dims = () if dim is None else (dim,)
    if not dims:
        return 1  # all of it, or not recorded
    reduced = {dim % len(x.shape) for dim in dims if x.shape and -len(x.shape) <= dim < len(x.shape)}
    return math.prod(size for at, size in enumerate(x.shape) if at not in reduced)


def extremum(args: Args) -> OpCost:
    """max and min: of two tensors elementwise, over a dimension with places, or of everything."""
    if args.tensor(1) is not None:
        return elementwise(2)(args)
    return reduction(Reduction(indices=True))(args)


def scan(args: Args) -> OpCost:
    x = args.need(0)
    results = [Tensor(shape=x.shape, dtype=args.dtype(2) or x.dtype)]
    if args.name in ("cummax", "cummin"):
        results.append(Tensor(shape=x.shape, dtype="int64"))
    return op_cost(args, "reduction", reduce.scan(x, *results), dtype=x.dtype, shape=x.text)


def pool(spatial: int, *, dilated: bool, with_indices: bool) -> Handler:
    """(x, window, stride, padding[, dilation], ceil_mode)"""

    def handler(args: Args) -> OpCost:
        x = args.need(0)
        window, stride = _each(args, 1, spatial, None), _each(args, 2, spatial, None, empty=args.integers(1))
        padding = _each(args, 3, spatial, 0)
        dilation = _each(args, 4, spatial, 1) if dilated else (1,) * spatial
        ceil = args.flag(5 if dilated else 4) is True
        if len(x.shape) < spatial + 1 or min(stride) < 1:
            raise Unknown
        every = zip(x.shape[-spatial:], window, stride, padding, dilation, strict=True)
        out = tuple(reduce.pool_size(size, k, s, p, d, ceil=ceil) for size, k, s, p, d in every)
        if min(out) < 0:
            raise Unknown
        whole = (*x.shape[:-spatial], *out)
        cost = reduce.pool(x, whole, math.prod(window), indices=with_indices)
        return op_cost(args, "reduction", cost, dtype=x.dtype, shape=f"{x.text} -> {shape_text(whole)}")

    return handler


def _each(
    args: Args, place: int, count: int, default: int | None, *, empty: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    values = args.integers(place)
    if values is not None and not values and empty:
        values = empty  # no stride: the window's size
    if not values:
        if default is None:
            raise Unknown
        values = (default,)
    if len(values) not in (1, count):
        raise Unknown
    return values * count if len(values) == 1 else values


def pool_backward(indices: int | None) -> Handler:
    """(dy, x, …): dx is written whole; max pooling reads where each maximum was."""

    def handler(args: Args) -> OpCost:
        dy, x = args.need(0), args.need(1)
        places = [args.need(indices)] if indices is not None else []
        return op_cost(args, "reduction", reduce.pool_backward(dy, x, *places), dtype=x.dtype, shape=x.text)

    return handler


def adaptive_pool(args: Args) -> OpCost:
    x, size = args.need(0), args.integers(1)
    if not size or len(size) >= len(x.shape) + 1:
        raise Unknown
    y = Tensor(shape=(*x.shape[: -len(size)], *size), dtype=x.dtype)
    places = [Tensor(shape=y.shape, dtype="int64")] if "max" in args.name else []
    cost = reduce.reduction(x, [y, *places])
    return op_cost(args, "reduction", cost, dtype=x.dtype, shape=f"{x.text} -> {y.text}")


def upsample(args: Args) -> OpCost:
    """(x, output size, …), or the scale factors in a list instead."""
    x, size = args.need(0), args.integers(1)
    if not size:
        lists = [args.numbers(place) for place in range(2, len(args))]
        scale = next((numbers for numbers in lists if numbers), None)
        if scale is None or len(scale) >= len(x.shape):
            raise Unknown
        size = tuple(int(n * s) for n, s in zip(x.shape[-len(scale) :], scale, strict=True))
    if len(size) >= len(x.shape):
        raise Unknown
    shape = (*x.shape[: -len(size)], *size)
    text = f"{x.text} -> {shape_text(shape)}"
    return op_cost(args, "pointwise", reduce.resized(x, shape), dtype=x.dtype, shape=text)


def upsample_backward(args: Args) -> OpCost:
    """(dy, output size, input size, …)"""
    dy, size = args.need(0), args.integers(2)
    if not size:
        raise Unknown
    cost = reduce.resized_backward(dy, size)
    return op_cost(args, "pointwise", cost, dtype=dy.dtype, shape=shape_text(size))


def cross_entropy(args: Args) -> OpCost:
    """(logits, target, weight, reduction)"""
    x, target = args.need(0), args.need(1)
    rows = x.numel // x.shape[1] if len(x.shape) > 1 and x.shape[1] else 1
    result = dense(x.dtype, rows if args.integer(3) == 0 else 1)
    return op_cost(args, "loss", loss.cross_entropy_forward(x, target, result), dtype=x.dtype, shape=x.text)


def nll_loss(args: Args) -> OpCost:
    """(log-probabilities, target): one element of each row."""
    x, target = args.need(0), args.need(1)
    picked = dense(x.dtype, target.numel)
    result = dense(x.dtype, target.numel if args.integer(3) == 0 else 1)
    return op_cost(args, "loss", loss.nll_forward(picked, target, result), dtype=x.dtype, shape=x.text)


def nll_loss_backward(args: Args) -> OpCost:
    """(dy, log-probabilities, target)"""
    x, target = args.need(1), args.need(2)
    return op_cost(args, "loss", loss.nll_backward(target, x), dtype=x.dtype, shape=x.text)


def pair_loss(args: Args) -> OpCost:
    """(x, target, …, reduction): 0 keeps every element."""
    x, target = args.need(0), args.need(1)
    place = {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}.get(args.name, 2)
    result = dense(x.dtype, x.numel if args.integer(place) == 0 else 1)
    return op_cost(args, "loss", loss.pair_forward(x, target, result), dtype=x.dtype, shape=x.text)


def pair_loss_backward(args: Args) -> OpCost:
    dy, x, target = args.need(0), args.need(1), args.need(2)
    return op_cost(args, "loss", loss.pair_backward(dy, x, target), dtype=x.dtype, shape=x.text)


_PAIR_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)

OPS: dict[str, Handler] = {
    "aten::sum": reduction(Reduction(dtype=3)),
    "aten::nansum": reduction(Reduction(dtype=3)),
    "aten::mean": reduction(Reduction(dtype=3)),
    **aten("amax amin prod logsumexp median", reduction(Reduction())),
    **aten("var std", reduction(Reduction(each=3))),
    **aten("var_mean std_mean aminmax", reduction(Reduction(each=3, results=2))),
    **aten("norm linalg_vector_norm", reduction(Reduction(dims=2, each=2))),
    **aten("argmax argmin count_nonzero", reduction(Reduction(result="int64"))),
    **aten("any all", reduction(Reduction(result="bool"))),
    **aten("max min", extremum),
    **aten("cumsum cumprod cummax cummin logcumsumexp", scan),
    **{f"aten::max_pool{n}d": pool(n, dilated=True, with_indices=False) for n in (1, 2, 3)},
    **{f"aten::max_pool{n}d_with_indices": pool(n, dilated=True, with_indices=True) for n in (1, 2, 3)},
    **{f"aten::avg_pool{n}d": pool(n, dilated=False, with_indices=False) for n in (1, 2, 3)},
    **{f"aten::mkldnn_max_pool{n}d": pool(n, dilated=True, with_indices=False) for n in (2, 3)},
    **{f"aten::max_pool{n}d_with_indices_backward": pool_backward(indices=7) for n in (2, 3)},
    **{f"aten::avg_pool{n}d_backward": pool_backward(indices=None) for n in (2, 3)},
    **{f"aten::{under}adaptive_avg_pool{n}d": adaptive_pool for n in (1, 2, 3) for under in ("", "_")},
    **{f"aten::_adaptive_avg_pool{n}d_backward": pool_backward(indices=None) for n in (2, 3)},
    **{f"aten::adaptive_max_pool{n}d": adaptive_pool for n in (1, 2, 3)},
    **{f"aten::{under}{n}d": upsample for n in (1, 2, 3) for under in ("upsample_nearest", "_upsample_nearest_exact")},
    **aten("upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d", upsample),
    **{f"aten::upsample_nearest{n}d_backward": upsample_backward for n in (1, 2, 3)},
    **aten("upsample_bilinear2d_backward upsample_bicubic2d_backward", upsample_backward),
    "aten::cross_entropy_loss": cross_entropy,
    **aten("nll_loss nll_loss_nd nll_loss_forward", nll_loss),
    **aten("nll_loss2d nll_loss2d_forward", nll_loss),
    **aten("nll_loss_backward nll_loss2d_backward", nll_loss_backward),
    **{f"aten::{name}": pair_loss for name in _PAIR_LOSSES},
    **{f"aten::{name}_backward": pair_loss_backward for name in _PAIR_LOSSES},
}
