"""Convolutions in traces: where each schema keeps stride, padding and the rest, and the output's shape from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sublight.cost import convolution as costs
from sublight.cost.tensor import Tensor
from sublight.trace.costs.kernels import kernel_family, reduced_flops
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown, op_cost, product_limit
from sublight.trace.record import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The positions of an op's arguments in its schema; None: it has no such argument."""

    stride: int | None
    padding: int | None
    dilation: int | None
    groups: int | None = None
    bias: int | None = None
    plus: int | None = None  # a tensor of the output's shape that is added
    transposed: int | bool = False
    output_padding: int | None = None


def _spread(values: tuple[int, ...] | None, count: int, default: int | None) -> tuple[int, ...]:
    """A value for each spatial dimension; one stands for all."""
    if not values:
        if default is None:
            raise Unknown
        return (default,) * count
    if len(values) not in (1, count):
        raise Unknown
    return values * count if len(values) == 1 else values


def _flops(args: Args, dtype: str, operations: float) -> dict[str, float]:
    """Against the limit of the data type; less where the algorithm that ran is known to need fewer."""
    cuts = [reduced_flops(kernel) for kernel in args.kernels if kernel_family(kernel)[0] in ("conv", "matmul", "fft")]
    if None in cuts:
        return {}
    most = max((cut for cut in cuts if cut is not None), default=1.0)
    return {product_limit(dtype, args.kernels): operations / most}


def forward(places: Places) -> Handler:
    def handler(args: Args) -> OpCost:
        x, weight = args.need(0), args.need(1)
        out = _output_shape(args, x, weight, places)
        transposed = _is_transposed(args, places)
        operations = costs.operations(x.numel if transposed else math.prod(out), weight.shape)
        more = _given(args, places.bias, places.plus)
        y = Tensor(shape=out, dtype=x.dtype)
        cost = costs.forward(x, weight, y, *more, flops=_flops(args, x.dtype, operations))
        return op_cost(args, "conv", cost, dtype=x.dtype, shape=f"{x.text} * {weight.text} -> {y.text}")

    return handler


def _given(args: Args, *places: int | None) -> list[Tensor]:
    tensors = [args.tensor(place) for place in places if place is not None]
    return [tensor for tensor in tensors if tensor is not None]


def _is_transposed(args: Args, places: Places) -> bool:
    if isinstance(places.transposed, bool):
        return places.transposed
    flag = args.flag(places.transposed)
    if flag is None:
        raise Unknown
    return flag


def _output_shape(args: Args, x: Tensor, weight: Tensor, places: Places) -> Shape:
    spatial = len(weight.shape) - 2
    if spatial < 1 or len(x.shape) not in (spatial + 1, spatial + 2):
        raise Unknown
    if not any(args.detail.concrete) and not places.transposed:
        return _recorded_output(args, x, weight)
    sizes, taps = x.shape[-spatial:], weight.shape[2:]
    stride = _spread(args.integers(places.stride) if places.stride is not None else (), spatial, None)
    dilation = _spread(args.integers(places.dilation) if places.dilation is not None else (1,), spatial, None)
    padding = _spread(args.integers(places.padding) if places.padding is not None else (0,), spatial, None)
    lead = x.shape[:-spatial][:-1]
    if _is_transposed(args, places):
        extra = args.integers(places.output_padding) if places.output_padding is not None else ()
        more = _spread(extra, spatial, 0)
        groups = (args.integer(places.groups) if places.groups is not None else 1) or 1
        sized = costs.transposed_sizes(sizes, taps, stride, padding, dilation, more)
        channels = weight.shape[1] * groups
    else:
        sized = costs.output_sizes(sizes, taps, stride, padding, dilation)
        channels = weight.shape[0]
    if min(sized) < 0:
        raise Unknown
    return (*lead, channels, *sized)


def _recorded_output(args: Args, x: Tensor, weight: Tensor) -> Shape:
    """Without strides and padding: what the gradient's shape tells, if it fits."""
    out = args.detail.out
    channels = len(x.shape) - len(weight.shape) + 1
    if len(out) != len(x.shape) or out[:channels] != x.shape[:channels] or out[channels] != weight.shape[0]:
        raise Unknown
    return out


def backward(dy_at: int, x_at: int, weight_at: int, mask_at: int | None, transposed_at: int | None = None) -> Handler:
    """(dy, x, weight, …, which gradients): those of x and of the weight each take the forward's operations."""

    def handler(args: Args) -> OpCost:
        dy, x, weight = args.need(dy_at), args.need(x_at), args.need(weight_at)
        wanted = args.flags(mask_at) if mask_at is not None else None
        if wanted is None or len(wanted) < 2:
            wanted = (True, True)
        dx, dw, db = wanted[0], wanted[1], len(wanted) > 2 and wanted[2]
        transposed = transposed_at is not None and args.flag(transposed_at) is True
        operations = costs.operations(x.numel if transposed else dy.numel, weight.shape) * (dx + dw)
        bias = Tensor(shape=dy.shape[1:2] or (0,), dtype=x.dtype) if db else None
        cost = costs.backward(dy, x, weight, dx=dx, dw=dw, bias=bias, flops=_flops(args, x.dtype, operations))
        shape = f"{x.text} * {weight.text} -> {dy.text} backward"
        return op_cost(args, "conv", cost, dtype=x.dtype, shape=shape)

    return handler


