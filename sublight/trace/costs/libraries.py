"""Ops of serving libraries that traces are full of (vLLM's `_C`, fbgemm), where the arguments tell the cost."""

from __future__ import annotations

from sublight.trace.costs.shapes import Args, Handler, OpCost, Tensor, simple


def rms_norm(args: Args) -> OpCost:
    """(out, x, weight, eps)"""
    out, x, weight = args.need(0), args.need(1), args.need(2)
    return simple(
        args,
        "norm",
        reads=[x, weight],
        write_bytes=out.bytes,
        dtype=x.dtype,
        operations=4 * x.numel,
        shape=x.text,
    )


def fused_add_rms_norm(args: Args) -> OpCost:
    """(x, residual, weight, eps): both x and the residual are updated in place."""
    x, residual, weight = args.need(0), args.need(1), args.need(2)
    written = x.bytes + residual.bytes
    return simple(
        args,
        "norm",
        reads=[x, residual, weight],
        write_bytes=written,
        dtype=x.dtype,
        operations=5 * x.numel,
        shape=x.text,
    )


def into(family: str, operations: int) -> Handler:
    """(out, x): elementwise from one into the other; gates halve the last dimension."""

    def cost(args: Args) -> OpCost:
        out, x = args.need(0), args.need(1)
        return simple(
            args,
            family,
            reads=[x],
            write_bytes=out.bytes,
            dtype=x.dtype,
            operations=operations * out.numel,
            shape=x.text,
        )

    return cost


def permuted(args: Args) -> OpCost:
    x = args.need(0)
    return simple(args, "copy", reads=[x], write_bytes=x.bytes, dtype=x.dtype, shape=x.text)


def rotary_embedding(args: Args) -> OpCost:
    """(positions, q, k, head size, table of cosines and sines): q and k are turned in place."""
    positions, q = args.need(0), args.need(1)
    turned = [q, *([k] if (k := args.tensor(2)) is not None else [])]
    written = sum(tensor.bytes for tensor in turned)
    numel = sum(tensor.numel for tensor in turned)
    return simple(
        args,
        "pointwise",
        reads=[positions, *turned],
        write_bytes=written,
        dtype=q.dtype,
        operations=3 * numel,
        shape=q.text,
    )


def reshape_and_cache(args: Args) -> OpCost:
    """(k, v, cache of k, cache of v, slots): each row goes to its slot, in the cache's own data type."""
    k, v, cache, slots = args.need(0), args.need(1), args.need(2), args.need(4)
    rows: list[Tensor] = [k, v]
    written = sum(tensor.numel for tensor in rows) * cache.itemsize
    return simple(args, "copy", reads=[*rows, slots], write_bytes=written, dtype=k.dtype, shape=k.text)


OPS: dict[str, Handler] = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    **{f"_C::{name}": into("pointwise", 2) for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")},
    "_C::static_scaled_fp8_quant": into("pointwise", 1),
    "fbgemm::permute_pooled_embs": permuted,
    "fbgemm::permute_pooled_embs_auto_grad": permuted,
    "_C::rotary_embedding": rotary_embedding,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache,
    "_C_cache_ops::reshape_and_cache": reshape_and_cache,
}
