"""Attention: softmax(q k^T scale) v, forward and backward, as a ladder of named steps.

The steps and who takes what are in `ladder.py`; here is what a user calls, its gradients, and the op's record.

A causal mask is aligned to the end: the last query sees the last key, as when new tokens follow a cache. PyTorch's
`is_causal` aligns the first query to the first key, which differs where the lengths do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import attention as cost
from sublight.errors import BadInput
from sublight.op import Op, Plan, Provider
from sublight.ops.attention.extended import (
    attention_extended,
    check_extras,
    composed,
    extended_backward,
    extras_of,
    why_no_way,
)
from sublight.ops.attention.extras import NONE, Extras
from sublight.ops.attention.ladder import (
    WAYS,
    check,
    check_numbers,
    check_tensors,
    plan_backward,
    plan_forward,
    scale_of,
    why_not,
    why_torch,
    why_torch_with_lse,
    widened,
)
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.mods import are_given, check_mods, leaning, same_document
from sublight.ops.attention.parts import result_strides
from sublight.ops.attention.reference import attend, attend_with_lse
from sublight.ops.kernels.rows import generator_for
from sublight.ops.record.autocast import under_autocast
from sublight.ops.record.gradient import Gradient, vjp
from sublight.ops.record.library import Registered
from sublight.timing import Thunk


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    **mods: Any,
) -> torch.Tensor:
    if alibi_slopes is None and sinks is None and not dropout and not mods:
        return attend(q, k, v, Mask(causal=causal, window=window or 0), softcap, scale_of(q, scale))
    own = check_mods(q, q.shape[0], causal, window or 0, **mods)
    how: tuple[Any, ...] = (*own, False, dropout, causal, window or 0, softcap, scale_of(q, scale))
    return composed(q, k, v, alibi_slopes, sinks, seed, *how)[0]


def _room_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty_strided(x.shape, result_strides(x))


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Inputs:
    sums = (2 if q.dtype == torch.float32 else 0, *q.shape[:3])
    return _room_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(sums, dtype=torch.float32)


OPTIONS = "bool causal, int window, float softcap, float scale, str provider"
OPTION_NAMES = ("causal", "window", "softcap", "scale", "provider")
_backward = Registered(
    schema="attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor sums, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    plan=plan_backward,
    fake=lambda dout, dlse, q, k, v, *rest: (_room_like(q), _room_like(k), _room_like(v)),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BackwardOf:
    """Stands for `Gradient.by`: a call without lse has no gradient of it, and one of out may be missing."""

    results: int

    def call(self, *args: Any) -> Any:
        dout, dlse = (args[0], None) if self.results == 1 else args[:2]
        q, k, v, out, *rest, provider = args[self.results :]
        if provider == "hopper" and torch.are_deterministic_algorithms_enabled():
            provider = "flash"  # hopper's adds up the gradient of q in whatever order its programs come by
        dout = torch.zeros_like(out) if dout is None else dout
        return _backward.call(dout, None if dlse is None else dlse.contiguous(), q, k, v, out, *rest, provider)


def _gradient(results: int) -> Gradient:
    return Gradient(
        by=_BackwardOf(results=results),
        saves=("q", "k", "v", "out", "lse", "sums"),
        gives=("q", "k", "v"),
        options=OPTION_NAMES,
        by_torch=partial(_by_torch, results),
    )


def _by_torch(results: int, saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Through the composition op by op: PyTorch's fused attention cannot be differentiated twice."""
    args = [saved[name] for name in ("q", "k", "v", *OPTION_NAMES)]
    return vjp(_reference_with_lse, args, (*grads, *(None,) * (2 - results)))[:3]


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, softcap: float, scale: float,
    provider: str,
) -> torch.Tensor:  # fmt: skip
    return attend(q, k, v, Mask(causal=causal, window=window), softcap, scale)


def _reference_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, softcap: float, scale: float,
    provider: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return attend_with_lse(q, k, v, Mask(causal=causal, window=window), softcap, scale)


_attention = Registered(
    schema=f"attention(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor out, Tensor lse, Tensor sums)",
    reference=_reference,
    theirs="torch.nn.functional.scaled_dot_product_attention",
    why_torch=why_torch,
    results=1,
    plan=plan_forward,
    fake=_fake,
    gradient=_gradient(1),
)
_attention_lse = Registered(
    schema=f"attention_lse(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor out, Tensor lse, Tensor sums)",
    reference=_reference_with_lse,
    theirs="torch, op by op",
    why_torch=why_torch_with_lse,
    results=2,
    plan=plan_forward,
    fake=_fake,
    gradient=_gradient(2),
)