def backward_input(args: Args) -> OpCost:
    """(the input's size, dy, weight): traces of 2021 do not say the size, so the input's gradient is not counted."""
    dy, weight = args.need(1), args.need(2)
    dx = Tensor(shape=tuple(args.integers(0) or (0,)), dtype=dy.dtype)
    flops = _flops(args, dy.dtype, costs.operations(dy.numel, weight.shape))
    cost = costs.backward(dy, dx, weight, dx=True, dw=False, bias=None, flops=flops)
    return op_cost(args, "conv", cost, dtype=dy.dtype, shape=f"{dy.text} * {weight.text} input gradient")


def backward_weight(args: Args) -> OpCost:
    """(the weight's size, dy, x): without the size the number of taps is not known."""
    size = args.integers(0)
    dy, x = args.need(1), args.need(2)
    if not size:
        raise Unknown
    dw = Tensor(shape=size, dtype=dy.dtype)
    flops = _flops(args, dy.dtype, costs.operations(dy.numel, size))
    cost = costs.backward(dy, x, dw, dx=False, dw=True, bias=None, flops=flops)
    return op_cost(args, "conv", cost, dtype=dy.dtype, shape=f"{x.text} -> {dy.text} weight gradient")


_FUNCTIONAL = Places(bias=2, stride=3, padding=4, dilation=5, groups=6)
_TRANSPOSE = Places(bias=2, stride=3, padding=4, output_padding=5, groups=6, dilation=7, transposed=True)
_GENERAL = Places(bias=2, stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8)
_PADDING_FIRST = Places(bias=2, padding=3, stride=4, dilation=5, groups=6)
_KERNEL_SIZE = Places(bias=3, stride=4, padding=5, dilation=6)  # self, weight, kernel_size, …
_NO_DILATION = Places(bias=3, stride=4, padding=5, dilation=None)

OPS: dict[str, Handler] = {
    **{f"aten::conv{n}d": forward(_FUNCTIONAL) for n in (1, 2, 3)},
    **{f"aten::conv_transpose{n}d": forward(_TRANSPOSE) for n in (1, 2, 3)},
    "aten::convolution": forward(_GENERAL),
    "aten::_convolution": forward(_GENERAL),
    "aten::convolution_overrideable": forward(_GENERAL),
    "aten::cudnn_convolution": forward(Places(padding=2, stride=3, dilation=4, groups=5)),
    "aten::cudnn_convolution_transpose": forward(
        Places(padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True)
    ),
    "aten::cudnn_convolution_relu": forward(_FUNCTIONAL),
    "aten::miopen_convolution_relu": forward(_FUNCTIONAL),
    "aten::cudnn_convolution_add_relu": forward(Places(plus=2, bias=4, stride=5, padding=6, dilation=7, groups=8)),
    "aten::miopen_convolution_add_relu": forward(Places(plus=2, bias=4, stride=5, padding=6, dilation=7, groups=8)),
    "aten::mkldnn_convolution": forward(_PADDING_FIRST),
    "aten::miopen_convolution": forward(_PADDING_FIRST),
    "aten::miopen_depthwise_convolution": forward(_PADDING_FIRST),
    "aten::miopen_convolution_transpose": forward(
        Places(bias=2, padding=3, output_padding=4, stride=5, dilation=6, groups=7, transposed=True)
    ),
    "mkldnn::_convolution_pointwise": forward(_PADDING_FIRST),
    "aten::_conv_depthwise2d": forward(_KERNEL_SIZE),
    "aten::conv_depthwise3d": forward(_KERNEL_SIZE),
    "aten::slow_conv_dilated2d": forward(_KERNEL_SIZE),
    "aten::slow_conv_dilated3d": forward(_KERNEL_SIZE),
    **{
        f"aten::{name}": forward(_NO_DILATION)
        for name in ("thnn_conv2d", "_slow_conv2d_forward", "slow_conv3d", "slow_conv3d_forward")
    },
    "aten::convolution_backward": backward(0, 1, 2, mask_at=10, transposed_at=7),
    "aten::convolution_backward_overrideable": backward(0, 1, 2, mask_at=9, transposed_at=6),
    "aten::cudnn_convolution_backward": backward(1, 0, 2, mask_at=9),
    "aten::miopen_convolution_backward": backward(1, 0, 2, mask_at=9),
    "aten::mkldnn_convolution_backward": backward(1, 0, 2, mask_at=7),
    "aten::_slow_conv2d_backward": backward(0, 1, 2, mask_at=6),
    "aten::thnn_conv2d_backward": backward(0, 1, 2, mask_at=None),
    "aten::cudnn_convolution_backward_input": backward_input,
    "aten::cudnn_convolution_backward_weight": backward_weight,
}
