"""What moves data without computing: copies, gathers, scatters, embeddings, sorts, and transfers from and to the GPU.

Of a table only the rows that an index touches count. Where values decide which they are, they are taken as distinct as
the result's size allows, and as few as the table has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

from sublight.cost.dtypes import size_bytes
from sublight.cost.record import NOTHING, Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Sizes, Tensor, dense, over, raw

Way = Literal["from_host", "to_host", "peer", "on_device", "on_host"]


def copy(source: Tensor, target: Tensor) -> Cost:
    """Read the source as it lies in memory, write the target whole."""
    return over([source], [target])


def concatenate(tensors: Sequence[Tensor]) -> Cost:
    return over(tensors, tensors)


def repeat(x: Tensor, times: int) -> Cost:
    return over([x], [Tensor(shape=(times, *x.shape), dtype=x.dtype)])


def pad(x: Tensor, kept: Sizes, out: Sizes) -> Cost:
    """Read what is kept of x (a negative edge cuts off), write the padded tensor."""
    part = Tensor(shape=kept, dtype=x.dtype)
    return over([x if part.bytes > x.real_bytes else part], [Tensor(shape=out, dtype=x.dtype)])


def triangle(x: Tensor) -> Cost:
    """Read half of x, write all: the other half becomes zero unread."""
    return over([raw(x.real_bytes // 2)], [x])


def transfer(count_bytes: int, way: Way) -> Cost:
    """A copy within the device's memory, between it and the host's, or to another GPU."""
    if way == "from_host":
        return Cost(read_bytes=0, write_bytes=count_bytes, from_host_bytes=count_bytes)
    if way == "to_host":
        return Cost(read_bytes=count_bytes, write_bytes=0, to_host_bytes=count_bytes)
    if way == "on_host":
        return Cost(read_bytes=0, write_bytes=0)  # past the device
    if way == "peer":  # read here, written there
        return Cost(read_bytes=count_bytes, write_bytes=0, link_bytes=count_bytes)
    return Cost(read_bytes=count_bytes, write_bytes=count_bytes)


def memset(count_bytes: int) -> Cost:
    return Cost(read_bytes=0, write_bytes=count_bytes)


def lookup(table: Tensor, out: Tensor, *indices: Tensor) -> Cost:
    """Read the indices and, of the table, what the result needs; write the result."""
    return over([*indices, raw(min(out.bytes, table.real_bytes))], [out])


def summed_lookup(table: Tensor, rows: int, bags: int, *indices: Tensor) -> Cost:
    """Read the indices and `rows` of the table, write a sum for each bag of them."""
    row = table.shape[1:]
    touched = min(Tensor(shape=(rows, *row), dtype=table.dtype).bytes, table.real_bytes)
    return over([*indices, raw(touched)], [Tensor(shape=(bags, *row), dtype=table.dtype)])


def lookup_backward(dy: Tensor, table: Tensor, *indices: Tensor) -> Cost:
    """Read the indices and dy, write the table's gradient, which is dense; one addition an element of dy."""
    return over([dy, *indices], [table], operations=dy.numel)


def store_rows(rows: Sequence[Tensor], dtype: str, slots: Tensor) -> Cost:
    """Each row goes to its slot of a cache that may have another data type."""
    return over([*rows, slots], [Tensor(shape=row.shape, dtype=dtype) for row in rows])


def scatter_into(x: Tensor, hit_bytes: int, *sources: Tensor, adds: bool) -> Cost:
    """Scatter in place: read index and source, where it adds also the old values; write the places that are hit."""
    reads = [*sources, raw(hit_bytes if adds else 0)]
    return over(reads, [raw(min(hit_bytes, x.bytes))])


def scatter_copy(x: Tensor, *sources: Tensor) -> Cost:
    """Out of place: x is copied, then hit."""
    return over([*sources, x], [x])


def read_only(x: Tensor) -> Cost:
    """What is written depends on values, and may be nothing."""
    return over([x], [])


def sort(x: Tensor, *, values: bool = True) -> Cost:
    """Read x, write the sorted values and where they came from, or the latter alone; at least one pass."""
    places = Tensor(shape=x.shape, dtype="int64")
    return over([x], [*([Tensor(shape=x.shape, dtype=x.dtype)] if values else []), places])


def topk(x: Tensor, kept: int) -> Cost:
    """Read x, write the largest and where they were: `kept` of all rows together."""
    return over([x], [dense(x.dtype, kept), dense("int64", kept)])


def embedding(shape: Shape, dtype: str, direction: Direction) -> Cost:
    rows, cols, vocab = shape["rows"], shape["cols"], shape["vocab"]
    ids, table, y = dense("int64", rows), dense(dtype, vocab, cols), dense(dtype, rows, cols)
    touched = dense(dtype, distinct(rows, vocab), cols)
    # read the ids and once each row of the table that is asked for, write y
    return in_direction(direction, over([ids, touched], [y]), lookup_backward(y, table, ids))


@functools.cache
def distinct(rows: int, vocab: int) -> int:
    """How many different ids are expected among so many that are drawn as words are: the k-th with weight 1/k."""
    scale = math.log(vocab + 1.0)
    shares = (math.log((token + 2.0) / (token + 1.0)) / scale for token in range(vocab))
    return round(sum(1 - (1 - share) ** rows for share in shares))


def permute(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, *(size for key, size in shape.items() if key != "order"))
    return in_direction(direction, copy(x, x), NOTHING)  # read x, write y; the gradient is a view of dy


def compact(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, mask, count = dense(dtype, shape["numel"]), dense("bool", shape["numel"]), dense("int64", 1)
    # read x and the mask, write y and the count; read dy and the mask, write dx
    return in_direction(direction, over([x, mask], [x, count]), over([x, mask], [x]))


def fft(x: Tensor, kind: Literal["r2c", "c2c", "c2r"], last: int, out_last: int) -> Cost:
    """Read x, write as many rows of `out_last` elements; one pass at least.

    A complex number takes the room of two real ones.
    """
    rows = x.numel // max(last, 1)
    out_bytes = size_bytes(rows * out_last, x.dtype)
    scaled = {"r2c": 2 * out_bytes, "c2c": x.bytes, "c2r": out_bytes // 2}
    return over([x], [raw(scaled[kind])])
