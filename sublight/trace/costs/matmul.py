"""Matrix products in traces: which arguments are the factors, and what shape comes out of them."""

from __future__ import annotations

import dataclasses

from sublight.cost import matmul as costs
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import (
    Args,
    Handler,
    OpCost,
    Unknown,
    aten,
    broadcast,
    op_cost,
    product_limit,
    shape_text,
)
from sublight.trace.record import Shape


def product(
    args: Args, a: Tensor, b: Tensor, out: Shape, k: float, *more: Tensor | None, out_dtype: str | None = None
) -> OpCost:
    """a @ b (+ what else is read: an addend, a bias, scales) of this output shape."""
    result = Tensor(shape=out, dtype=out_dtype or a.dtype)
    given = [tensor for tensor in more if tensor is not None]
    cost = costs.product(a, b, result, k, *given, limit=product_limit(a.dtype, args.kernels))
    return op_cost(args, "matmul", cost, dtype=a.dtype, shape=f"{a.text} @ {b.text}")


def matmul(args: Args, at: int = 0, plus: Tensor | None = None, out_dtype: str | None = None) -> OpCost:
    """torch.matmul's rules: vectors, matrices and broadcast batches; the factors are arguments `at` and `at + 1`."""
    a, b = args.need(at), args.need(at + 1)
    if not a.shape or not b.shape:
        raise Unknown
    k = a.shape[-1]
    if k != (b.shape[-2] if len(b.shape) > 1 else b.shape[0]):
        raise Unknown
    batch = broadcast((a.shape[:-2], b.shape[:-2]))
    rows, cols = a.shape[-2:-1], b.shape[-1:] if len(b.shape) > 1 else ()
    return product(args, a, b, (*batch, *rows, *cols), k, plus, out_dtype=out_dtype)


def addmm(args: Args) -> OpCost:
    """beta·c + alpha·(a @ b); with beta = 0 c is not read."""
    return matmul(args, 1, plus=None if args.number(3) == 0 else args.tensor(0))


def linear(args: Args) -> OpCost:
    x, weight = args.need(0), args.need(1)
    if not x.shape or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise Unknown
    cost = product(args, x, weight, (*x.shape[:-1], weight.shape[0]), x.shape[-1], args.tensor(2))
    return dataclasses.replace(cost, shape=f"{x.text} @ {shape_text(weight.shape[::-1])}")


def linear_backward(args: Args) -> OpCost:
    """(x, dy, weight, which gradients): each gradient is a product as large as the forward one."""
    x, dy, weight = args.need(0), args.need(1), args.need(2)
    wanted = args.flags(3)
    if wanted is None or len(wanted) != 3 or len(weight.shape) != 2:
        raise Unknown
    dx, dw, db = wanted
    limit = product_limit(x.dtype, args.kernels)
    cost = costs.linear_backward(x, dy, weight, dx=dx, dw=dw, db=db, limit=limit)
    return op_cost(args, "matmul", cost, dtype=x.dtype, shape=f"{x.text} @ {shape_text(weight.shape[::-1])} backward")


def scaled_mm(args: Args) -> OpCost:
    """(a, b, scale_a, scale_b, bias, scale_result, out_dtype): factors of 8 bits, or of 4 packed in pairs."""
    a, b = args.need(0), args.need(1)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise Unknown
    packed = 2 if a.dtype.endswith("_x2") else 1
    (m, k), n = a.shape, b.shape[1]
    out_dtype = args.dtype(6) or args.dtype(5) or a.dtype
    return product(args, a, b, (m, n), k * packed, args.tensor(4), out_dtype=out_dtype)


def int_mm(args: Args) -> OpCost:
    return matmul(args, out_dtype="int32")


