"""Ops of serving libraries that traces are full of (vLLM's `_C`, SGLang's, fbgemm), where the arguments tell the cost.

Each library's schema of an op has the same tensors in other places. What an op over a paged cache costs depends on the
lengths of its sequences, which no trace holds: it is known for one sequence, whose length is the longest.
"""

from __future__ import annotations

from sublight.cost import Cost, attention, communication, moe, movement, norm, pointwise, quantize, rotary
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import Args, Handler, OpCost, Unknown, op_cost, product_limit


def rms_norm(args: Args) -> OpCost:
    """(out, x, weight, eps)"""
    out, x, weight = args.need(0), args.need(1), args.need(2)
    cost = norm.forward(x, weight, kind=norm.UNCENTERED, out=out)
    return op_cost(args, "norm", cost, dtype=x.dtype, shape=x.text)


def fused_add_rms_norm(args: Args) -> OpCost:
    """(x, residual, weight, eps): both x and the residual are updated in place."""
    x, residual, weight = args.need(0), args.need(1), args.need(2)
    cost = norm.add_forward(x, residual, weight, kind=norm.UNCENTERED)
    return op_cost(args, "norm", cost, dtype=x.dtype, shape=x.text)


def gated(args: Args) -> OpCost:
    """(out, x): gate and up are the halves of x."""
    out, x = args.need(0), args.need(1)
    return op_cost(args, "activation", pointwise.gated([x], out), dtype=x.dtype, shape=x.text)


def quantized(codes: int, x: int, *, made: int | None = None) -> Handler:
    """x to codes, by a scale that is given, or by one that is made from x's maxima."""

    def handler(args: Args) -> OpCost:
        source, result = args.need(x), args.need(codes)
        scales = [args.need(made)] if made is not None else []
        cost = quantize.scaled(source, result, *scales, each=quantize.DYNAMIC if scales else quantize.STATIC)
        return op_cost(args, "quantize", cost, dtype=source.dtype, shape=source.text)

    return handler


def permuted(args: Args) -> OpCost:
    x = args.need(0)
    return op_cost(args, "copy", movement.copy(x, x), dtype=x.dtype, shape=x.text)


def rotary_embedding(args: Args) -> OpCost:
    """(positions, q, k, head size, table of cosines and sines): q and k are turned in place."""
    return _turned(args, args.need(0), args.need(1), args.tensor(2))


def apply_rope(args: Args) -> OpCost:
    """(q, k, turned q, turned k, table of cosines and sines, positions)"""
    return _turned(args, args.need(5), args.need(0), args.tensor(1))


def _turned(args: Args, positions: Tensor, q: Tensor, k: Tensor | None) -> OpCost:
    heads = [q, *([k] if k is not None else [])]
    return op_cost(args, "rope", rotary.turned(heads, [positions]), dtype=q.dtype, shape=q.text)


def reshape_and_cache(args: Args) -> OpCost:
    """(k, v, cache of k, cache of v, slots): each row goes to its slot, in the cache's own data type."""
    return _stored(args, args.need(2), args.need(4))


def concat_and_cache(args: Args) -> OpCost:
    """(compressed k and v, k's rotated part, cache, slots)"""
    return _stored(args, args.need(2), args.need(3))


def _stored(args: Args, cache: Tensor, slots: Tensor) -> OpCost:
    rows = [args.need(0), args.need(1)]
    cost = movement.store_rows(rows, cache.dtype, slots)
    return op_cost(args, "copy", cost, dtype=rows[0].dtype, shape=rows[0].text)


def topk_softmax(logits: int) -> Handler:
    """(weights, experts, …, the router's logits)"""

    def handler(args: Args) -> OpCost:
        x = args.need(logits)
        cost = moe.routing(x, args.need(0), args.need(1))
        return op_cost(args, "moe", cost, dtype=x.dtype, shape=f"{x.text} top {args.need(0).shape[-1]}")

    return handler


def moe_align(args: Args) -> OpCost:
    """(chosen experts, how many there are, rows of a block, …)"""
    chosen = args.need(0)
    return op_cost(args, "moe", moe.alignment(chosen), dtype=chosen.dtype, shape=chosen.text)


def moe_sum(args: Args) -> OpCost:
    """(what each token's experts made, their sum)"""
    x, out = args.need(0), args.need(1)
    return op_cost(args, "moe", moe.combination(x, out), dtype=x.dtype, shape=x.text)


