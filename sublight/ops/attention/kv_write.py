"""New keys and values into their places in a cache of pages: read them once, write them once.

A token's place is one number, page * page_size + row, as the scheduler knows it; a negative one (padding) is skipped.
On the way keys are turned by their tokens' angles (RoPE), and both become 8-bit codes, where the call says so: neither
costs another pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import kv_write as cost
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.attention.pages import CODES, WHOLE
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.quantize.codes import Kind, finite_code_of, form_of, quantize, ratio_of, scale_of, top_of
from sublight.ops.record.library import Registered
from sublight.ops.rotary import rope
from sublight.ops.rotary.rotary import STYLES, Style

Pair = tuple[torch.Tensor, torch.Tensor]
Maybe = torch.Tensor | None
KINDS: dict[torch.dtype, Kind] = {CODES[0]: "int8", CODES[1]: "fp8"}


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scales: Maybe = None,
    v_scales: Maybe = None,
    cos: Maybe = None,
    sin: Maybe = None,
    positions: Maybe = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    """By index. A token that is skipped writes what the first of the others does, which changes nothing and needs no
    look at the numbers."""
    page, places = k_cache.shape[1], k_cache.shape[0] * k_cache.shape[1]
    if not slots.numel():
        return k_cache, v_cache
    if cos is not None and sin is not None and positions is not None:
        at = positions.clamp(0, cos.shape[0] - 1)[None]
        k = rope.reference(k[None], k[None], cos, sin, at, style=style, rotary_dim=rotary_dim)[0][0]
    is_kept = (slots >= 0) & (slots < places)
    token = torch.where(is_kept, torch.arange(slots.numel(), device=slots.device), is_kept.int().argmax())
    place = slots[token].clamp(0, places - 1).long()
    where = place // page, place % page

    def put(cache: torch.Tensor, x: torch.Tensor) -> None:
        bits = cache.view(torch.uint8) if cache.dtype == CODES[1] else cache  # fp8 has no index in PyTorch
        bits[where] = torch.where(is_kept.any(), x.view(bits.dtype)[token], bits[where])

    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        if scales is None:
            put(cache, x)
        else:
            codes, each = quantize(x, KINDS[cache.dtype])
            put(cache, codes)
            put(scales, each[..., 0])
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


@triton.jit
def _put(
    x, x_scales_ptr, cache_ptr, place, slot, inside, HEADS: tl.constexpr, FORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A token's heads into its place, as they are or as codes with a scale a head."""
    if FORM == "":
        tl.store(cache_ptr + place, x.to(cache_ptr.dtype.element_ty), mask=inside)
    else:
        scale = scale_of(top_of(x, 1), FORM)
        codes = finite_code_of(ratio_of(x, scale[:, None], INTERPRETED), scale[:, None], FORM)
        if FORM == "fp8":  # the cache is shown as bits: not every GPU has fp8
            codes = codes.to(tl.int8, bitcast=True)
        tl.store(cache_ptr + place, codes, mask=inside)
        head = tl.arange(0, x.shape[0])
        tl.store(x_scales_ptr + slot * HEADS + head, scale, mask=head < HEADS)


