"""Norms and softmax: one pass over the rows, which an ideal kernel keeps on chip; statistics are too small to count."""

from __future__ import annotations

from sublight.trace.costs.shapes import ITEMSIZE, Args, Handler, OpCost, Tensor, aten, simple


def _given(args: Args, *places: int) -> list[Tensor]:
    return [tensor for place in places if (tensor := args.tensor(place)) is not None]


def norm(*parameters: int, operations: int) -> Handler:
    """y from x (argument 0) and the parameters at these places."""

    def cost(args: Args) -> OpCost:
        x = args.need(0)
        reads = [x, *_given(args, *parameters)]
        return simple(
            args,
            "norm",
            reads=reads,
            write_bytes=x.bytes,
            dtype=x.dtype,
            operations=operations * x.numel,
            shape=x.text,
        )

    return cost


def norm_backward(*parameters: int, mask: int | None, operations: int, x: int = 1) -> Handler:
    """dx from dy (argument 0) and x, and a gradient for each parameter that the mask asks for."""

    def cost(args: Args) -> OpCost:
        dy, inputs = args.need(1 - x), args.need(x)
        given = _given(args, *parameters)
        wanted = (args.flags(mask) if mask is not None else None) or (True,) * (1 + len(given))
        gradients = sum(tensor.bytes for tensor, asked in zip(given, wanted[1:], strict=False) if asked)
        written = inputs.bytes * bool(wanted[0]) + gradients
        return simple(
            args,
            "norm",
            reads=[dy, inputs, *given[:1]],  # the bias is not needed
            write_bytes=written,
            dtype=inputs.dtype,
            operations=operations * inputs.numel,
            shape=inputs.text,
        )

    return cost


def softmax(args: Args) -> OpCost:
    """Read x, write y; subtract, exponential, sum, divide, maximum. A data type may be asked for."""
    x = args.need(0)
    dtype = args.dtype(2) if args.flag(2) is None else None
    if args.flag(2) and x.dtype == "float16":
        dtype = "float32"  # half_to_float
    written = x.numel * ITEMSIZE[dtype or x.dtype]
    return simple(args, "softmax", reads=[x], write_bytes=written, dtype=x.dtype, operations=5 * x.numel)


def softmax_backward(args: Args) -> OpCost:
    """(dy, y, dim, the input's data type): multiply, sum, subtract, multiply."""
    dy, y = args.need(0), args.need(1)
    written = y.numel * ITEMSIZE[args.dtype(3) or y.dtype]
    return simple(
        args, "softmax", reads=[dy, y], write_bytes=written, dtype=y.dtype, operations=4 * y.numel, shape=y.text
    )


_BATCH_NORM = norm(1, 2, operations=7)

OPS: dict[str, Handler] = {
    "aten::layer_norm": norm(2, 3, operations=7),
    "aten::native_layer_norm": norm(2, 3, operations=7),
    "aten::native_layer_norm_backward": norm_backward(5, 6, mask=7, operations=12),
    "aten::rms_norm": norm(2, operations=4),
    "aten::_fused_rms_norm": norm(2, operations=4),
    "aten::_fused_rms_norm_backward": norm_backward(4, mask=5, operations=9),
    **{
        f"aten::{name}": _BATCH_NORM
        for name in (
            *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"),
            *("_native_batch_norm_legit", "_batch_norm_with_update", "_native_batch_norm_legit_no_training"),
            *("_native_batch_norm_legit_functional", "instance_norm"),
        )
    },
    "aten::native_batch_norm_backward": norm_backward(2, mask=9, operations=12),
    "aten::cudnn_batch_norm_backward": norm_backward(2, mask=None, operations=12, x=0),
    "aten::miopen_batch_norm_backward": norm_backward(2, mask=None, operations=12, x=0),
    "aten::batch_norm_backward": norm_backward(2, mask=9, operations=12),
    "aten::group_norm": norm(2, 3, operations=7),
    "aten::native_group_norm": norm(1, 2, operations=7),
    "aten::native_group_norm_backward": norm_backward(4, mask=9, operations=12),
    **aten("softmax _softmax log_softmax _log_softmax", softmax),
    **aten("_softmax_backward_data _log_softmax_backward_data", softmax_backward),
    "aten::_safe_softmax": softmax,
}