def _arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, softcap: float,
    scale: float | None, provider: str, extras: Extras = NONE,
) -> tuple[Any, ...]:  # fmt: skip
    check_numbers(window, softcap, scale)
    check(q, k, v, window or 0, softcap, provider)
    how = bool(causal), window or 0, float(softcap), float(scale_of(q, scale))
    if provider and (reason := why_not(provider, q, k, v, *how, extras)):
        raise BadInput(f"attention's {provider} does not take this ({reason}): leave provider out")
    return q, k, v, *how, provider


def _decided(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, window: int | None = None,
    softcap: float = 0.0, scale: float | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, dropout: float = 0.0, seed: torch.Tensor | int | None = None,
    provider: str = "", return_lse: bool = False, deterministic: bool = False, batch_invariant: bool = False,
    **mods: Any,
) -> tuple[Registered, tuple[Any, ...]]:  # fmt: skip
    """The op that a call goes to, and its arguments."""
    check_tensors(q=q, k=k, v=v)
    q, k, v = under_autocast(*widened(q, k, v))
    if deterministic or batch_invariant:
        provider = _fixed(provider, q, k, v, "batch_invariant" if batch_invariant else "deterministic")
    if (
        not batch_invariant
        and alibi_slopes is None
        and sinks is None
        and not dropout
        and seed is None
        and not are_given(mods)
    ):
        op = _attention_lse if return_lse else _attention
        return op, _arguments(q, k, v, causal, window, softcap, scale, provider)
    own = check_mods(q, q.shape[0], bool(causal), window or 0, **mods)
    extras = extras_of(*(alibi_slopes, sinks, None, *own, batch_invariant, dropout))
    q, k, v, *how, _ = _arguments(q, k, v, causal, window, softcap, scale, provider, extras)
    return attention_extended, (
        q,
        k,
        v,
        *check_extras(q, q.shape[1], alibi_slopes, sinks, dropout, seed, own, batch_invariant),
        *how,
    )


def _fixed(provider: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, word: str) -> str:
    """The kernels whose passes write no place twice, and whose tiles do not depend on the batch."""
    if provider not in ("", "flash"):
        raise BadInput(f"{word}=True with provider={provider!r}: flash alone is, leave provider out")
    if reason := why_no_way(q, k, v):
        if word == "deterministic" and q.device.type == "cpu":
            return ""  # PyTorch's ops, which are
        raise BadInput(f"{word}=True, which flash alone is, does not take this ({reason}): use shapes that it takes")
    return "flash"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | int | None = None,
    prefix: torch.Tensor | int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    score_mod_grad: Any = None,
    mod_tensors: tuple[torch.Tensor, ...] = (),
    deterministic: bool = False,
    batch_invariant: bool = False,
    provider: str = "",
    return_lse: bool = False,
) -> Any:
    """softmax(q kᵀ · scale) v for q (batch, heads, q_len, head_dim), k and v (batch, kv_heads, kv_len, head_dim).

    Fewer heads of keys than of queries are shared (GQA). `causal` hides keys behind a query, where the last query
    stands at the last key; `window` hides those that are so many places away or more; `softcap` squeezes scores to
    softcap · tanh(score / softcap). A query that sees no key gets zeros. With `return_lse` the logarithm of each
    query's sum of exponentials comes as well, (batch, heads, q_len) in fp32. `provider` names a kernel of ours:
    `naive`, `online`, `flash`, `hopper`; without it the call goes where an H200 was faster (`sublight.why` says where).
    q, k and v in fp8 are read as bf16, and so is the result: q's scale times k's goes into `scale`, v's to the result.

    `alibi_slopes` (heads,) take slope · distance from every score; `sinks` (heads,), which have a gradient, are scores
    of a key without a value; `dropout` is the share of weights that are dropped, by draws that depend on `seed` (a
    number, or int64 (1,) on the device; else one is drawn) alone. With `prefix`, a number or int32 (batch,), every
    query sees the keys before it, whatever `causal` hides (prefix-LM). `mask_mod` and `score_mod` are functions of your
    own under @triton.jit (`ops/attention/mods.py`), `score_mod_grad` the derivative of the second by the score where it
    is beyond us, `mod_tensors` up to two tensors that they read. All these run on `flash` alone.

    With `deterministic` gradients have the same bits in every run; with `batch_invariant` a batch entry's result also
    has those of any other batch, and of `paged_prefill` over the same keys in the same mode. Both run on `flash`.
    """
    op, args = _decided(
        q, k, v, causal, window, softcap, scale, alibi_slopes, sinks, dropout, seed, provider, return_lse,
        deterministic, batch_invariant, prefix=prefix, score_mod=score_mod, mask_mod=mask_mod,
        score_mod_grad=score_mod_grad, mod_tensors=mod_tensors,
    )  # fmt: skip
    results = op.call(*args)
    return results[0] if op is attention_extended and not return_lse else results


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Plan:
    """What `attention` runs with these arguments, and why."""
    op, args = _decided(q, k, v, **options)
    return op.decide(*args)


