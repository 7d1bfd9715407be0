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
    args: Args, a: Tensor, b: Tensor, out: Shape, k: int, *, plus: Tensor | None = None, out_dtype: str | None = None
) -> OpCost:
    """a @ b (+ plus) of this output shape; an in-place or beta=0 addend is read only where it is given."""
    result = Tensor(shape=out, dtype=out_dtype or a.dtype)
    limit = product_limit(a.dtype, args.kernels)
    cost = costs.product(a, b, result, k, *([plus] if plus else []), limit=limit)
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
    return product(args, a, b, (*batch, *rows, *cols), k, plus=plus, out_dtype=out_dtype)


def addmm(args: Args) -> OpCost:
    """beta·c + alpha·(a @ b); with beta = 0 c is not read."""
    return matmul(args, 1, plus=None if args.number(3) == 0 else args.tensor(0))


def linear(args: Args) -> OpCost:
    x, weight = args.need(0), args.need(1)
    if not x.shape or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise Unknown
    cost = product(args, x, weight, (*x.shape[:-1], weight.shape[0]), x.shape[-1], plus=args.tensor(2))
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
    return product(args, a, b, (m, n), k * packed, plus=args.tensor(4), out_dtype=out_dtype)


def int_mm(args: Args) -> OpCost:
    return matmul(args, out_dtype="int32")


def grouped_mm(args: Args) -> OpCost:
    """Tokens sorted by group: every row meets one group's matrix, (total, k) @ (groups, k, n)."""
    a, b = args.need(0), args.need(1)
    if len(a.shape) != 2 or len(b.shape) != 3 or a.shape[1] != b.shape[1]:
        raise Unknown
    return product(args, a, b, (a.shape[0], b.shape[2]), a.shape[1])


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
    "aten::_grouped_mm": grouped_mm,
    "aten::outer": outer,
}