@triton.jit
def _kv_write_turned_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scales_ptr, v_scales_ptr, cos_ptr, sin_ptr, positions_ptr,
    places, k_token, k_head, v_token, v_head, k_page, k_row, k_cache_head, k_col, v_page, v_row, v_cache_head, v_col,
    max_len, cos_row, sin_row,
    PAGE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ROTARY: tl.constexpr, TABLE: tl.constexpr, INTERLEAVED: tl.constexpr, FORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One token: its heads are rows, so that a maximum over a row is a head's."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < places):
        head, col = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
        inside = (head < HEADS) & (col < HEAD_DIM)
        k_ptr += token * k_token
        k = tl.load(k_ptr + head * k_head + col, mask=inside, other=0.0).to(tl.float32)
        if ROTARY:
            HALF: tl.constexpr = ROTARY // 2
            if INTERLEAVED:
                other, angle, sign = col ^ 1, col // 2, (col % 2) * 2.0 - 1.0
            else:
                is_first = col < HALF
                other, angle = tl.where(is_first, col + HALF, col - HALF), tl.where(is_first, col, col - HALF)
                sign = tl.where(is_first, -1.0, 1.0)
            if TABLE == ROTARY:  # as wide as what is turned: each angle twice, as the style has it
                angle = col
            position = tl.load(positions_ptr + token)
            turns = col < ROTARY
            there = col < tl.where((position >= 0) & (position < max_len), ROTARY, 0)
            cos = tl.load(cos_ptr + position.to(tl.int64) * cos_row + angle, mask=there, other=float("nan"))
            sin = tl.load(sin_ptr + position.to(tl.int64) * sin_row + angle, mask=there, other=float("nan"))
            across = tl.load(k_ptr + head * k_head + other, mask=inside & turns, other=0.0).to(tl.float32)
            turned = k * cos.to(tl.float32) + sign * across * sin.to(tl.float32)
            k = tl.where(turns, turned, k)
        k = tl.where(inside, k, 0.0)
        v = tl.load(v_ptr + token * v_token + head * v_head + col, mask=inside, other=0.0).to(tl.float32)
        page, row = slot // PAGE, slot % PAGE
        k_place = page * k_page + row * k_row + head * k_cache_head + col * k_col
        v_place = page * v_page + row * v_row + head * v_cache_head + col * v_col
        _put(k, k_scales_ptr, k_cache_ptr, k_place, slot, inside, HEADS, FORM, INTERPRETED)
        _put(v, v_scales_ptr, v_cache_ptr, v_place, slot, inside, HEADS, FORM, INTERPRETED)


