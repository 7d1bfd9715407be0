"""Lists of tensors in one call: fused optimizers and the foreach ops that unfused ones are made of."""

from __future__ import annotations

from collections.abc import Sequence

from sublight.cost import optimizer as costs
from sublight.cost.tensor import Tensor, dense
from sublight.trace.complete import list_count
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown, op_cost, tensors_text

# elementwise on each tensor of a list: reads every list it is given, writes one like the first
FOREACH = """
    add sub mul div addcmul addcdiv lerp sqrt rsqrt reciprocal neg abs exp log pow maximum minimum clamp_max
    clamp_min sign sigmoid tanh erf floor ceil round trunc frac expm1 log1p log2 log10 sin cos
"""


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel for tensor in tensors)


def _flat(args: Args, lists: int) -> list[Tensor]:
    """Lists whose shapes were not recorded, each as one tensor of the elements that the kernels ran over."""
    if args.detail.elements < 1:
        raise Unknown
    counts = [count for kernel in args.kernels if (count := list_count(kernel)) is not None]
    return [dense(args.likely_dtype(), args.detail.elements)] * max(counts, default=lists)


def _at_least(flat: Tensor) -> str:
    return f"tensors of {flat.numel} or more"


def foreach(args: Args) -> OpCost:
    lists = [args.tensors(place) for place in range(len(args)) if args.type(place) == "TensorList"]
    if not lists:
        raise Unknown
    if not lists[0]:
        flat = _flat(args, len(lists) + (not args.inplace))  # with the list that is written, where that is a new one
        reads = flat if args.inplace else flat[1:]
        cost = costs.foreach(reads, flat[:1], operations=flat[0].numel)
        return op_cost(args, "optimizer", cost, dtype=flat[0].dtype, shape=_at_least(flat[0]))
    cost = costs.foreach([x for each in lists for x in each], lists[0], operations=len(lists) * _numel(lists[0]))
    return op_cost(args, "optimizer", cost, dtype=args.likely_dtype(), shape=lists[0])


def foreach_copy(args: Args) -> OpCost:
    target, source = args.tensors(0), args.tensors(1)
    if not target or not source:
        target = source = tuple(_flat(args, 2)[:1])
    return op_cost(args, "optimizer", costs.foreach(source, target), dtype=args.likely_dtype(), shape=source)


def foreach_zero(args: Args) -> OpCost:
    target = args.tensors(0) or _flat(args, 1)[:1]
    return op_cost(args, "optimizer", costs.foreach([], target), dtype=args.likely_dtype(), shape=target)


def foreach_norm(args: Args) -> OpCost:
    tensors = args.tensors(0) or _flat(args, 1)[:1]
    return op_cost(args, "optimizer", costs.norms(tensors), dtype=args.likely_dtype(), shape=tensors)


def fused(*updated: int, gradients: int = 1, optional: int = 0, each: int) -> Handler:
    """Reads the gradients and the lists at these places, and writes those lists; so many of the last may be empty."""

    def handler(args: Args) -> OpCost:
        lists = [args.tensors(place) for place in updated]
        grads = args.tensors(gradients)
        shape = tensors_text(grads)
        if not lists[0] or not grads:
            *states, grad = _flat(args, 1 + len(updated) - optional)
            lists, grads = [(state,) for state in states], (grad,)
            shape = _at_least(grad)
        cost = costs.update([tensor for tensors in lists for tensor in tensors], grads, each=each)
        return op_cost(args, "optimizer", cost, dtype=args.likely_dtype(), shape=shape)

    return handler


_ADAM = fused(0, 2, 3, 4, optional=1, each=costs.ADAM)

OPS: dict[str, Handler] = {
    **{f"aten::_foreach_{name}": foreach for name in FOREACH.split()},
    "aten::_amp_foreach_non_finite_check_and_unscale": foreach,
    "aten::_foreach_copy": foreach_copy,
    "aten::_foreach_zero": foreach_zero,
    "aten::_foreach_norm": foreach_norm,
    "aten::_foreach_max": foreach_norm,
    "aten::_fused_adam": _ADAM,
    "aten::_fused_adamw": _ADAM,
    "aten::_fused_sgd": fused(0, 2, optional=1, each=costs.SGD),
    "aten::_fused_adagrad": fused(0, 2, each=costs.ADAGRAD),
}
