"""What moves data in traces: which argument is the source, which the index, and how large the result is.

The profiler records no values: of a table, the rows that an index touches are taken as distinct as may be.
"""

from __future__ import annotations

import math
from typing import Literal

from sublight.cost import movement as costs
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import (
    DTYPES,
    Args,
    Handler,
    OpCost,
    Unknown,
    aten,
    broadcast,
    op_cost,
    shape_text,
)


def copy(args: Args) -> OpCost:
    """(destination, source): the destination is written; of a smaller source, the source is read."""
    target, source = args.need(0), args.need(1)
    shape = target.text if target.dtype == source.dtype else f"{target.text} {source.dtype} -> {target.dtype}"
    return op_cost(args, "copy", costs.copy(source, target), dtype=target.dtype, shape=shape)


def clone(args: Args) -> OpCost:
    x = args.need(0)
    return op_cost(args, "copy", costs.copy(x, x), dtype=x.dtype, shape=x.text)


def contiguous(args: Args) -> OpCost:
    x = args.need(0)
    if x.is_dense and args.word(1) in ("", "0"):
        raise Unknown  # the tensor itself: nothing is done
    return clone(args)


def requested_dtype(args: Args) -> str | None:
    """What `to` converts into; None where it keeps the type."""
    if args.name == "_to_copy":
        return args.dtype(1)
    if args.name == "type_as" or (len(args) == 5 and args.type(1) in DTYPES):
        return args.need(1).dtype
    return args.dtype(2 if len(args) == 6 else 1)  # with a device first, or without


def convert(args: Args) -> OpCost:
    x = args.need(0)
    dtype = requested_dtype(args) or x.dtype
    if dtype == x.dtype and args.name != "_to_copy":
        raise Unknown  # no copy, or one to another device: that one shows as a memcpy
    shape = x.text if dtype == x.dtype else f"{x.text} {x.dtype} -> {dtype}"
    return op_cost(args, "copy", costs.copy(x, Tensor(shape=x.shape, dtype=dtype)), dtype=dtype, shape=shape)


def cat(args: Args) -> OpCost:
    tensors = args.tensors(0)
    if not tensors:
        raise Unknown
    return op_cost(args, "copy", costs.concatenate(tensors), dtype=tensors[0].dtype, shape=tensors)


def repeat(args: Args) -> OpCost:
    x, times = args.need(0), args.integers(1)
    if times is None:
        raise Unknown
    return op_cost(args, "copy", costs.repeat(x, math.prod(times)), dtype=x.dtype, shape=x.text)


