"""Attention's weights once more, in the backward passes: from scores and the logarithm of their sums."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.ops.attention.mods import modded, slope_at
from sublight.ops.attention.parts import (
    scores_of,
    weights_of,
)


@triton.jit
def weights_again(
    product, top, total, scale, softcap, seen, bias, entry, heads, query, key, kv_len, a_ptr, b_ptr,
    ALIBI: tl.constexpr, SCORE_MOD: tl.constexpr, SLOPE_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """exp(score - lse), and the same times the slope of a soft cap or of the caller's function; of what is not seen,
    zero."""
    scores = scores_of(product, scale, softcap, SOFTCAP, EXACT)
    biased = scores - bias if ALIBI else scores
    if SCORE_MOD is not None:
        changed = modded(biased, entry, heads, query, key, kv_len, a_ptr, b_ptr, SCORE_MOD, MOD_TENSORS, EXACT)
        weights = tl.where(changed == -float("inf"), 0.0, weights_of(changed, top, total, EXACT))
    else:
        weights = weights_of(biased, top, total, EXACT)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    slope = weights
    if SOFTCAP:
        share = scores / softcap if EXACT else scores * (0.6931471805599453 / softcap)  # the hyperbolic tangent again
        slope = weights * (1.0 - share * share)
    if SCORE_MOD is not None:
        steep = slope_at(biased, entry, heads, query, key, kv_len, a_ptr, b_ptr, SLOPE_MOD, MOD_TENSORS, EXACT)
        slope = tl.where(weights == 0.0, 0.0, slope * steep)  # where nothing is seen the slope may be anything
    return weights, slope
