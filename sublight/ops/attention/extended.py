"""Attention with ALiBi, sinks, dropout and packed sequences, as PyTorch knows it: `flash` and its gradients.

PyTorch has these only op by op, with every score in memory (its fused attention drops weights, too, but by draws that
nobody else can repeat). So a call goes to our kernels wherever they take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.errors import BadInput
from sublight.op import Buffer, Plan
from sublight.ops.attention import flash, flash_backward
from sublight.ops.attention.delta import delta_step, sinks_step
from sublight.ops.attention.extras import Extras, kept_by_torch
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.mods import in_torch, mod_arguments, mods_named, slope_named
from sublight.ops.attention.parts import Sizes, result_strides, why_no_head
from sublight.ops.kernels.rows import why_no_kernel
from sublight.ops.record.call import wants_grad
from sublight.ops.record.gradient import Gradient, vjp
from sublight.ops.record.library import Registered

Pair = tuple[torch.Tensor, torch.Tensor]
EXTRA_NAMES = ("alibi_slopes", "sinks", "seed", "prefix", "mod_a", "mod_b")
OPTION_NAMES = ("mods", "invariant", "dropout", "causal", "window", "softcap", "scale")
OPTIONS = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor? prefix, Tensor? mod_a, Tensor? mod_b, str mods, "
    "bool invariant, float dropout, bool causal, int window, float softcap, float scale"
)
EXTRAS = len(EXTRA_NAMES) + 3  # with functions, mode and dropout: of an op's arguments, before the mask
NO_EXTRAS: tuple[Any, ...] = (*(None,) * len(EXTRA_NAMES), "", False, 0.0)
RESULTS = "(Tensor out, Tensor lse, Tensor sums)"
GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"


def composed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, sinks: torch.Tensor | None,
    seed: torch.Tensor | None, prefix: torch.Tensor | None, mod_a: torch.Tensor | None, mod_b: torch.Tensor | None,
    mods: str, invariant: bool, dropout: float, causal: bool, window: int, softcap: float, scale: float,
    sequence: int = 0,
) -> Pair:  # fmt: skip
    """The result and the logarithms of the sums, op by op; `sequence` is the number of the first in the batch."""
    batch, heads, q_len, _ = q.shape
    kv_len, share, mask = k.shape[2], q.shape[1] // k.shape[1], Mask(causal=causal, window=window)
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q @ k.mT) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if slopes is not None:
        position, key = torch.arange(q_len, device=q.device) + (kv_len - q_len), torch.arange(kv_len, device=q.device)
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (position[:, None] - key).abs()
    own = mods_named(mods)
    tensors = tuple(x for x in (mod_a, mod_b) if x is not None)
    numbers = mod_arguments(batch, heads, q_len, kv_len, tensors, q.device, sequence) if mods else ()
    if own.score is not None:
        scores = in_torch(own.score, scores)(scores, *numbers)
    seen = mask.matrix(q_len, kv_len, q.device)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device) if seen is None else seen
    if prefix is not None:
        first = prefix[sequence : sequence + batch, None, None, None]
        seen = seen | (torch.arange(kv_len, device=q.device) < first)
    if own.mask is not None:
        seen = seen & in_torch(own.mask, scores)(*numbers)
    seen = seen.broadcast_to(scores.shape)
    if own.score is not None:
        seen = seen & (scores != -torch.inf)
    blind = ~seen.any(-1, keepdim=True) if sinks is None else seen.new_zeros(*seen.shape[:-1], 1)
    scores = scores.masked_fill(~seen & ~blind, -torch.inf).masked_fill(blind, 0.0)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(batch, heads, q_len, 1)
        scores = torch.cat([scores, sink], 3)
    weights = torch.softmax(scores, -1)[..., :kv_len].masked_fill(blind, 0.0)
    if dropout and seed is not None:
        entries = torch.arange(batch * heads, device=q.device) + sequence * heads
        stays = kept_by_torch(seed, entries, q_len, kv_len, dropout).view(weights.shape)
        weights = torch.where(stays, weights * (1 / (1 - dropout)), 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(blind[..., 0], -torch.inf)
    return weights.to(q.dtype) @ v, lse


def composed_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any
) -> Pair:
    """Sequence by sequence, for which the host waits for their lengths; tokens past the last one get zeros."""
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    outs, logs = [], []
    for i, (q_start, q_end) in enumerate(pairwise(starts_q)):
        keys = slice(starts_k[i], starts_k[i + 1])
        own = tuple(x.transpose(0, 1)[None] for x in (q[q_start:q_end], k[keys], v[keys]))
        args: tuple[Any, ...] = (*own, *rest, i)
        out, lse = composed(*args)
        outs.append(out[0].transpose(0, 1))
        logs.append(lse[0])
    past = q[starts_q[-1] :]
    outs.append(torch.zeros_like(past[..., : v.shape[2]]))
    logs.append(torch.zeros(q.shape[1], len(past), dtype=logs[0].dtype, device=q.device))
    return torch.cat(outs), torch.cat(logs, 1)


def extras_of(
    slopes: torch.Tensor | None, sinks: torch.Tensor | None, seed: torch.Tensor | None, prefix: torch.Tensor | None,
    mod_a: torch.Tensor | None, mod_b: torch.Tensor | None, mods: str, invariant: bool,
    dropout: float,
) -> Extras:  # fmt: skip
    tensors = sum(x is not None for x in (mod_a, mod_b))
    return Extras(0, slopes is not None, sinks is not None, dropout, prefix is not None, mods, tensors, invariant)


def plan_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Plan:
    extras, (causal, window, softcap, scale) = extras_of(*rest[:EXTRAS]), rest[EXTRAS:]
    if wants_grad((q, k, v)):
        slope_named(extras.mods)  # one that there is not is refused now, not by the backward pass
    return flash.plan(q, k, v, Mask(causal=causal, window=window), softcap, scale, extras)


def plan_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sums: torch.Tensor, *rest: Any,
) -> Plan:  # fmt: skip
    extras, (causal, window, softcap, scale) = extras_of(*rest[:EXTRAS]), rest[EXTRAS:]
    mask = Mask(causal=causal, window=window)
    return flash_backward.plan_backward(dout, dlse is not None, q, k, v, out, mask, softcap, scale, extras)


def _packed_sizes(q: torch.Tensor, k: torch.Tensor) -> Sizes:
    """All sequences as one."""
    return Sizes(1, q.shape[1], k.shape[1], q.shape[0], k.shape[0], q.shape[2])


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of (tokens, heads, head_dim) for the kernels: of the batch, which has one entry, of head and of token."""
    _, heads, size = x.shape
    return (0, x.stride(1), x.stride(0)) if x.stride(2) == 1 else (0, size, heads * size)


