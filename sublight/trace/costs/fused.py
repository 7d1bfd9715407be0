"""Kernels that Inductor wrote: the trace names their arguments, not what is read or written.

The bound: each tensor is moved once, and no more of it than the kernel has elements to work on (a gather reads rows of
its table, a slice part of its source). The last tensor counts as written, the others as read; one that is read and
written in place counts once.
"""

from __future__ import annotations

import re

from sublight.cost.tensor import Tensor, over, raw
from sublight.trace.costs.matmul import product
from sublight.trace.costs.shapes import Args, OpCost, Unknown, op_cost, promoted

KERNEL = re.compile(r"triton_(poi|red|per|for|mix|unk|split_scan)_")
TEMPLATE = re.compile(r"triton_tem_")
_PRODUCT = re.compile(r"_(add)?mm(_|$)|_linear(_|$)")


def inductor(args: Args) -> OpCost:
    tensors = args.all_tensors()
    if not tensors:
        raise Unknown
    work = _elements(args, tensors)
    capped = [tensor if tensor.numel <= work else Tensor(shape=(work,), dtype=tensor.dtype) for tensor in tensors]
    *reads, written = capped
    dtype = promoted(tensors)
    cost = over(reads, [raw(written.real_bytes)], operations=work, dtype=dtype)
    return op_cost(args, "fused", cost, dtype=dtype, shape=tensors)


def _elements(args: Args, tensors: tuple[Tensor, ...]) -> int:
    """What the kernel runs over: its last scalar, and of a reduction its last two (rows, then columns)."""
    scalars = [number for place in range(len(args)) if (number := args.integer(place)) is not None]
    largest = max(tensor.numel for tensor in tensors)
    if not scalars:
        return largest
    pointwise = args.name.startswith(("triton_poi", "triton_for"))
    counts = scalars[-1:] if pointwise else scalars[-2:]
    work = 1
    for count in counts:
        work *= max(count, 1)
    return max(work, tensors[-1].numel)


def template(args: Args) -> OpCost:
    """Of Inductor's templates only plain products show their cost: the first two tensors are the factors."""
    tensors = args.all_tensors()
    if not _PRODUCT.search(args.name) or len(tensors) < 3:
        raise Unknown
    a, b = tensors[:2]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise Unknown
    return product(args, a, b, (a.shape[0], b.shape[1]), a.shape[1])
