"""Attention as one op: two products over the pairs of a query and a key, and only q, k, v and the output in memory."""

from __future__ import annotations

from dataclasses import dataclass

from sublight.cost import Cost
from sublight.trace.costs.shapes import Args, Handler, OpCost, Tensor, Unknown, matmul_limit

BACKWARD = 2.5  # five products where the forward has two


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where an op's schema keeps what."""

    causal: int
    heads_second: bool = True  # (batch, heads, length, size); else (batch, length, heads, size)
    q: int = 0
    bias: int | None = None
    lengths: int | None = None  # cumulative lengths of packed sequences: q is then (total, heads, size)
    window: int | None = None  # the left and the right reach; -1 is no bound
    bottom_right: bool = False  # a causal mask ends at the last key, not at the key of the query's place
    out: int | None = None  # of a backward: the forward's output and, after it, the log-sum-exp


def attended(queries: int, keys: int, *, causal: bool, bottom_right: bool) -> int:
    """Pairs of a query and a key that it may see.

    >>> attended(4, 4, causal=True, bottom_right=False), attended(2, 4, causal=True, bottom_right=True)
    (10, 7)
    >>> attended(4, 2, causal=True, bottom_right=False), attended(4, 2, causal=True, bottom_right=True)
    (7, 3)
    """
    if not causal:
        return queries * keys
    first = 1 + (keys - queries if bottom_right else 0)  # keys that query 0 sees; may be none, or all
    last = first + queries - 1
    low, high = max(first, 0), min(last, keys)
    ramp = (low + high) * (high - low + 1) // 2 if high >= low else 0
    return ramp + max(0, last - keys) * keys  # queries after the ramp see every key


def attention(places: Places, *, backward: bool = False) -> Handler:
    def cost(args: Args) -> OpCost:
        q, k, v = (args.need(places.q + offset) for offset in range(3))
        packed = places.lengths is not None and args.tensor(places.lengths) is not None
        if not packed and len(q.shape) not in (3, 4):
            raise Unknown
        causal = _is_causal(args, places.causal)
        pairs = _packed_pairs(args, q, k, places) if packed else _pairs(args, q, k, places, causal)
        if packed and causal:
            pairs //= 2
        head_size, value_size = q.shape[-1], v.shape[-1]
        operations = 2.0 * pairs * (head_size + value_size)
        out_numel = q.numel // max(head_size, 1) * value_size
        flops = {matmul_limit(q.dtype, args.kernels): operations * (BACKWARD if backward else 1.0)}
        reads = [q, k, v] + ([bias] if places.bias is not None and (bias := args.tensor(places.bias)) else [])
        if backward:
            reads.append(args.need(places.q - 1))  # dy
            reads += [tensor for at in (0, 1) if (tensor := args.tensor((places.out or 0) + at)) is not None]
        written = q.bytes + k.bytes + v.bytes if backward else out_numel * q.itemsize
        return OpCost(
            family="attention",
            cost=Cost(read_bytes=sum(tensor.real_bytes for tensor in reads), write_bytes=written, flops=flops),
            dtype=q.dtype,
            shape=_text(q, k, causal=causal and args.word(places.causal) != "", backward=backward),
            output_bytes=written,
        )

    return cost


def _is_causal(args: Args, place: int) -> bool:
    """A flag, or the number of a mask type: 0 is none. Where it was not recorded, the smaller work counts."""
    word = args.word(place)
    return word not in ("False", "0")


def _pairs(args: Args, q: Tensor, k: Tensor, places: Places, causal: bool) -> int:
    length_at = -2 if places.heads_second else -3
    if len(q.shape) < 3 or len(k.shape) != len(q.shape):
        raise Unknown
    queries, keys = q.shape[length_at], k.shape[length_at]
    seen = attended(queries, keys, causal=causal, bottom_right=places.bottom_right or args.word(places.causal) == "2")
    if places.window is not None:
        left, right = args.integer(places.window), args.integer(places.window + 1)
        if left is not None and left >= 0:
            seen = min(seen, queries * (left + 1 + (max(right or 0, 0) if not causal else 0)))
            if not causal and (right is None or right < 0):
                raise Unknown
    heads = q.numel // max(q.shape[-1] * queries, 1)  # batch · heads of the queries; shared keys are met by each
    return heads * seen


