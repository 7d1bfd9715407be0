"""Whole pages of a cache to other pages: what sequences that part ways (beams, a shared prompt) need before they write.

A page of keys, one of values and their scales move in one launch, whatever their number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import kv_copy as cost
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.attention.kv_write import inputs as written_inputs
from sublight.ops.attention.pages import CODES, WHOLE
from sublight.ops.kernels.rows import why_no_kernel
from sublight.ops.record.library import Registered

Pair = tuple[torch.Tensor, torch.Tensor]
Maybe = torch.Tensor | None
BLOCK = 2048


def reference(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    k_scales: Maybe = None,
    v_scales: Maybe = None,
) -> Pair:
    """By index; a pair with a page that is not there copies the first page of all upon itself."""
    pages = k_cache.shape[0]
    is_there = (sources >= 0) & (sources < pages) & (targets >= 0) & (targets < pages)
    first = is_there.int().argmax() if is_there.numel() else 0
    source, target = (
        torch.where(is_there, x, torch.where(is_there.any(), x[first], 0)) if x.numel() else x
        for x in (sources, targets)
    )
    for x in (k_cache, v_cache, k_scales, v_scales):
        if x is not None and x.numel() and sources.numel():
            x[target.long()] = x[source.long()]
    return k_cache, v_cache


@triton.jit
def _copy(ptr, source, target, place, stride, inside):
    x = tl.load(ptr + source * stride + place, mask=inside)
    tl.store(ptr + target * stride + place, x, mask=inside)


@triton.jit
def _kv_copy_kernel(
    k_ptr, v_ptr, source_ptr, target_ptr, k_scales_ptr, v_scales_ptr, pages,
    k_page, k_row, k_head, k_col, v_page, v_row, v_head, v_col,
    PARTS: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one page of keys and of the page of values beside it."""
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    source, target = tl.load(source_ptr + pair).to(tl.int64), tl.load(target_ptr + pair).to(tl.int64)
    if (source >= 0) & (source < pages) & (target >= 0) & (target < pages):
        place = part * BLOCK + tl.arange(0, BLOCK)
        row, head, col = place // (HEADS * HEAD_DIM), place // HEAD_DIM % HEADS, place % HEAD_DIM
        _copy(k_ptr, source, target, row * k_row + head * k_head + col * k_col, k_page, row < PAGE)
        _copy(v_ptr, source, target, row * v_row + head * v_head + col * v_col, v_page, row < PAGE)
        if CODED:  # there are fewer scales than codes: all lie in the first parts
            _copy(k_scales_ptr, source, target, place, PAGE * HEADS, place < PAGE * HEADS)
            _copy(v_scales_ptr, source, target, place, PAGE * HEADS, place < PAGE * HEADS)