def pad(args: Args) -> OpCost:
    """(x, [left, right of the last dimension, then of the one before, …])."""
    x, edges = args.need(0), args.integers(1)
    if edges is None or len(edges) % 2 or len(edges) > 2 * len(x.shape):
        raise Unknown
    shape, kept = list(x.shape), list(x.shape)
    for at in range(len(edges) // 2):
        left, right = edges[2 * at : 2 * at + 2]
        shape[-1 - at] += left + right
        kept[-1 - at] += min(left, 0) + min(right, 0)  # a negative edge cuts off
    if min(shape, default=0) < 0:
        raise Unknown
    cost = costs.pad(x, tuple(max(size, 0) for size in kept), tuple(shape))
    return op_cost(args, "copy", cost, dtype=x.dtype, shape=shape_text(shape))


def triangle(args: Args) -> OpCost:
    """tril and triu"""
    x = args.need(0)
    return op_cost(args, "copy", costs.triangle(x), dtype=x.dtype, shape=x.text)


def embedding(args: Args) -> OpCost:
    """(table, indices): a row for each index."""
    table, indices = args.need(0), args.need(1)
    out = Tensor(shape=(indices.numel, *table.shape[1:]), dtype=table.dtype)
    shape = f"{table.text}, {indices.text}"
    return op_cost(args, "embedding", costs.lookup(table, out, indices), dtype=table.dtype, shape=shape)


def embedding_bag(args: Args) -> OpCost:
    """(table, indices, offsets): the rows of a bag are summed."""
    table, indices, offsets = args.need(0), args.need(1), args.need(2)
    cost = costs.summed_lookup(table, indices.numel, offsets.numel, indices, offsets)
    return op_cost(args, "embedding", cost, dtype=table.dtype, shape=table.text)


def embedding_backward(args: Args) -> OpCost:
    """(dy, indices, rows of the table)"""
    dy, indices, rows = args.need(0), args.need(1), args.integer(2)
    if rows is None or not dy.shape:
        raise Unknown
    table = Tensor(shape=(rows, dy.shape[-1]), dtype=dy.dtype)
    return op_cost(args, "embedding", costs.lookup_backward(dy, table, indices), dtype=dy.dtype, shape=table.text)


def index_select(args: Args) -> OpCost:
    x, dim, index = args.need(0), args.integer(1), args.need(2)
    if dim is None or not -len(x.shape) <= dim < len(x.shape) or not x.shape[dim]:
        raise Unknown
    return _lookup(args, x, (x.numel // x.shape[dim], index.numel), index)


def gather(args: Args) -> OpCost:
    x, index = args.need(0), args.need(2)
    return _lookup(args, x, index.shape, index)


def take(args: Args) -> OpCost:
    x, index = args.need(0), args.need(1)
    return _lookup(args, x, index.shape, index)


def _lookup(args: Args, x: Tensor, out: tuple[int, ...], *indices: Tensor) -> OpCost:
    cost = costs.lookup(x, Tensor(shape=out, dtype=x.dtype), *indices)
    return op_cost(args, "index", cost, dtype=x.dtype, shape=x.text)


def index(args: Args) -> OpCost:
    """(x, list of indices): known where the list was recorded and cannot be a mask, whose count is not known; else by
    the shape of the gradient, or by the elements that the kernel ran over.
    """
    x, indices = args.need(0), args.tensors(1)
    if args.detail.out:
        return _lookup(args, x, args.detail.out)
    if args.detail.elements > 0:
        return _lookup(args, x, (args.detail.elements,))
    leads = any(len(at.shape) > 1 and at.shape == x.shape[: len(at.shape)] for at in indices)
    ambiguous = leads or any(at.shape == x.shape[:1] for at in indices)
    if not indices or ambiguous or len(indices) > len(x.shape):
        raise Unknown
    places = broadcast(at.shape for at in indices)
    numbers = [Tensor(shape=places, dtype="uint8") for _ in indices]  # a byte each, if they are no more than a mask
    return _lookup(args, x, (*places, *x.shape[len(indices) :]), *numbers)


def index_put(args: Args) -> OpCost:
    """(x, list of indices, values): the values are written; a single one goes to as many places as the kernel ran over,
    or to unknown ones.
    """
    x, values = args.need(0), args.need(2)
    hit = Tensor(shape=values.shape, dtype=x.dtype)
    if values.numel <= 1 < x.numel:
        if args.detail.elements < 1:
            raise Unknown
        hit = Tensor(shape=(min(args.detail.elements, x.numel),), dtype=x.dtype)
    cost = costs.copy(values, hit)
    if not args.inplace:
        cost = costs.scatter_copy(x, values)
    return op_cost(args, "index", cost, dtype=x.dtype, shape=[values] if args.inplace else [values, x])


def scatter(args: Args) -> OpCost:
    """(x, dim, index, source or value): adds read what they add to; out of place x is copied first."""
    x, index, source = args.need(0), args.need(2), args.tensor(3)
    hit = Tensor(shape=index.shape, dtype=x.dtype).bytes
    if "index" in args.name:
        hit = source.bytes if source else 0
    sources = [index, *([source] if source and source.shape else [])]
    if args.inplace:
        cost = costs.scatter_into(x, hit, *sources, adds=args.name.endswith("add"))
    else:
        cost = costs.scatter_copy(x, *sources)
    return op_cost(args, "index", cost, dtype=x.dtype, shape=x.text)


def masked_select(args: Args) -> OpCost:
    """How much it selects is not recorded: the mask is read."""
    mask = args.need(1)
    return op_cost(args, "index", costs.read_only(mask), dtype=args.need(0).dtype, shape=mask.text)


def read_only(family: str) -> Handler:
    """Ops that read all and write what values decide."""

    def handler(args: Args) -> OpCost:
        x = args.need(0)
        return op_cost(args, family, costs.read_only(x), dtype=x.dtype, shape=x.text)

    return handler


def sort(args: Args) -> OpCost:
    """Sorted values and where they came from; argsort gives the latter alone."""
    x = args.need(0)
    return op_cost(args, "sort", costs.sort(x, values=args.name != "argsort"), dtype=x.dtype, shape=x.text)


def topk(args: Args) -> OpCost:
    x, k, dim = args.need(0), args.integer(1), args.integer(2)
    if k is None:
        raise Unknown
    length = x.shape[dim if dim is not None and -len(x.shape) <= dim < len(x.shape) else -1] if x.shape else 1
    cost = costs.topk(x, x.numel // max(length, 1) * k)
    return op_cost(args, "sort", cost, dtype=x.dtype, shape=f"{x.text} top {k}")


def fft(args: Args) -> OpCost:
    """Real input gives half the spectrum and one more, where that is asked for."""
    x, dims = args.need(0), args.integers(1)
    if not dims or not -len(x.shape) <= dims[-1] < len(x.shape):
        raise Unknown
    last = x.shape[dims[-1]]
    kinds: dict[str, tuple[Literal["r2c", "c2c", "c2r"], int]] = {
        "_fft_r2c": ("r2c", last // 2 + 1 if args.flag(3) else last),
        "_fft_c2r": ("c2r", args.integer(3) or last),
    }
    kind, out_last = kinds.get(args.name, ("c2c", last))
    return op_cost(args, "fft", costs.fft(x, kind, last, out_last), dtype=x.dtype, shape=x.text)


OPS: dict[str, Handler] = {
    "aten::copy_": copy,
    **aten("clone flip roll rot90 alias_copy view_copy", clone),
    "aten::contiguous": contiguous,
    **aten("to _to_copy type_as", convert),
    **aten("cat stack concat hstack vstack _cat block_diag", cat),
    "aten::repeat": repeat,
    "aten::constant_pad_nd": pad,
    "aten::pad": pad,
    **aten("reflection_pad1d reflection_pad2d replication_pad2d", pad),
    **aten("tril triu", triangle),
    "aten::embedding": embedding,
    "aten::_embedding_bag": embedding_bag,
    "aten::_embedding_bag_forward_only": embedding_bag,
    **aten("embedding_backward embedding_dense_backward", embedding_backward),
    "aten::index_select": index_select,
    "aten::gather": gather,
    "aten::take": take,
    "aten::index": index,
    **aten("index_put _index_put_impl _unsafe_index_put", index_put),
    **aten("scatter scatter_add index_add index_copy scatter_reduce", scatter),
    "aten::masked_select": masked_select,
    **aten("nonzero bincount histc", read_only("index")),
    **aten("_unique2 unique_dim unique_consecutive", read_only("sort")),
    **aten("sort argsort msort", sort),
    "aten::topk": topk,
    **aten("_fft_r2c _fft_c2c _fft_c2r", fft),
}
