"""What moves data without computing: copies, concatenations, gathers, scatters, embeddings, sorts.

Of a table only the rows that an index touches count, and they are taken as distinct as the result's size allows; the
profiler records no values.
"""

from __future__ import annotations

import math

from sublight.trace.costs.shapes import (
    DTYPES,
    ITEMSIZE,
    Args,
    Handler,
    OpCost,
    Tensor,
    Unknown,
    aten,
    broadcast,
    shape_text,
    simple,
    tensors_text,
)

INDEX_BYTES = 8  # sorts and pools return int64


def moved(args: Args, family: str, reads: list[Tensor], read_bytes: int, written: int, shape: str = "") -> OpCost:
    """`reads` whole and so many bytes more, from places that depend on values."""
    part = Tensor(shape=(read_bytes,), dtype="uint8")
    dtype = args.need(0).dtype
    return simple(
        args, family, reads=[*reads, part], write_bytes=written, dtype=dtype, shape=shape or args.need(0).text
    )


def copy(args: Args) -> OpCost:
    """(destination, source): the destination is written; of a smaller source, the source is read."""
    target, source = args.need(0), args.need(1)
    shape = target.text if target.dtype == source.dtype else f"{target.text} {source.dtype} -> {target.dtype}"
    return simple(args, "copy", reads=[source], write_bytes=target.bytes, dtype=target.dtype, shape=shape)


def clone(args: Args) -> OpCost:
    x = args.need(0)
    return simple(args, "copy", reads=[x], write_bytes=x.bytes, dtype=x.dtype)


def contiguous(args: Args) -> OpCost:
    x = args.need(0)
    if x.is_dense and args.word(1) in ("", "0"):
        raise Unknown  # the tensor itself: nothing is done
    return clone(args)


def asked_dtype(args: Args) -> str | None:
    """What `to` converts into; None where it keeps the type."""
    if args.name == "_to_copy":
        return args.dtype(1)
    if args.name == "type_as" or (len(args) == 5 and args.type(1) in DTYPES):
        return args.need(1).dtype
    return args.dtype(2 if len(args) == 6 else 1)  # with a device first, or without


def convert(args: Args) -> OpCost:
    x = args.need(0)
    dtype = asked_dtype(args) or x.dtype
    if dtype == x.dtype and args.name != "_to_copy":
        raise Unknown  # no copy, or one to another device: that one shows as a memcpy
    shape = x.text if dtype == x.dtype else f"{x.text} {x.dtype} -> {dtype}"
    return simple(args, "copy", reads=[x], write_bytes=x.numel * ITEMSIZE[dtype], dtype=dtype, shape=shape)


def cat(args: Args) -> OpCost:
    tensors = args.tensors(0)
    if not tensors:
        raise Unknown
    written = sum(tensor.bytes for tensor in tensors)
    return simple(args, "copy", reads=tensors, write_bytes=written, dtype=tensors[0].dtype, shape=tensors_text(tensors))


def repeat(args: Args) -> OpCost:
    x, times = args.need(0), args.integers(1)
    if times is None:
        raise Unknown
    return simple(args, "copy", reads=[x], write_bytes=x.bytes * math.prod(times), dtype=x.dtype)


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
    part = Tensor(shape=tuple(max(size, 0) for size in kept), dtype=x.dtype)
    read = x if part.bytes > x.real_bytes else part
    return simple(
        args, "copy", reads=[read], write_bytes=math.prod(shape) * x.itemsize, dtype=x.dtype, shape=shape_text(shape)
    )