def plan_copy(
    k_cache: torch.Tensor, v_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor,
    k_scales: Maybe, v_scales: Maybe, provider: str,
) -> Plan:  # fmt: skip
    pages, page, heads, size = k_cache.shape
    parts = cdiv(page * heads * size, BLOCK)
    step = Step(
        _kv_copy_kernel, (len(sources) * parts,), pages, *k_cache.stride(), *v_cache.stride(),
        on=f"k_cache v_cache sources targets {'k_scales v_scales' if k_scales is not None else 'sources targets'}",
        PARTS=parts, PAGE=page, HEADS=heads, HEAD_DIM=size, CODED=k_scales is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    turned = tuple(name for name, x in (("sources", sources), ("targets", targets)) if not x.is_contiguous())
    return Plan(provider="sublight", reason="keys, values and scales in one pass", copies=turned, steps=(step,))


def why_no_way(k_cache: torch.Tensor, sources: torch.Tensor) -> str:
    if reason := why_no_kernel(k_cache.new_empty(0, dtype=torch.float32) if k_cache.dtype in CODES else k_cache):
        return reason
    return "" if k_cache.numel() and sources.numel() else "nothing to do for a tensor without elements"


def _why_torch(k_cache: torch.Tensor, v_cache: torch.Tensor, sources: torch.Tensor, *rest: Any) -> str:
    return why_no_way(k_cache, sources)


def _copy_by_torch(*args: Any) -> None:
    reference(*args[:-1])


_kv_copy = Registered(
    schema="kv_copy(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor sources, Tensor targets, Tensor(c!)? k_scales, "
    "Tensor(d!)? v_scales, str provider) -> ()",
    reference=_copy_by_torch,
    theirs="torch.Tensor.index_put_ of a gather",
    why_torch=_why_torch,
    plan=plan_copy,
    fake=lambda *args: None,
)


def _arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor,
    k_scales: Maybe = None, v_scales: Maybe = None, provider: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise BadInput(
            f"caches {k_cache.dtype} {tuple(k_cache.shape)} and {v_cache.dtype} {tuple(v_cache.shape)}: use two alike, "
            "(pages, page_size, kv_heads, head_dim)"
        )
    for name, x in (("sources", sources), ("targets", targets)):
        if x.dim() != 1 or x.shape != sources.shape or x.dtype not in WHOLE or x.device != k_cache.device:
            raise BadInput(f"{name} are {x.dtype} {tuple(x.shape)} on {x.device}: use int32 (pairs,) for both")
    if (k_scales is None) != (v_scales is None):
        raise BadInput("k_scales without v_scales, or the other way round: give both")
    wanted = f"float32 {tuple(k_cache.shape[:3])} in one piece"
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is None:
            continue
        if scales.shape != k_cache.shape[:3] or scales.dtype != torch.float32 or not scales.is_contiguous():
            raise BadInput(f"{name} are {scales.dtype} {tuple(scales.shape)}: use {wanted}")
    if provider not in ("", "sublight"):
        raise BadInput(f"unknown provider {provider!r} of kv_copy: use 'sublight', or leave it out")
    if provider and (reason := why_no_way(k_cache, sources)):
        raise BadInput(f"kv_copy's kernel does not take this ({reason}): leave provider out for PyTorch's")
    if torch.is_grad_enabled() and (k_cache.requires_grad or v_cache.requires_grad):
        raise BadInput("kv_copy has no gradient: call it under torch.no_grad()")
    if k_cache.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_pairs(sources, targets, len(k_cache))
    if k_cache.dtype == CODES[1]:  # bits are bits: not every GPU has fp8
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    return k_cache, v_cache, sources, targets, k_scales, v_scales, provider


def _check_pairs(sources: torch.Tensor, targets: torch.Tensor, pages: int) -> None:
    for name, x in (("sources", sources), ("targets", targets)):
        for at in ((x < 0) | (x >= pages)).nonzero().flatten().tolist():
            raise BadInput(f"{name}[{at}] is {x[at]}: the cache has pages 0 to {pages - 1}")
    if len(targets.unique()) != len(targets) or bool(torch.isin(targets, sources).any()):
        raise BadInput("a page is a target twice, or source and target: copies have no order, use calls of their own")


def kv_copy(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    k_scales: Maybe = None,
    v_scales: Maybe = None,
    *,
    provider: str = "",
) -> Pair:
    """Page sources[i] over page targets[i], for all i at once, in both caches (and their scales), which are returned.

    No page may be a target twice, or source and target: copies have no order. On a GPU a pair with a page that is not
    there is skipped; on the CPU it is refused, as is a page in both.
    """
    _kv_copy.call(*_arguments(k_cache, v_cache, sources, targets, k_scales, v_scales, provider))
    return k_cache, v_cache


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `kv_copy` runs with these arguments, and why."""
    return _kv_copy.decide(*_arguments(*tensors, **options))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Inputs with as many pages as are copied and as many for the copies, in random order."""
    pairs, page = shape["pairs"], shape["page"]
    sizes = {"tokens": pairs * page, "kv_heads": shape["kv_heads"], "head_dim": shape["head_dim"], "page": page}
    _, _, k_cache, v_cache, _ = written_inputs(sizes, dtype, device, seed)
    order = torch.arange(2 * pairs, device=device).flip(0)
    return k_cache, v_cache, order[:pairs].clone(), order[pairs:].clone()


_shapes = partial(shapes, "pairs kv_heads head_dim page")


KV_COPY = Op(
    name="kv_copy",
    summary="pages of a cache to other pages",
    reference=reference,
    call=kv_copy,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=lambda *tensors: kv_copy(*tensors, provider="sublight"), kernels=(Kernel(jit=_kv_copy_kernel),)
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes((16, 8, 128, 16), (512, 8, 128, 16), (64, 8, 64, 256)),
    test_shapes=_shapes((1, 1, 16, 1), (3, 2, 24, 4), (5, 3, 16, 64)),
    wrt=(),
    directions=("fwd",),
    writes=(0, 1),
    batch="",
    library_args=lambda *tensors: (*tensors, None, None, "sublight"),
)