def fused_experts(args: Args) -> OpCost:
    """(tokens, first matrices, second matrices, weights of the choice, chosen experts)"""
    x, up, down, weights, chosen = (args.need(place) for place in range(5))
    if len(x.shape) != 2 or len(up.shape) != 3 or len(down.shape) != 3 or up.shape[0] != down.shape[0]:
        raise Unknown
    # where activations are quantized on the way, the products run in the weights' data type, which is the faster one
    kind = up.dtype if up.dtype.startswith(("float8", "int8")) else x.dtype
    limit = product_limit(kind, args.kernels)
    cost = moe.experts(x, up, down, chosen.numel, weights, chosen, limit=limit)
    return op_cost(args, "matmul", cost, dtype=x.dtype, shape=f"{x.text} @ {up.text}, {down.text}")


def paged_attention(first: int) -> Handler:
    """(out, …, q, cache of k, cache of v, heads of k, scale, block tables, lengths, block size, longest, …): q is at
    `first`; without its values the lengths are known of a single sequence alone.
    """

    def handler(args: Args) -> OpCost:
        q, cache, lengths = args.need(first), args.need(first + 1), args.need(first + 6)
        heads, longest = args.integer(first + 3), args.integer(first + 8)
        if lengths.numel != 1 or heads is None or longest is None or len(q.shape) != 3:
            raise Unknown
        keys = Tensor(shape=(heads, longest, q.shape[2]), dtype=cache.dtype)
        pairs = q.shape[0] * q.shape[1] * longest
        cost = attention.forward(q, keys, keys, pairs, limit=product_limit(q.dtype, args.kernels))
        return op_cost(args, "attention", cost, dtype=q.dtype, shape=f"{q.text}, {longest} keys")

    return handler


def all_reduce(args: Args) -> OpCost:
    """(handle, in, out, …): how many ranks there are is not an argument."""
    given, out = args.need(1), args.need(2)
    cost: Cost = communication.collective("all_reduce", given.real_bytes, out.bytes, ranks=0)
    return op_cost(args, "communication", cost, dtype=given.dtype, shape=given.text)


def _both(names: str, handler: Handler) -> dict[str, Handler]:
    """The same op in vLLM and in SGLang."""
    return {f"{library}::{name}": handler for library in ("_C", "sgl_kernel") for name in names.split()}


OPS: dict[str, Handler] = {
    **_both("rms_norm rmsnorm gemma_rmsnorm", rms_norm),
    **_both("fused_add_rms_norm fused_add_rmsnorm gemma_fused_add_rmsnorm", fused_add_rms_norm),
    **_both("silu_and_mul gelu_and_mul gelu_tanh_and_mul", gated),
    **_both("static_scaled_fp8_quant static_scaled_int8_quant", quantized(0, 1)),
    **_both("dynamic_scaled_fp8_quant dynamic_scaled_int8_quant", quantized(0, 1, made=2)),
    "_C::dynamic_per_token_scaled_fp8_quant": quantized(0, 1, made=2),
    **_both("per_token_group_fp8_quant per_token_group_quant_int8", quantized(1, 0, made=2)),
    **_both("sgl_per_token_group_quant_fp8 sgl_per_token_quant_fp8", quantized(1, 0, made=2)),
    "fbgemm::permute_pooled_embs": permuted,
    "fbgemm::permute_pooled_embs_auto_grad": permuted,
    "_C::rotary_embedding": rotary_embedding,
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": apply_rope,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache,
    "_C_cache_ops::reshape_and_cache": reshape_and_cache,
    "_C_cache_ops::concat_and_cache_mla": concat_and_cache,
    "_moe_C::topk_softmax": topk_softmax(3),
    "sgl_kernel::topk_softmax": topk_softmax(2),
    "_moe_C::moe_align_block_size": moe_align,
    "sgl_kernel::moe_align_block_size": moe_align,
    "_moe_C::moe_sum": moe_sum,
    **{
        f"{engine}::{way}_fused_experts": fused_experts
        for engine in ("vllm", "sglang")
        for way in ("inplace", "outplace")
    },
    "_C::paged_attention_v1": paged_attention(1),
    "_C::paged_attention_v2": paged_attention(4),
    "_C_custom_ar::all_reduce": all_reduce,
}
