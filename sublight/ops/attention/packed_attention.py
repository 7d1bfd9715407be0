"""Attention over sequences of any lengths that lie one after another, without padding and without a look at them.

`cu_seqlens` says where each sequence begins, and stays on the device: no host waits for it, and a CUDA graph stays good
while lengths change. The kernels are those of `flash` (`flash.py`), in which each program first finds its sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import packed_attention as cost
from sublight.cost.attention import packed_lengths
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.attention import flash
from sublight.ops.attention.extended import (
    NO_EXTRAS,
    check_extras,
    composed_packed,
    packed,
    packed_backward,
    why_no_way,
)
from sublight.ops.attention.ladder import BACKWARD_KERNELS, check, check_numbers, scale_of
from sublight.ops.attention.mods import check_mods
from sublight.ops.kernels.rows import generator_for
from sublight.ops.record.autocast import under_autocast


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
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
    own = check_mods(q, len(cu_seqlens_q) - 1, causal, window or 0, **mods)
    extras = (alibi_slopes, sinks, seed, *own, False, dropout)
    how = (causal, window or 0, softcap, scale_of(q[None], scale))
    return composed_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *extras, *how)[0]


def _arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None,
    causal: bool = False, window: int | None = None, softcap: float = 0.0, scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, dropout: float = 0.0,
    seed: torch.Tensor | int | None = None, provider: str = "", **mods: Any,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v = under_autocast(q, k, v)
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise BadInput(f"{name} has {x.dim()} dimensions: use 3, (tokens, heads, head_dim)")
    check_numbers(window, softcap, scale)
    check(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], window or 0, softcap, "")
    if provider not in ("", "flash"):
        raise BadInput(f"unknown provider {provider!r} of packed_attention: use 'flash', or leave it out")
    if provider and (reason := why_no_way(q, k, v)):
        raise BadInput(f"packed_attention's kernels do not take this ({reason}): leave provider out for PyTorch's")
    for name, x, tokens in (("cu_seqlens_q", cu_seqlens_q, len(q)), ("cu_seqlens_k", cu_k, len(k))):
        if x.dim() != 1 or len(x) < 2 or x.dtype not in (torch.int32, torch.int64) or x.device != q.device:
            wanted = f"int32 (sequences + 1,) on {q.device}"
            raise BadInput(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: use {wanted}")
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            check_starts(name, x, tokens)
    if len(cu_seqlens_q) != len(cu_k):
        raise BadInput(f"{len(cu_seqlens_q) - 1} sequences of queries, {len(cu_k) - 1} of keys: use as many of both")
    own = check_mods(q, len(cu_k) - 1, bool(causal), window or 0, **mods)
    extras = check_extras(q, q.shape[1], alibi_slopes, sinks, dropout, seed, own)
    starts = (x.contiguous() for x in (cu_seqlens_q, cu_k))
    return q, k, v, *starts, *extras, bool(causal), window or 0, float(softcap), float(scale_of(q[None], scale))


def check_starts(name: str, starts: torch.Tensor, tokens: int) -> None:
    """Refuse starts that do not begin at 0, fall, or pass the tokens. On a GPU the host waits for the values."""
    numbers = starts.tolist()
    wanted = f"use numbers that rise from 0 to {tokens} at most"
    for place, (before, number) in enumerate(pairwise(numbers), 1):
        if number < before:
            raise BadInput(f"{name}[{place}] is {number}, below the {before} before it: {wanted}")
    if numbers[0] != 0 or numbers[-1] > tokens:
        raise BadInput(f"{name} goes from {numbers[0]} to {numbers[-1]}: {wanted}")


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
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
    provider: str = "",
    return_lse: bool = False,
) -> Any:
    """`attention` within each of several sequences: q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim).

    Sequence i has the queries from cu_seqlens_q[i] to cu_seqlens_q[i + 1], and the keys by `cu_seqlens_k` alike
    (without it, by the same numbers). Tokens past the last sequence get zeros and no gradient. The numbers stay on the
    device and are not looked at there; on the CPU bad ones are refused. Everything else is as in `attention`; lse is
    (heads, tokens). On a GPU the call runs on `flash`: PyTorch's way would wait for the lengths.
    """
    args = _arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, scale, alibi_slopes, sinks, dropout, seed,
        provider, prefix=prefix, score_mod=score_mod, mask_mod=mask_mod, score_mod_grad=score_mod_grad,
        mod_tensors=mod_tensors,
    )  # fmt: skip
    out, lse = packed.call(*args)
    return (out, lse) if return_lse else out


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `packed_attention` runs with these arguments, and why."""
    return packed.decide(*_arguments(*tensors, **options))


def launch(*tensors: Any, **options: Any) -> torch.Tensor:
    return packed.by_kernels(*_arguments(*tensors, **options))[0]  # type: ignore[no-any-return]


def launch_backward(dout: torch.Tensor, *tensors: Any, **options: Any) -> Inputs:
    """The backward kernels, on what the forward kernels give: of q, k and v, and of sinks where there are some."""
    args = _arguments(*tensors, **options)
    results = packed.by_kernels(*args)
    *found, dsinks = packed_backward.by_kernels(dout, None, *args[:3], *results, *args[3:])
    return (*found, dsinks) if dsinks.numel() else tuple(found)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Sequences of all lengths from short to long, with a few tokens behind them that are nobody's."""
    generator, kind = generator_for(device, seed), getattr(torch, dtype)
    lengths = packed_lengths(shape)

    def random(heads: str, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, shape[heads], shape["head_dim"], generator=generator, device=device, dtype=kind)

    def starts(each: list[int]) -> torch.Tensor:
        return torch.tensor([sum(each[:i]) for i in range(len(each) + 1)], dtype=torch.int32).to(device)

    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    q, k, v = random("heads", sum(queries)), random("kv_heads", sum(keys)), random("kv_heads", sum(keys))
    return q, k, v, starts(queries), starts(keys)


_shapes = partial(shapes, "batch heads kv_heads q_len kv_len head_dim causal ragged")


def options_of(shape: Shape) -> Mapping[str, Any]:
    return {"causal": bool(shape["causal"])}


def _library_args(*tensors: Any, causal: bool = False) -> tuple[Any, ...]:
    return *tensors, *NO_EXTRAS, causal, 0, 0.0, scale_of(tensors[0][None], None)


PACKED_ATTENTION = Op(
    name="packed_attention",
    summary="attention within sequences of any lengths that lie one after another",
    reference=reference,
    call=packed_attention,
    plan=plan,
    providers={
        "flash": Provider(
            launch=launch,
            backward=launch_backward,
            why_not=lambda q, k, v, *starts: why_no_way(q, k, v),
            kernels=(
                Kernel(jit=flash._flash_kernel, spills="eight bytes on sm_80: addresses where others have copies"),
                *BACKWARD_KERNELS,
            ),
            variants=(partial(launch, window=512),),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        (8, 16, 16, 4096, 4096, 128, 1, 1), (16, 32, 8, 2048, 2048, 128, 1, 1), (64, 16, 16, 512, 512, 64, 0, 1)
    ),
    test_shapes=_shapes(
        *((1, 2, 1, 3, 5, 16, 1, 0), (3, 2, 1, 18, 20, 16, 1, 1), (2, 2, 2, 33, 17, 24, 0, 0)),
    ),
    options={"causal": (1, 0), "ragged": (1, 0)},
    call_options=options_of,
    batch="",
    library_args=_library_args,
)
