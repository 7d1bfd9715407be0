"""New keys and values into their places in a cache of pages: read them once, write them once.

A token's place is one number, page * page_size + row, as the scheduler knows it; a negative one (padding) is skipped.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.backend.jit import next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.attention import kv_write as cost
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.record.library import Registered

Pair = tuple[torch.Tensor, torch.Tensor]


def reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> Pair:
    """By index. A token that is skipped writes what the first of the others does, which changes nothing and needs no
    look at the numbers."""
    page, places = k_cache.shape[1], k_cache.shape[0] * k_cache.shape[1]
    if not slots.numel():
        return k_cache, v_cache
    is_kept = (slots >= 0) & (slots < places)
    token = torch.where(is_kept, torch.arange(slots.numel(), device=slots.device), is_kept.int().argmax())
    place = slots[token].clamp(0, places - 1).long()
    for x, cache in ((k, k_cache), (v, v_cache)):
        at = place // page, place % page
        cache[at] = torch.where(is_kept.any(), x[token], cache[at])
    return k_cache, v_cache


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, places, k_token, k_head, v_token, v_head,
    k_page, k_row, k_cache_head, k_col, v_page, v_row, v_cache_head, v_col,
    PAGE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < places):
        col = tl.arange(0, BLOCK)
        head, at = col // HEAD_DIM, col % HEAD_DIM
        k = tl.load(k_ptr + token * k_token + head * k_head + at, mask=head < HEADS)
        v = tl.load(v_ptr + token * v_token + head * v_head + at, mask=head < HEADS)
        page, row = slot // PAGE, slot % PAGE
        tl.store(k_cache_ptr + page * k_page + row * k_row + head * k_cache_head + at * k_col, k, mask=head < HEADS)
        tl.store(v_cache_ptr + page * v_page + row * v_row + head * v_cache_head + at * v_col, v, mask=head < HEADS)


def plan_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, provider: str
) -> Plan:
    tokens, heads, head_dim = k.shape
    page = k_cache.shape[1]
    copies = tuple(name for name, x in (("k", k), ("v", v), ("slots", slots)) if x.stride(-1) != 1 and x.shape[-1] > 1)
    k_at, v_at = (
        (heads * head_dim, head_dim) if name in copies else x.stride()[:2] for name, x in (("k", k), ("v", v))
    )
    step = Step(
        _kv_write_kernel, (tokens,), k_cache.shape[0] * page, *k_at, *v_at, *k_cache.stride(), *v_cache.stride(),
        on="k v k_cache v_cache slots",
        PAGE=page, HEADS=heads, HEAD_DIM=head_dim, BLOCK=next_power_of_2(heads * head_dim), num_warps=4,
    )  # fmt: skip
    return Plan(provider="sublight", reason="one pass over the new tokens", copies=copies, steps=(step,))


def why_no_way(k: torch.Tensor, k_cache: torch.Tensor) -> str:
    if reason := why_no_kernel(k):
        return reason
    if not k.numel() or not k_cache.numel():
        return "nothing to do for a tensor without elements"
    return ""


def _why_torch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, provider: str
) -> str:
    return why_no_way(k, k_cache)


def _write_by_torch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, provider: str
) -> None:
    reference(k, v, k_cache, v_cache, slots)


_kv_write = Registered(
    schema="kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, str provider) -> ()",
    reference=_write_by_torch,
    theirs="torch.Tensor.index_put_",
    why_torch=_why_torch,
    plan=plan_write,
    fake=lambda *args: None,
)


def check(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, provider: str
) -> None:
    if k.dim() != 3 or k.shape != v.shape:
        raise BadInput(f"k {tuple(k.shape)} and v {tuple(v.shape)}: use (tokens, kv_heads, head_dim) for both")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        wanted = f"(pages, page_size, {k.shape[1]}, {k.shape[2]})"
        raise BadInput(f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}: use {wanted}")
    if slots.shape != k.shape[:1] or slots.dtype not in (torch.int32, torch.int64):
        raise BadInput(f"slots are {slots.dtype} {tuple(slots.shape)}: use int64 ({k.shape[0]},)")
    if len({(x.dtype, x.device) for x in (k, v, k_cache, v_cache)}) > 1 or slots.device != k.device:
        raise BadInput("k, v and the caches differ in data type or device: make them alike")
    if provider not in ("", "sublight"):
        raise BadInput(f"unknown provider {provider!r} of kv_write: use 'sublight', or leave it out")
    if provider and (reason := why_no_way(k, k_cache)):
        raise BadInput(f"kv_write's kernel does not take this ({reason}): leave provider out for PyTorch's")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, k_cache, v_cache)):
        raise BadInput("kv_write has no gradient: call it under torch.no_grad()")
    if k.device.type == "cpu" and not torch.compiler.is_compiling():
        places = k_cache.shape[0] * k_cache.shape[1]
        for token in (slots >= places).nonzero().flatten().tolist():
            raise BadInput(f"slots[{token}] is {slots[token]}: the cache has places 0 to {places - 1}")


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    provider: str = "",
) -> Pair:
    """k and v (tokens, kv_heads, head_dim) into caches (pages, page_size, kv_heads, head_dim), which are returned.

    Token i goes to row slots[i] % page_size of page slots[i] // page_size; a negative slot is skipped, as is, on a GPU,
    one past the cache (on the CPU that is an error). No two tokens may have the same slot.
    """
    check(k, v, k_cache, v_cache, slots, provider)
    _kv_write.call(k, v, k_cache, v_cache, slots, provider)
    return k_cache, v_cache


def plan(*tensors: Any, provider: str = "") -> Plan:
    """What `kv_write` runs with these arguments, and why."""
    k, v, k_cache, v_cache, slots = tensors
    check(k, v, k_cache, v_cache, slots, provider)
    return _kv_write.decide(*tensors, provider)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Tokens whose slots are in no order, in a cache with room for twice as many; each fifth is padding."""
    generator, kind = generator_for(device, seed), getattr(torch, dtype)
    tokens, page = shape["tokens"], shape["page"]
    pages = 2 * tokens // page + 1

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, shape["kv_heads"], shape["head_dim"], generator=generator, device=device, dtype=kind)

    k, v, k_cache, v_cache = random(tokens), random(tokens), random(pages, page), random(pages, page)
    if device == "meta":
        return k, v, k_cache, v_cache, torch.empty(tokens, dtype=torch.int64, device=device)
    slots = torch.randperm(pages * page, generator=generator, device=device)[:tokens]
    slots[4::5] = -1
    return k, v, k_cache, v_cache, slots


def _shapes(*sizes: tuple[int, ...]) -> tuple[Shape, ...]:
    return tuple(dict(zip(("tokens", "kv_heads", "head_dim", "page"), each, strict=True)) for each in sizes)


def _launch(*tensors: Any) -> Pair:
    return kv_write(*tensors, provider="sublight")


KV_WRITE = Op(
    name="kv_write",
    summary="new keys and values into a cache in pages",
    reference=reference,
    call=kv_write,
    plan=plan,
    providers={"sublight": Provider(launch=_launch, kernels=(Kernel(jit=_kv_write_kernel),))},
    inputs=inputs,
    cost=cost,
    shapes=_shapes((16, 8, 128, 16), (128, 8, 128, 16), (8192, 8, 128, 16), (8192, 8, 64, 256)),
    test_shapes=_shapes((1, 1, 16, 1), (7, 2, 24, 4), (12, 3, 16, 16)),
    wrt=(),
    directions=("fwd",),
    writes=(2, 3),
    batch="",
    library_args=lambda *tensors: (*tensors, "sublight"),
)