def launch_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Inputs:
    """A step's backward kernels, on what its forward kernels give."""
    op, args = _decided(q, k, v, **({"provider": "flash"} | options))
    out, lse, sums = op.by_kernels(*args)
    backward = extended_backward if op is attention_extended else _backward
    return backward.by_kernels(dout, None, q, k, v, out, lse, sums, *args[3:])  # type: ignore[no-any-return]


def _with_extras(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Inputs:
    """Every extra at once, forward and backward, for whoever compiles the kernels."""
    slopes, sinks = (torch.zeros(q.shape[1], device=q.device) for _ in range(2))
    extras = {"alibi_slopes": slopes, "sinks": sinks, "dropout": 0.1, "seed": 1}
    return launch_backward(torch.empty_like(q), q, k, v, **options, **extras)


def _with_functions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Inputs:
    """A caller's functions, and a prefix, for whoever compiles the kernels."""
    documents = torch.zeros(q.shape[2], dtype=torch.int32, device=q.device)
    own = {"mask_mod": same_document, "score_mod": leaning, "mod_tensors": (documents,), "prefix": 1, "causal": True}
    return launch_backward(torch.empty_like(q), q, k, v, **(options | own))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator, kind = generator_for(device, seed), getattr(torch, dtype)

    def random(heads: str, length: str) -> torch.Tensor:
        size = (shape["batch"], shape[heads], shape[length], shape["head_dim"])
        return torch.randn(size, generator=generator, device=device, dtype=kind)

    return random("heads", "q_len"), random("kv_heads", "kv_len"), random("kv_heads", "kv_len")


def peer(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> Thunk:
    """PyTorch's fused attention by one of its backends."""

    def call() -> torch.Tensor:
        with sdpa_kernel([backend]):
            return reference(q, k, v, causal=causal)

    return call


_shapes = partial(shapes, "batch heads kv_heads q_len kv_len head_dim causal")


def options_of(shape: Shape) -> Mapping[str, Any]:
    return {"causal": bool(shape["causal"])}


ATTENTION = Op(
    name="attention",
    summary="softmax of q times k, times v; causal, windowed, capped, heads shared",
    reference=reference,
    call=attention,
    plan=plan,
    providers={
        name: Provider(
            launch=partial(attention, provider=name),
            backward=partial(launch_backward, provider=name),
            why_not=partial(why_not, name),
            kernels=way.kernels,
            summary=way.summary,
            variants=(_with_extras, _with_functions) if name == "flash" else (),
        )
        for name, way in WAYS.items()
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        *((4, 16, 16, length, length, 128, causal) for length in (4096, 16384) for causal in (0, 1)),
        *((4, 16, 16, 4096, 4096, 64, causal) for causal in (0, 1)),
        *((4, 32, 8, 4096, 4096, 128, 1), (1, 32, 8, 512, 8192, 128, 1), (4, 16, 16, 1024, 1024, 256, 1)),
    ),
    test_shapes=_shapes(
        *((1, 1, 1, 1, 3, 32, 1), (2, 2, 1, 17, 17, 32, 1), (1, 2, 2, 33, 50, 64, 0), (1, 2, 1, 50, 33, 64, 1)),
        *((1, 1, 1, 129, 127, 32, 0), (1, 4, 2, 20, 129, 80, 1), (1, 1, 1, 18, 40, 256, 1)),
    ),
    options={"causal": (1, 0)},
    call_options=options_of,
    peers={
        "cudnn": partial(peer, SDPBackend.CUDNN_ATTENTION),
        "flash2": partial(peer, SDPBackend.FLASH_ATTENTION),
    },
    batch="batch",
    library_args=lambda q, k, v, causal=False: (q, k, v, causal, 0, 0.0, scale_of(q, None), "flash"),
)