def triangle(args: Args) -> OpCost:
    """tril and triu: the other half becomes zero unread."""
    x = args.need(0)
    return moved(args, "copy", [], x.real_bytes // 2, x.bytes)


def embedding(args: Args) -> OpCost:
    """(table, indices): a row for each index."""
    table, indices = args.need(0), args.need(1)
    out = indices.numel * math.prod(table.shape[1:]) * table.itemsize
    shape = f"{table.text}, {indices.text}"
    return moved(args, "embedding", [indices], min(out, table.real_bytes), out, shape)


def embedding_bag(args: Args) -> OpCost:
    """(table, indices, offsets): the rows of a bag are summed."""
    table, indices, offsets = args.need(0), args.need(1), args.need(2)
    row_bytes = math.prod(table.shape[1:]) * table.itemsize
    touched = min(indices.numel * row_bytes, table.real_bytes)
    return moved(args, "embedding", [indices, offsets], touched, offsets.numel * row_bytes)


def embedding_backward(args: Args) -> OpCost:
    """(dy, indices, rows of the table): the whole gradient of the table is written, as it is dense."""
    dy, indices, rows = args.need(0), args.need(1), args.integer(2)
    if rows is None or not dy.shape:
        raise Unknown
    written = rows * dy.shape[-1] * dy.itemsize
    return simple(
        args, "embedding", reads=[dy, indices], write_bytes=written, dtype=dy.dtype, shape=f"{rows}x{dy.shape[-1]}"
    )


def index_select(args: Args) -> OpCost:
    x, dim, index = args.need(0), args.integer(1), args.need(2)
    if dim is None or not -len(x.shape) <= dim < len(x.shape) or not x.shape[dim]:
        raise Unknown
    out = x.numel // x.shape[dim] * index.numel * x.itemsize
    return moved(args, "index", [index], min(out, x.real_bytes), out)


def gather(args: Args) -> OpCost:
    x, index = args.need(0), args.need(2)
    out = index.numel * x.itemsize
    return moved(args, "index", [index], min(out, x.real_bytes), out)


def take(args: Args) -> OpCost:
    x, index = args.need(0), args.need(1)
    out = index.numel * x.itemsize
    return moved(args, "index", [index], min(out, x.real_bytes), out)


def index(args: Args) -> OpCost:
    """(x, list of indices): known only where the list was recorded and cannot be a mask, whose count is not known."""
    x, indices = args.need(0), args.tensors(1)
    leads = any(len(at.shape) > 1 and at.shape == x.shape[: len(at.shape)] for at in indices)
    ambiguous = leads or any(at.shape == x.shape[:1] for at in indices)
    if not indices or ambiguous or len(indices) > len(x.shape):
        raise Unknown
    places = broadcast(at.shape for at in indices)
    out = math.prod(places) * math.prod(x.shape[len(indices) :]) * x.itemsize
    return moved(args, "index", [], min(out, x.real_bytes) + math.prod(places) * len(indices), out)


def index_put(args: Args) -> OpCost:
    """(x, list of indices, values): the values are written; a single one goes to unknown places."""
    x, values = args.need(0), args.need(2)
    if values.numel <= 1 < x.numel:
        raise Unknown
    written = values.numel * x.itemsize if args.inplace else x.bytes
    reads = [values] if args.inplace else [values, x]
    return simple(args, "index", reads=reads, write_bytes=written, dtype=x.dtype)


def scatter(args: Args) -> OpCost:
    """(x, dim, index, source or value): adds read what they add to; out of place x is copied first."""
    x, index, source = args.need(0), args.need(2), args.tensor(3)
    hit = index.numel * x.itemsize if "index" not in args.name else (source.bytes if source else 0)
    adds = args.name.endswith("add")
    reads = [index, *([source] if source and source.shape else [])]
    if args.inplace:
        return moved(args, "index", reads, hit if adds else 0, min(hit, x.bytes))
    return moved(args, "index", [*reads, x], 0, x.bytes)


def masked_select(args: Args) -> OpCost:
    """How much it selects is not recorded: the mask is read."""
    return simple(args, "index", reads=[args.need(1)], write_bytes=0, dtype=args.need(0).dtype)


def read_only(family: str) -> Handler:
    """Ops that read all and write what values decide."""

    def cost(args: Args) -> OpCost:
        x = args.need(0)
        return simple(args, family, reads=[x], write_bytes=0, dtype=x.dtype)

    return cost


def sort(args: Args) -> OpCost:
    """Sorted values and where they came from; argsort gives the latter alone."""
    x = args.need(0)
    item = INDEX_BYTES if args.name == "argsort" else x.itemsize + INDEX_BYTES
    return simple(args, "sort", reads=[x], write_bytes=x.numel * item, dtype=x.dtype)


def topk(args: Args) -> OpCost:
    x, k, dim = args.need(0), args.integer(1), args.integer(2)
    if k is None:
        raise Unknown
    length = x.shape[dim if dim is not None and -len(x.shape) <= dim < len(x.shape) else -1] if x.shape else 1
    written = x.numel // max(length, 1) * k * (x.itemsize + INDEX_BYTES)
    return simple(args, "sort", reads=[x], write_bytes=written, dtype=x.dtype, shape=f"{x.text} top {k}")


def fft(args: Args) -> OpCost:
    """Real input gives half the spectrum and one more; complex output of half as many reals comes back."""
    x, dims = args.need(0), args.integers(1)
    if not dims or not -len(x.shape) <= dims[-1] < len(x.shape):
        raise Unknown
    last = x.shape[dims[-1]]
    if args.name == "_fft_r2c":
        kept = last // 2 + 1 if args.flag(3) else last
        written = x.numel // max(last, 1) * kept * 2 * x.itemsize
    elif args.name == "_fft_c2r":
        written = x.numel // max(last, 1) * (args.integer(3) or last) * (x.itemsize // 2)
    else:
        written = x.bytes
    return simple(args, "fft", reads=[x], write_bytes=written, dtype=x.dtype)


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
