"""Norms and softmax in traces: where each schema keeps x, the parameters and the gradients that are asked for."""

from __future__ import annotations

from sublight.cost import norm as norm_costs
from sublight.cost import softmax as costs
from sublight.cost.norm import CENTERED, UNCENTERED
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import Args, Handler, OpCost, aten, op_cost


def _given(args: Args, *places: int) -> list[Tensor]:
    return [tensor for place in places if (tensor := args.tensor(place)) is not None]


def norm(*parameters: int, kind: tuple[int, int]) -> Handler:
    """y from x (argument 0) and the parameters at these places."""

    def handler(args: Args) -> OpCost:
        x = args.need(0)
        cost = norm_costs.forward(x, *_given(args, *parameters), kind=kind)
        return op_cost(args, "norm", cost, dtype=x.dtype, shape=x.text)

    return handler


def norm_backward(*parameters: int, mask: int | None, kind: tuple[int, int], x: int = 1) -> Handler:
    """dx from dy (argument 0) and x, and a gradient for each parameter that the mask asks for."""

    def handler(args: Args) -> OpCost:
        dy, inputs = args.need(1 - x), args.need(x)
        given = _given(args, *parameters)
        wanted = (args.flags(mask) if mask is not None else None) or (True,) * (1 + len(given))
        gradients = [tensor for tensor, is_wanted in zip(given, wanted[1:], strict=False) if is_wanted]
        weight = given[:1]  # the bias is not needed
        cost = norm_costs.backward(dy, inputs, *weight, gradients=gradients, kind=kind, dx=bool(wanted[0]))
        return op_cost(args, "norm", cost, dtype=inputs.dtype, shape=inputs.text)

    return handler


def softmax(kind: tuple[int, int]) -> Handler:
    """A data type may be asked for."""

    def handler(args: Args) -> OpCost:
        x = args.need(0)
        dtype = args.dtype(2) if args.flag(2) is None else None
        if args.flag(2) and x.dtype == "float16":
            dtype = "float32"  # half_to_float
        y = Tensor(shape=x.shape, dtype=dtype or x.dtype)
        return op_cost(args, "softmax", costs.forward(x, y, kind), dtype=x.dtype, shape=x.text)

    return handler


def softmax_backward(kind: tuple[int, int]) -> Handler:
    """(dy, y, dim, the input's data type)"""

    def handler(args: Args) -> OpCost:
        dy, y = args.need(0), args.need(1)
        dx = Tensor(shape=y.shape, dtype=args.dtype(3) or y.dtype)
        return op_cost(args, "softmax", costs.backward(dy, y, dx, kind), dtype=y.dtype, shape=y.text)

    return handler


_BATCH_NORM = norm(1, 2, kind=CENTERED)

OPS: dict[str, Handler] = {
    "aten::layer_norm": norm(2, 3, kind=CENTERED),
    "aten::native_layer_norm": norm(2, 3, kind=CENTERED),
    "aten::native_layer_norm_backward": norm_backward(5, 6, mask=7, kind=CENTERED),
    "aten::rms_norm": norm(2, kind=UNCENTERED),
    "aten::_fused_rms_norm": norm(2, kind=UNCENTERED),
    "aten::_fused_rms_norm_backward": norm_backward(4, mask=5, kind=UNCENTERED),
    **{
        f"aten::{name}": _BATCH_NORM
        for name in (
            *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"),
            *("_native_batch_norm_legit", "_batch_norm_with_update", "_native_batch_norm_legit_no_training"),
            *("_native_batch_norm_legit_functional", "instance_norm"),
        )
    },
    "aten::native_batch_norm_backward": norm_backward(2, mask=9, kind=CENTERED),
    "aten::cudnn_batch_norm_backward": norm_backward(2, mask=None, kind=CENTERED, x=0),
    "aten::miopen_batch_norm_backward": norm_backward(2, mask=None, kind=CENTERED, x=0),
    "aten::batch_norm_backward": norm_backward(2, mask=9, kind=CENTERED),
    "aten::group_norm": norm(2, 3, kind=CENTERED),
    "aten::native_group_norm": norm(1, 2, kind=CENTERED),
    "aten::native_group_norm_backward": norm_backward(4, mask=9, kind=CENTERED),
    **aten("softmax _softmax _safe_softmax", softmax(costs.PLAIN)),
    **aten("log_softmax _log_softmax", softmax(costs.LOG)),
    "aten::_softmax_backward_data": softmax_backward(costs.PLAIN),
    "aten::_log_softmax_backward_data": softmax_backward(costs.LOG),
}