def _packed_copies(**tensors: torch.Tensor) -> tuple[str, ...]:
    return tuple(name for name, x in tensors.items() if x.stride(-1) != 1)


def _sums(q: torch.Tensor) -> dict[str, Buffer]:
    shape = (q.shape[1], q.shape[0])
    parts = 2 if q.dtype == torch.float32 else 0
    return {
        "lse": Buffer(shape=shape, dtype=torch.float32, is_zero=True),
        "sums": Buffer(shape=(parts, *shape), dtype=torch.float32, is_zero=True),
    }


def _zeros(x: torch.Tensor) -> Buffer:
    """Tokens past the last sequence are nobody's: no program writes them."""
    return Buffer(shape=tuple(x.shape), dtype=x.dtype, is_zero=True)


def plan_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any
) -> Plan:
    causal, window, softcap, scale = rest[EXTRAS:]
    sizes, mask, sequences = _packed_sizes(q, k), Mask(causal=causal, window=window), cu_q.shape[0] - 1
    extras = extras_of(*rest[:EXTRAS])._replace(sequences=sequences)
    if wants_grad((q, k, v)):
        slope_named(extras.mods)
    tile = flash.tile_with(extras, sizes, q.element_size(), facts(q))
    programs = (sizes.q_len // tile.rows + sequences) * sizes.heads
    _, heads, size = q.shape
    strides = (*_strides(q), *_strides(k), *_strides(v), 0, size, heads * size)
    return Plan(
        provider="flash",
        reason="a tile of one sequence's queries on chip; each program finds its sequence on the device",
        copies=_packed_copies(q=q, k=k, v=v),
        buffers={"out": _zeros(q), **_sums(q)},
        steps=(flash.forward_step(q, sizes, tile, programs, strides, mask, scale, softcap, extras, {}),),
        outputs=("out", "lse", "sums"),
    )


def plan_packed_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sums: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any,
) -> Plan:  # fmt: skip
    causal, window, softcap, scale = rest[EXTRAS:]
    sizes, mask, sequences = _packed_sizes(q, k), Mask(causal=causal, window=window), cu_q.shape[0] - 1
    extras = extras_of(*rest[:EXTRAS])._replace(sequences=sequences)
    tiles = flash_backward.tiles_for(sizes, q.element_size(), facts(q))
    programs = (
        (sizes.kv_len // tiles[0].rows + sequences) * sizes.kv_heads,
        (sizes.q_len // tiles[1].rows + sequences) * sizes.heads,
    )
    size = sizes.head_dim
    like_q, like_k = (0, size, sizes.heads * size), (0, size, sizes.kv_heads * size)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(dout))
    keys, queries = flash_backward.backward_steps(
        sizes, q, tiles, programs, strides, (like_q, like_k, like_k), mask, scale, softcap, dlse is not None, extras,
        ({}, {}),
    )  # fmt: skip
    delta = delta_step(sizes, _strides(dout), like_q, dlse is not None)
    return Plan(
        provider="flash",
        reason="weights again from their logarithms; each program finds its sequence on the device",
        copies=_packed_copies(dout=dout, q=q, k=k, v=v),
        buffers={
            "dq": _zeros(q),
            "dk": _zeros(k),
            "dv": _zeros(v),
            "delta": Buffer(shape=(q.shape[1], q.shape[0]), dtype=torch.float32, is_zero=True),
            "dsinks": Buffer(shape=(sizes.heads if extras.has_sinks else 0,), dtype=torch.float32),
        },
        steps=(
            *flash_backward.in_order(q, delta, keys, queries),
            *((sinks_step(q, sizes),) if extras.has_sinks else ()),
        ),
        outputs=("dq", "dk", "dv", "dsinks"),
    )


def _fake_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty((0,) if sinks is None else sinks.shape, dtype=torch.float32)


def _room_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty_strided(x.shape, result_strides(x))


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    sums = (2 if q.dtype == torch.float32 else 0, *q.shape[:3])
    return _room_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(sums, dtype=torch.float32)


def _fake_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    logs = (q.shape[1], q.shape[0])
    sums = (2 if q.dtype == torch.float32 else 0, *logs)
    return q.new_empty(q.shape), q.new_empty(logs, dtype=torch.float32), q.new_empty(sums, dtype=torch.float32)


_BEFORE = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor sums"
_CU = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
extended_backward = Registered(
    schema=f"attention_extended_backward({_BEFORE}, {OPTIONS}) -> {GRADIENTS}",
    plan=plan_backward,
    fake=lambda dout, dlse, q, k, v, out, lse, sums, slopes, sinks, *rest: (
        *map(_room_like, (q, k, v)),
        _fake_sinks(q, sinks),
    ),
)
packed_backward = Registered(
    schema=f"packed_attention_backward({_BEFORE}, {_CU}, {OPTIONS}) -> {GRADIENTS}",
    plan=plan_packed_backward,
    fake=lambda dout, dlse, q, k, v, out, lse, sums, cu_q, cu_k, slopes, sinks, *rest: (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        _fake_sinks(q, sinks),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BackwardOf:
    """Stands for `Gradient.by`: a gradient of a result may be missing, and without sinks they have none."""

    op: Registered

    def call(self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any) -> Any:
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else dlse.contiguous()
        *found, dsinks = self.op.call(dout, dlse, q, k, v, out, *rest)
        has_sinks = rest[self.op.arguments.index("sinks") - 6] is not None
        return *found, dsinks if has_sinks else None


def _gradient(by: Registered, reference: Any, *more: str) -> Gradient:
    def by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        names = ("q", "k", "v", *more, *EXTRA_NAMES, *OPTION_NAMES)
        found = dict(zip(names, vjp(reference, [saved[name] for name in names], grads), strict=True))
        return tuple(found[name] for name in ("q", "k", "v", "sinks"))

    return Gradient(
        by=_BackwardOf(op=by),
        saves=("q", "k", "v", "out", "lse", "sums", *more, *EXTRA_NAMES),
        gives=("q", "k", "v", "sinks"),
        options=OPTION_NAMES,
        by_torch=by_torch,
    )


def _why_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> str:
    return why_no_way(q, k, v)


def why_no_way(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Why our kernels do not take these; empty where they do."""
    if reason := why_no_kernel(q):
        return reason
    if not q.numel() or not k.numel():
        return "nothing to do for a tensor without elements"
    if v.shape[-1] != q.shape[-1]:
        return f"values of {v.shape[-1]} beside keys of {q.shape[-1]}: ours have one size of head"
    return why_no_head(q.shape[-1])


attention_extended = Registered(
    schema=f"attention_extended(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> {RESULTS}",
    reference=composed,
    theirs="torch, op by op",
    why_torch=_why_torch,
    results=2,
    plan=plan_forward,
    fake=_fake,
    gradient=_gradient(extended_backward, composed),
)
packed = Registered(
    schema=f"packed_attention(Tensor q, Tensor k, Tensor v, {_CU}, {OPTIONS}) -> {RESULTS}",
    reference=composed_packed,
    theirs="torch, sequence by sequence",
    why_torch=_why_torch,
    results=2,
    plan=plan_packed,
    fake=_fake_packed,
    gradient=_gradient(packed_backward, composed_packed, "cu_seqlens_q", "cu_seqlens_k"),
)


def check_extras(
    q: torch.Tensor, heads: int, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None, dropout: float,
    seed: torch.Tensor | int | None, mods: tuple[Any, ...], invariant: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The extras as the ops take them, or one line on what is wrong."""
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None and (x.shape != (heads,) or x.device != q.device or not x.is_floating_point()):
            raise BadInput(f"{name} are {x.dtype} {tuple(x.shape)} on {x.device}: use float32 ({heads},) on {q.device}")
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise BadInput("alibi_slopes have no gradient here: detach() them")
    if not 0 <= dropout < 1:
        raise BadInput(f"dropout {dropout}: use a share of the weights from 0 to below 1")
    if seed is not None and not dropout:
        raise BadInput("a seed without dropout would change nothing: leave it out, or say dropout=")
    if seed is not None and not isinstance(seed, int | torch.Tensor):
        raise BadInput(f"seed is {type(seed).__name__}: use a whole number, or int64 (1,) on {q.device}")
    if isinstance(seed, torch.Tensor) and (seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != q.device):
        raise BadInput(f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: use int64 (1,) on {q.device}")
    if dropout and seed is None:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    elif isinstance(seed, int):
        seed = torch.full((1,), seed, dtype=torch.int64, device=q.device)
    prefix, a, b, name = mods  # of `check_mods`
    slopes, sink = (None if x is None else x.float().contiguous() for x in (alibi_slopes, sinks))
    return slopes, sink, seed, prefix, a, b, name, bool(invariant), float(dropout)
