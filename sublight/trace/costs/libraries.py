"""Ops of serving libraries that traces are full of (vLLM's `_C`, fbgemm), where the arguments tell the cost."""

from __future__ import annotations

from sublight.cost import movement, norm, pointwise, quantize, rotary
from sublight.trace.costs.shapes import Args, Handler, OpCost, op_cost


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
    return op_cost(args, "pointwise", pointwise.gated([x], out), dtype=x.dtype, shape=x.text)


def static_quantize(args: Args) -> OpCost:
    """(out, x, scale)"""
    out, x = args.need(0), args.need(1)
    return op_cost(args, "pointwise", quantize.scaled(x, out, each=1), dtype=x.dtype, shape=x.text)


def permuted(args: Args) -> OpCost:
    x = args.need(0)
    return op_cost(args, "copy", movement.copy(x, x), dtype=x.dtype, shape=x.text)


def rotary_embedding(args: Args) -> OpCost:
    """(positions, q, k, head size, table of cosines and sines): q and k are turned in place."""
    positions, q = args.need(0), args.need(1)
    heads = [q, *([k] if (k := args.tensor(2)) is not None else [])]
    return op_cost(args, "pointwise", rotary.turned(heads, [positions]), dtype=q.dtype, shape=q.text)


def reshape_and_cache(args: Args) -> OpCost:
    """(k, v, cache of k, cache of v, slots): each row goes to its slot, in the cache's own data type."""
    k, v, cache, slots = args.need(0), args.need(1), args.need(2), args.need(4)
    cost = movement.store_rows([k, v], cache.dtype, slots)
    return op_cost(args, "copy", cost, dtype=k.dtype, shape=k.text)


OPS: dict[str, Handler] = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    **{f"_C::{name}": gated for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")},
    "_C::static_scaled_fp8_quant": static_quantize,
    "fbgemm::permute_pooled_embs": permuted,
    "fbgemm::permute_pooled_embs_auto_grad": permuted,
    "_C::rotary_embedding": rotary_embedding,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache,
    "_C_cache_ops::reshape_and_cache": reshape_and_cache,
}