def grouped_mm(args: Args) -> OpCost:
    """Groups of rows with a matrix each, (total, k) @ (groups, k, n), or one of the ways that gradients need."""
    a, b = args.need(0), args.need(1)
    out_dtype = (args.dtype(7) if args.name == "_scaled_grouped_mm" else None) or _wide(a.dtype)
    offsets = args.tensor(4 if args.name == "_scaled_grouped_mm" else 2)
    if len(a.shape) == 2 and len(b.shape) == 3 and a.shape[1] == b.shape[1]:
        out: Shape = (a.shape[0], b.shape[2])
    elif len(a.shape) == 3 and len(b.shape) == 2 and a.shape[2] == b.shape[0]:
        out = (a.shape[1], b.shape[1])
    elif len(a.shape) == 3 and len(b.shape) == 3 and a.shape[2] == b.shape[1]:
        out = (a.shape[0], a.shape[1], b.shape[2])
    elif len(a.shape) == 2 and len(b.shape) == 2 and a.shape[1] == b.shape[0] and offsets is not None:
        # the summed dimension is cut into groups, each with a result of its own
        groups = max(offsets.numel, 1)
        return product(args, a, b, (groups, a.shape[0], b.shape[1]), a.shape[1] / groups, out_dtype=out_dtype)
    else:
        raise Unknown
    return product(args, a, b, out, a.shape[-1], out_dtype=out_dtype)


def _wide(dtype: str) -> str:
    """What products of 8 bits give where nothing else is asked for."""
    return "bfloat16" if dtype.startswith(("float8", "int8")) else dtype


def library_mm(a_at: int, *more: int, out: int | None = None, out_dtype: int | None = None) -> Handler:
    """(…, a, b, …) of serving libraries, with bias and scales; the result, or its data type, may be an argument.

    `b` is (k, n), or (n, k) where that fits.
    """

    def handler(args: Args) -> OpCost:
        a, b = args.need(a_at), args.need(a_at + 1)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] not in b.shape:
            raise Unknown
        columns = b.shape[1] if b.shape[0] == a.shape[1] else b.shape[0]
        wanted = args.dtype(out_dtype) if out_dtype is not None else None
        result = args.need(out).dtype if out is not None else wanted or _wide(a.dtype)
        scales = [args.tensor(place) for place in more]
        return product(args, a, b, (a.shape[0], columns), a.shape[1], *scales, out_dtype=result)

    return handler


def int4_mm(args: Args) -> OpCost:
    """_weight_int4pack_mm: (x, packed weight, group size, scales and zeros of (k / group, n, 2))."""
    x, weight, scales = args.need(0), args.need(1), args.need(3)
    if len(x.shape) != 2 or len(scales.shape) != 3:
        raise Unknown
    return product(args, x, weight, (x.shape[0], scales.shape[1]), x.shape[1], scales)


def outer(args: Args) -> OpCost:
    a, b = args.need(0), args.need(1)
    return product(args, a, b, (a.numel, b.numel), 1)


OPS: dict[str, Handler] = {
    **aten("mm bmm matmul mv dot vdot inner", matmul),
    **aten("addmm baddbmm addmv _addmm_activation sspaddmm", addmm),
    **aten("linear mkldnn_linear _mps_linear", linear),
    "mkldnn::_linear_pointwise": linear,
    "aten::linear_backward": linear_backward,
    "aten::mkldnn_linear_backward": linear_backward,
    "aten::_scaled_mm": scaled_mm,
    "aten::_int_mm": int_mm,
    **aten("_grouped_mm _scaled_grouped_mm", grouped_mm),
    "aten::_weight_int4pack_mm": int4_mm,
    "aten::_weight_int8pack_mm": library_mm(0, 2),
    "_C::cutlass_scaled_mm": library_mm(1, 3, 4, 5, out=0),
    **{f"sgl_kernel::{kind}_scaled_mm": library_mm(0, 2, 3, 5, out_dtype=4) for kind in ("fp8", "int8")},
    **{f"fbgemm::f8f8bf16{way}": library_mm(0, 2, 3) for way in ("", "_rowwise", "_blockwise", "_tensorwise")},
    "aten::outer": outer,
}