def plan_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
    k_scales: Maybe, v_scales: Maybe, cos: Maybe, sin: Maybe, positions: Maybe, rotary_dim: int, interleaved: bool,
    code: str, provider: str,
) -> Plan:  # fmt: skip
    tokens, heads, head_dim = k.shape
    page = k_cache.shape[1]
    given = {"k": k, "v": v, "slots": slots, "cos": cos, "sin": sin, "positions": positions}
    copies = tuple(name for name, x in given.items() if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1)
    k_at, v_at = (
        (heads * head_dim, head_dim) if name in copies else x.stride()[:2] for name, x in (("k", k), ("v", v))
    )
    strides = (*k_at, *v_at, *k_cache.stride(), *v_cache.stride())
    if k_scales is None and cos is None:
        step = Step(
            _kv_write_kernel, (tokens,), k_cache.shape[0] * page, *strides, on="k v k_cache v_cache slots",
            PAGE=page, HEADS=heads, HEAD_DIM=head_dim, BLOCK=next_power_of_2(heads * head_dim), num_warps=4,
        )  # fmt: skip
        return Plan(provider="sublight", reason="one pass over the new tokens", copies=copies, steps=(step,))
    rows = tuple(0 if x is None else x.shape[1] if name in copies else x.stride(0) for name, x in
                 (("cos", cos), ("sin", sin)))  # fmt: skip
    is_turned, is_coded = cos is not None, k_scales is not None
    rows_p2, width = next_power_of_2(heads), next_power_of_2(head_dim)
    step = Step(
        _kv_write_turned_kernel, (tokens,), k_cache.shape[0] * page, *strides, 0 if cos is None else len(cos), *rows,
        on=f"k v k_cache v_cache slots {'k_scales v_scales' if is_coded else 'k v'} "
        f"{'cos sin positions' if is_turned else 'k v slots'}",
        PAGE=page, HEADS=heads, HEAD_DIM=head_dim, ROWS=rows_p2, WIDTH=width, ROTARY=rotary_dim if is_turned else 0,
        TABLE=0 if cos is None else cos.shape[1], INTERLEAVED=interleaved,
        FORM=form_of(cast(Kind, code), facts(k)) if is_coded else "", INTERPRETED=is_interpreted(),
        num_warps=max(1, min(8, rows_p2 * width // 256)),
    )  # fmt: skip
    words = " and ".join(word for word, has in (("turned", is_turned), ("coded", is_coded)) if has)
    return Plan(
        provider="sublight", reason=f"one pass over the new tokens, {words} on the way", copies=copies, steps=(step,)
    )


def why_no_way(k: torch.Tensor, k_cache: torch.Tensor) -> str:
    if reason := why_no_kernel(k):
        return reason
    if not k.numel() or not k_cache.numel():
        return "nothing to do for a tensor without elements"
    return ""


def _why_torch(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *rest: Any) -> str:
    return why_no_way(k, k_cache)


def _write_by_torch(*args: Any) -> None:
    *tensors, rotary_dim, interleaved, code, _ = args
    if code == "fp8":
        tensors[2:4] = [x.view(CODES[1]) for x in tensors[2:4]]
    reference(*tensors, style="interleaved" if interleaved else "half", rotary_dim=rotary_dim or None)


_kv_write = Registered(
    schema="kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor(c!)? k_scales, "
    "Tensor(d!)? v_scales, Tensor? cos, Tensor? sin, Tensor? positions, int rotary_dim, bool interleaved, "
    "str code, str provider) -> ()",
    reference=_write_by_torch,
    theirs="torch.Tensor.index_put_",
    why_torch=_why_torch,
    plan=plan_write,
    fake=lambda *args: None,
)


def _check_coded(k: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: tuple[Maybe, Maybe]) -> None:
    if (scales[0] is None) != (scales[1] is None):
        raise BadInput("k_scales without v_scales, or the other way round: give both")
    if scales[0] is None and k_cache.dtype in CODES:
        raise BadInput(f"caches are {k_cache.dtype}: give k_scales and v_scales, float32 (pages, page_size, kv_heads)")
    for name, x in (("k_scales", scales[0]), ("v_scales", scales[1])):
        if x is None:
            continue
        if k_cache.dtype not in CODES or v_cache.dtype != k_cache.dtype:
            raise BadInput(f"caches are {k_cache.dtype} and {v_cache.dtype}: scales are for int8 or float8_e4m3fn")
        if x.shape != k_cache.shape[:3] or x.dtype != torch.float32 or not x.is_contiguous() or x.device != k.device:
            wanted = f"float32 {tuple(k_cache.shape[:3])} in one piece on {k.device}"
            raise BadInput(f"{name} are {x.dtype} {tuple(x.shape)} on {x.device}: use {wanted}")


def _check_angles(k: torch.Tensor, cos: Maybe, sin: Maybe, positions: Maybe, style: str, rotary_dim: int) -> None:
    if cos is None and sin is None and positions is None:
        return
    if cos is None or sin is None or positions is None:
        raise BadInput("keys are turned by cos, sin and positions: give all three, or none")
    if style not in STYLES:
        raise BadInput(f"style {style!r}: use {STYLES[0]!r} or {STYLES[1]!r}")
    if not 0 < rotary_dim <= k.shape[2] or rotary_dim % 2:
        raise BadInput(f"rotary_dim {rotary_dim} of heads of {k.shape[2]}: use an even number, at most their size")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dim() != 2 or x.shape[1] not in (rotary_dim // 2, rotary_dim) or not len(x) or x.shape != cos.shape:
            raise BadInput(f"{name} is {tuple(x.shape)}: use (max_len, {rotary_dim // 2}) or (max_len, {rotary_dim})")
        if not x.is_floating_point() or x.device != k.device:
            raise BadInput(f"{name} is {x.dtype} on {x.device}: use floating point on {k.device}")
    if positions.shape != k.shape[:1] or positions.dtype not in WHOLE or positions.device != k.device:
        raise BadInput(f"positions are {positions.dtype} {tuple(positions.shape)}: use int64 ({k.shape[0]},)")
    if k.device.type == "cpu" and not torch.compiler.is_compiling():
        for token in ((positions < 0) | (positions >= len(cos))).nonzero().flatten().tolist():
            raise BadInput(f"positions[{token}] is {positions[token]}: the tables have 0 to {len(cos) - 1}")


def check(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
    k_scales: Maybe, v_scales: Maybe, provider: str,
) -> None:  # fmt: skip
    if k.dim() != 3 or k.shape != v.shape:
        raise BadInput(f"k {tuple(k.shape)} and v {tuple(v.shape)}: use (tokens, kv_heads, head_dim) for both")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        wanted = f"(pages, page_size, {k.shape[1]}, {k.shape[2]})"
        raise BadInput(f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}: use {wanted}")
    if slots.shape != k.shape[:1] or slots.dtype not in WHOLE:
        raise BadInput(f"slots are {slots.dtype} {tuple(slots.shape)}: use int64 ({k.shape[0]},)")
    _check_coded(k, k_cache, v_cache, (k_scales, v_scales))
    alike = (k, v) if k_scales is not None else (k, v, k_cache, v_cache)
    if len({(x.dtype, x.device) for x in alike}) > 1 or {x.device for x in (slots, k_cache, v_cache)} != {k.device}:
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


def _arguments(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
    k_scales: Maybe = None, v_scales: Maybe = None, cos: Maybe = None, sin: Maybe = None, positions: Maybe = None,
    style: str = "half", rotary_dim: int | None = None, provider: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    check(k, v, k_cache, v_cache, slots, k_scales, v_scales, provider)
    width = k.shape[2] if rotary_dim is None else rotary_dim
    _check_angles(k, cos, sin, positions, style, width)
    code = "" if k_scales is None else KINDS[k_cache.dtype]
    if code == "fp8":
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    how = width if cos is not None else 0, style == STYLES[1], code, provider
    return k, v, k_cache, v_cache, slots, k_scales, v_scales, cos, sin, positions, *how


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scales: Maybe = None,
    v_scales: Maybe = None,
    cos: Maybe = None,
    sin: Maybe = None,
    positions: Maybe = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
    provider: str = "",
) -> Pair:
    """k and v (tokens, kv_heads, head_dim) into caches (pages, page_size, kv_heads, head_dim), which are returned.

    Token i goes to row slots[i] % page_size of page slots[i] // page_size; a negative slot is skipped, as is, on a GPU,
    one past the cache (on the CPU that is an error). No two tokens may have the same slot.

    With `cos`, `sin` and `positions` (tokens,) keys are turned first, as `rope` does it, tables, `style` and
    `rotary_dim` as there; on a GPU a position that the tables lack makes the key NaN. Into caches of int8 or
    float8_e4m3fn go codes, and what they are to be multiplied by into `k_scales` and `v_scales`, float32 (pages,
    page_size, kv_heads), as `paged_attention` takes them.
    """
    tensors = (k, v, k_cache, v_cache, slots, k_scales, v_scales, cos, sin, positions)
    _kv_write.call(*_arguments(*tensors, style, rotary_dim, provider))
    return k_cache, v_cache


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `kv_write` runs with these arguments, and why."""
    return _kv_write.decide(*_arguments(*tensors, **options))


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


_shapes = partial(shapes, "tokens kv_heads head_dim page")


def _launch(*tensors: Any, **options: Any) -> Pair:
    return kv_write(*tensors, provider="sublight", **options)


def _launch_turned(k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor, code: torch.dtype | None = None) -> Pair:
    """Turned, and coded where a code is named, for whoever compiles the kernels."""
    k_cache, v_cache, slots = rest
    cos, sin = (torch.ones(64, k.shape[2] // 2, device=k.device) for _ in range(2))
    angles = {"cos": cos, "sin": sin, "positions": torch.zeros_like(slots)}
    if code is None:
        return _launch(k, v, k_cache, v_cache, slots, **angles)
    scales = (torch.empty(k_cache.shape[:3], device=k.device) for _ in range(2))
    return _launch(k, v, *(x.to(code) for x in (k_cache, v_cache)), slots, *scales, **angles)


KV_WRITE = Op(
    name="kv_write",
    summary="new keys and values into a cache in pages",
    reference=reference,
    call=kv_write,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=_launch,
            kernels=(Kernel(jit=_kv_write_kernel), Kernel(jit=_kv_write_turned_kernel)),
            variants=(_launch_turned, *(partial(_launch_turned, code=code) for code in CODES)),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes((16, 8, 128, 16), (128, 8, 128, 16), (8192, 8, 128, 16), (8192, 8, 64, 256)),
    test_shapes=_shapes((1, 1, 16, 1), (7, 2, 24, 4), (12, 3, 16, 16)),
    wrt=(),
    directions=("fwd",),
    writes=(2, 3),
    batch="",
    library_args=lambda *tensors: (*tensors, None, None, None, None, None, 0, False, "", "sublight"),
)
