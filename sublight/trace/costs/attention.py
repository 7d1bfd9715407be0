"""Attention in traces: where each library's schema keeps q, k, v, the mask and the lengths."""

from __future__ import annotations

from dataclasses import dataclass

from sublight.cost import attention as costs
from sublight.cost.attention import attended
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown, op_cost, product_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The positions of an op's arguments in its schema."""

    causal: int
    heads_second: bool = True  # (batch, heads, length, size); else (batch, length, heads, size)
    q: int = 0
    bias: int | None = None
    lengths: int | None = None  # cumulative lengths of packed sequences: q is then (total, heads, size)
    window: int | None = None  # the left and the right reach; -1 is no bound
    bottom_right: bool = False  # a causal mask ends at the last key, not at the key of the query's place
    out: int | None = None  # of a backward: the forward's output and, after it, the log-sum-exp


def attention(places: Places, *, backward: bool = False) -> Handler:
    def handler(args: Args) -> OpCost:
        q, k, v = (args.need(places.q + offset) for offset in range(3))
        packed = places.lengths is not None and args.tensor(places.lengths) is not None
        if not packed and len(q.shape) not in (3, 4):
            raise Unknown
        causal = _is_causal(args, places.causal)
        pairs = _packed_pairs(args, q, k, places) if packed else _pairs(args, q, k, places, causal)
        if packed and causal:
            pairs //= 2
        more = [bias] if places.bias is not None and (bias := args.tensor(places.bias)) else []
        limit = product_limit(q.dtype, args.kernels)
        if backward:
            dy = args.need(places.q - 1)
            more += [tensor for at in (0, 1) if (tensor := args.tensor((places.out or 0) + at)) is not None]
            cost = costs.backward(q, k, v, dy, pairs, *more, limit=limit)
        else:
            cost = costs.forward(q, k, v, pairs, *more, limit=limit)
        shape = _text(q, k, causal=causal and args.word(places.causal) != "", backward=backward)
        return op_cost(args, "attention", cost, dtype=q.dtype, shape=shape)

    return handler


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