def _packed_pairs(args: Args, q: Tensor, k: Tensor, places: Places) -> int:
    """Sequences packed end to end: their lengths are not recorded, and equal ones give the fewest pairs."""
    lengths = args.need(places.lengths or 0)
    if len(q.shape) != 3 or len(k.shape) != 3 or lengths.numel < 2:
        raise Unknown
    heads, sequences = q.shape[1], lengths.numel - 1
    total_q, total_k = q.shape[0], k.shape[0]
    # where the two differ, it may be that long queries meet short keys
    return heads * (total_q * total_k // sequences if total_q == total_k else max(total_q, total_k))


def _text(q: Tensor, k: Tensor, *, causal: bool, backward: bool) -> str:
    keys = "" if k.shape == q.shape else f", {k.text}"
    return f"{q.text}{keys}{' causal' if causal else ''}{' backward' if backward else ''}"


def _forwards() -> dict[str, Handler]:
    return {
        "aten::scaled_dot_product_attention": attention(Places(causal=5, bias=3)),
        "aten::_scaled_dot_product_attention_math": attention(Places(causal=5, bias=3)),
        "aten::_scaled_dot_product_fused_attention_overrideable": attention(Places(causal=5, bias=3)),
        "aten::_scaled_dot_product_flash_attention": attention(Places(causal=4)),
        "aten::_scaled_dot_product_flash_attention_for_cpu": attention(Places(causal=4, bias=5)),
        "aten::_scaled_dot_product_efficient_attention": attention(Places(causal=6, bias=3)),
        "aten::_scaled_dot_product_cudnn_attention": attention(Places(causal=6, bias=3)),
        "aten::_cudnn_attention_forward": attention(Places(causal=10, bias=3, lengths=4)),
        "aten::_flash_attention_forward": attention(
            Places(causal=8, heads_second=False, lengths=3, window=11, bottom_right=True)
        ),
        "aten::_efficient_attention_forward": attention(Places(causal=9, heads_second=False, bias=3, lengths=4)),
        "flash_attn::_flash_attn_forward": attention(Places(causal=5, heads_second=False, window=6, bottom_right=True)),
        "flash_attn::_flash_attn_varlen_forward": attention(Places(causal=9, heads_second=False, lengths=3)),
    }


def _backwards() -> dict[str, Handler]:
    schemas = {
        "aten::_scaled_dot_product_flash_attention_backward": Places(q=1, causal=11, out=4),
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Places(q=1, causal=7, out=4, bias=8),
        "aten::_scaled_dot_product_efficient_attention_backward": Places(q=1, causal=11, out=5, bias=4),
        "aten::_scaled_dot_product_cudnn_attention_backward": Places(q=1, causal=14, out=4, bias=8),
        "aten::_scaled_dot_product_fused_attention_overrideable_backward": Places(q=1, causal=13, out=6, bias=4),
        "aten::_cudnn_attention_backward": Places(q=1, causal=14, out=4, bias=8, lengths=9),
        "aten::_flash_attention_backward": Places(
            q=1, causal=11, out=4, heads_second=False, lengths=6, bottom_right=True
        ),
        "aten::_efficient_attention_backward": Places(q=1, causal=14, out=5, bias=4, heads_second=False, lengths=6),
        "flash_attn::_flash_attn_backward": Places(q=1, causal=11, out=4, heads_second=False, bottom_right=True),
        "flash_attn::_flash_attn_varlen_backward": Places(q=1, causal=15, out=4, heads_second=False, lengths=9),
    }
    return {name: attention(places, backward=True) for name, places in schemas.items()}


OPS: dict[str, Handler] = {**_forwards(), **_backwards()}
