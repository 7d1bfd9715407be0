"""Attention as one op: two products over the pairs of a query and a key, and only q, k, v and the output in memory."""

from __future__ import annotations

from collections.abc import Iterable

from sublight.cost.dtypes import matmul_limit
from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.rotary import TURN
from sublight.cost.tensor import Tensor, dense, over

BACKWARD = 2.5  # five products where the forward has two


def attended(queries: int, keys: int, *, causal: bool, bottom_right: bool, window: int = 0) -> int:
    """Pairs of a query and a key that it may see; `window`: the last so many of a causal mask to the last key.

    >>> attended(4, 4, causal=True, bottom_right=False), attended(2, 4, causal=True, bottom_right=True)
    (10, 7)
    >>> attended(4, 2, causal=True, bottom_right=False), attended(4, 2, causal=True, bottom_right=True)
    (7, 3)
    >>> attended(4, 4, causal=True, bottom_right=True, window=2)
    7
    >>> attended(1, 9, causal=True, bottom_right=True, window=2)
    2
    """
    if not causal:
        return queries * keys
    if 0 < window < keys:  # less the pairs that lie before the window, which have the same form
        before = attended(queries, keys - window, causal=True, bottom_right=True)
        return attended(queries, keys, causal=True, bottom_right=True) - before
    first = 1 + (keys - queries if bottom_right else 0)  # keys that query 0 sees; may be none, or all
    last = first + queries - 1
    low, high = max(first, 0), min(last, keys)
    ramp = (low + high) * (high - low + 1) // 2 if high >= low else 0
    return ramp + max(0, last - keys) * keys  # queries after the ramp see every key


def forward(q: Tensor, k: Tensor, v: Tensor, pairs: int, *more: Tensor, limit: str = "") -> Cost:
    """Read q, k, v (and a mask), write one value a query; a pair takes a product over q's size and one over v's."""
    out = Tensor(shape=(q.numel // max(q.shape[-1], 1), v.shape[-1]), dtype=q.dtype)
    return _cost([q, k, v, *more], [out], q, limit, _operations(q, v, pairs))


def backward(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, pairs: int, *more: Tensor, limit: str = "") -> Cost:
    """Read q, k, v, dy (the output, the logs of the sums, a mask), write the gradients of q, k and v."""
    return _cost([q, k, v, dy, *more], [q, k, v], q, limit, BACKWARD * _operations(q, v, pairs))


def latent_forward(q: Tensor, cache: Tensor, value_dim: int, pairs: int, *, limit: str = "") -> Cost:
    """Keys and values are one tensor, of which the first `value_dim` numbers are the value: it is read once."""
    out = Tensor(shape=(q.numel // max(q.shape[-1], 1), value_dim), dtype=q.dtype)
    return _cost([q, cache], [out], q, limit, 2.0 * pairs * (q.shape[-1] + value_dim))


def _operations(q: Tensor, v: Tensor, pairs: int) -> float:
    return 2.0 * pairs * (q.shape[-1] + v.shape[-1])


def _cost(reads: Iterable[Tensor], writes: Iterable[Tensor], q: Tensor, limit: str, operations: float) -> Cost:
    return over(reads, writes, flops={limit or matmul_limit(q.dtype): operations})


def attention(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Keys and values of `kv_heads` heads are shared by the queries' heads; a causal mask ends at the last key."""
    batch, heads, q_len, kv_len = shape["batch"], shape["heads"], shape["q_len"], shape["kv_len"]
    q = dense(dtype, batch, heads, q_len, shape["head_dim"])
    k = v = dense(dtype, batch, shape["kv_heads"], kv_len, shape["head_dim"])
    logs = dense("float32", batch, heads, q_len)
    causal, window = bool(shape.get("causal", 0)), shape.get("window", 0)
    pairs = batch * heads * attended(q_len, kv_len, causal=causal, bottom_right=True, window=window)
    out = q
    return in_direction(direction, forward(q, k, v, pairs), backward(q, k, v, out, pairs, out, logs))


def packed_lengths(shape: Shape) -> list[tuple[int, int]]:
    """Queries and keys of each sequence; where they are ragged, evenly from the shortest to q_len and kv_len.

    >>> packed_lengths({"batch": 3, "q_len": 9, "kv_len": 11, "ragged": 1})
    [(1, 3), (5, 7), (9, 11)]
    >>> packed_lengths({"batch": 2, "q_len": 9, "kv_len": 4, "ragged": 0})
    [(9, 4), (9, 4)]
    """
    batch, q_len, kv_len = shape["batch"], shape["q_len"], shape["kv_len"]
    if not shape.get("ragged") or batch == 1:
        return [(q_len, kv_len)] * batch
    queries = [1 + (q_len - 1) * i // (batch - 1) for i in range(batch)]
    return [(each, max(0, each + kv_len - q_len)) for each in queries]


def packed_attention(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Sequences one after another: each query sees keys of its own alone."""
    heads, head_dim, causal = shape["heads"], shape["head_dim"], bool(shape.get("causal", 0))
    lengths = packed_lengths(shape)
    queries, keys = (sum(pair[side] for pair in lengths) for side in (0, 1))
    q = dense(dtype, heads, queries, head_dim)
    k = v = dense(dtype, shape["kv_heads"], keys, head_dim)
    pairs = heads * sum(attended(*pair, causal=causal, bottom_right=True) for pair in lengths)
    out, logs = q, dense("float32", heads, queries)
    return in_direction(direction, forward(q, k, v, pairs), backward(q, k, v, out, pairs, out, logs))


def paged_attention(shape: Shape, dtype: str, direction: Direction, kv_dtype: str = "") -> Cost:
    """One or a few new queries a sequence over its whole cache, which lies in pages: read the cache once.

    Where lengths are ragged, they go evenly from 1 to kv_len, so that half of that is read.
    """
    batch, heads, q_len, kv_len = shape["batch"], shape["heads"], shape["q_len"], shape["kv_len"]
    q = dense(dtype, batch, heads, q_len, shape["head_dim"])
    keys = batch * (1 + kv_len) // 2 if shape.get("ragged") and batch > 1 else batch * kv_len
    cache = dense(kv_dtype or dtype, keys, shape["kv_heads"], shape["head_dim"])
    pairs = batch * heads * attended(q_len, kv_len, causal=True, bottom_right=True) * keys // (batch * kv_len)
    return forward(q, cache, cache, pairs)


def paged_prefill(shape: Shape, dtype: str, direction: Direction, kv_dtype: str = "") -> Cost:
    """A chunk of new queries a sequence, which end at its last key, over a cache in pages: read each key once."""
    heads, head_dim, lengths = shape["heads"], shape["head_dim"], packed_lengths(shape)
    queries, keys = (sum(pair[side] for pair in lengths) for side in (0, 1))
    cache = dense(kv_dtype or dtype, keys, shape["kv_heads"], head_dim)
    pairs = heads * sum(attended(*pair, causal=True, bottom_right=True) for pair in lengths)
    return forward(dense(dtype, queries, heads, head_dim), cache, cache, pairs)


def mla_decode(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """One new query a sequence over a latent cache in pages, which all heads share: read it once."""
    batch, heads, kv_len, size = shape["batch"], shape["heads"], shape["kv_len"], shape["value_dim"] + shape["rope_dim"]
    keys = batch * (1 + kv_len) // 2 if shape.get("ragged") and batch > 1 else batch * kv_len
    return latent_forward(dense(dtype, batch, heads, size), dense(dtype, keys, size), shape["value_dim"], heads * keys)


def cascade(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """One new query a sequence over a prefix that all share, which is read once, and over keys of its own."""
    own = paged_attention({**shape, "q_len": 1}, dtype, direction)
    q = dense(dtype, shape["batch"], shape["heads"], shape["head_dim"])
    prefix = dense(dtype, shape["prefix_len"], shape["kv_heads"], shape["head_dim"])
    pairs = shape["batch"] * shape["heads"] * shape["prefix_len"]
    return own + over([prefix, prefix], [], flops={matmul_limit(dtype): _operations(q, q, pairs)})


def kv_write(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Read new keys, values and their places, write them into the cache."""
    new = dense(dtype, shape["tokens"], shape["kv_heads"], shape["head_dim"])
    return over([new, new, dense("int64", shape["tokens"])], [new, new])


def rope_kv_write(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Read q, k, v, each token's angles, position and place; write q, and k and v into the cache."""
    tokens, head_dim = shape["tokens"], shape["head_dim"]
    q, new = dense(dtype, tokens, shape["heads"], head_dim), dense(dtype, tokens, shape["kv_heads"], head_dim)
    angles, number = dense(dtype, tokens, head_dim), dense("int64", tokens)
    operations = TURN * (q.numel + new.numel)
    return over([q, new, new, angles, number, number], [q, new, new], operations=operations, dtype=dtype)


def kv_copy(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Read pages of keys and of values and the pairs' numbers, write the pages elsewhere."""
    pages = dense(dtype, shape["pairs"], shape["page"], shape["kv_heads"], shape["head_dim"])
    pairs = dense("int64", shape["pairs"])
    return over([pages, pages, pairs, pairs], [pages, pages])


def kv_gather(shape: Shape, dtype: str, direction: Direction, kv_dtype: str = "") -> Cost:
    """Read the keys and values that there are; write as many as the longest sequence has, for each."""
    heads, head_dim, batch = shape["kv_heads"], shape["head_dim"], shape["batch"]
    keys = batch * (1 + shape["kv_len"]) // 2 if shape.get("ragged") and batch > 1 else batch * shape["kv_len"]
    cache = dense(kv_dtype or dtype, keys, heads, head_dim)
    room = -(-shape["kv_len"] // shape["page"]) * shape["page"]  # whole pages
    out = dense(dtype, batch, room, heads, head_dim)
    return over([cache, cache], [out, out])
