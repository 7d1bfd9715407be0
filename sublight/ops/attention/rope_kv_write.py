"""Between a layer's first product and its attention, in one launch: q and k turned, k and v into their pages.

The product leaves q, k and v side by side, (tokens, heads + 2 * kv_heads, head_dim). A program takes some heads of one
token, turns what is q or k by the token's angle, and writes q out, k and v straight to the cache: k is never stored
twice, and decoding, where each launch costs more than its bytes, has one instead of two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import rope_kv_write as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.attention import kv_write as writing
from sublight.ops.kernels.dependent import next_may_begin, wait_for_the_last
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.record.library import Registered
from sublight.ops.rotary import rope

TILE = 8  # heads of a program
HOPPER = 90  # compute capability


def reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, dependent: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """PyTorch's compositions of both; caches are written in place."""
    kv_heads = k_cache.shape[2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    turned_q, turned_k = (x[0] for x in rope.reference(q[None], k[None], cos, sin, positions[None]))
    writing.reference(turned_k, v, k_cache, v_cache, slots)
    return turned_q.contiguous(), k_cache, v_cache


@triton.jit
def _rope_kv_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, q_ptr,
    max_len, places, token_stride, head_stride, cos_row, sin_row,
    k_page, k_row, k_head, v_page, v_row, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """TILE heads of one token: q's first, then k's, then v's."""
    if DEPENDENT:
        next_may_begin()
        wait_for_the_last()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = qkv_ptr + token * token_stride + head * head_stride + col
    inside = (head < HEADS + 2 * KV_HEADS) & (col < HALF)
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    position = tl.load(positions_ptr + token).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    known = (col < HALF) & (position >= 0) & (position < max_len)
    cos = tl.load(cos_ptr + position * cos_row + col, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_row + col, mask=known, other=float("nan")).to(tl.float32)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_v, first, (a * cos - b * sin).to(first.dtype))
    second = tl.where(is_v, second, (b * cos + a * sin).to(first.dtype))
    q_at = q_ptr + (token * HEADS + head) * (2 * HALF) + col
    tl.store(q_at, first, mask=inside & is_q)
    tl.store(q_at + HALF, second, mask=inside & is_q)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < places):
        page, row = slot // PAGE, slot % PAGE
        k_at = k_cache_ptr + page * k_page + row * k_row + (head - HEADS) * k_head + col
        is_k = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
        tl.store(k_at, first, mask=is_k)
        tl.store(k_at + HALF, second, mask=is_k)
        v_at = v_cache_ptr + page * v_page + row * v_row + (head - HEADS - KV_HEADS) * v_head + col
        tl.store(v_at, first, mask=inside & is_v)
        tl.store(v_at + HALF, second, mask=inside & is_v)


def plan_turn_and_write(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, dependent: bool = False,
) -> Plan:  # fmt: skip
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    heads = all_heads - 2 * kv_heads
    given = {"qkv": qkv, "cos": cos, "sin": sin, "positions": positions, "slots": slots}
    copies = tuple(name for name, x in given.items() if x.stride(-1) != 1 and x.shape[-1] > 1)
    qkv_at = (all_heads * head_dim, head_dim) if "qkv" in copies else qkv.stride()[:2]
    rows = [x.shape[1] if name in copies else x.stride(0) for name, x in (("cos", cos), ("sin", sin))]
    is_early = dependent and facts(qkv).capability == HOPPER and not is_interpreted()
    step = Step(
        _rope_kv_write_kernel, (tokens, cdiv(all_heads, TILE)), cos.shape[0], k_cache.shape[0] * page,
        *qkv_at, *rows, *k_cache.stride()[:3], *v_cache.stride()[:3],
        on="qkv cos sin positions k_cache v_cache slots q", HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
        BLOCK=next_power_of_2(head_dim // 2), PAGE=page, TILE=TILE, DEPENDENT=is_early,
        num_warps=1 if head_dim <= 128 else 2, **({"launch_pdl": True} if is_early else {}),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one pass over q, k and v, straight into the pages" + ", launched early" * is_early,
        copies=copies,
        buffers={"q": Buffer(shape=(tokens, heads, head_dim), dtype=qkv.dtype)},
        steps=(step,),
        outputs=("q",),
    )


def why_torch(qkv: torch.Tensor, *rest: Any) -> str:
    if reason := why_no_kernel(qkv):
        return reason
    k_cache, v_cache = rest[3], rest[4]
    if not qkv.numel() or not k_cache.numel():
        return "nothing to do for a tensor without elements"
    if any(x.stride(-1) != 1 for x in (k_cache, v_cache)):
        return "a cache whose heads do not lie in one piece"
    return ""


def _by_torch(*args: Any) -> torch.Tensor:
    return reference(*args)[0]


_rope_kv_write = Registered(
    schema="rope_kv_write(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slots, bool dependent) -> Tensor q",
    reference=_by_torch,
    theirs="rope, torch.Tensor.index_put_",
    why_torch=why_torch,
    plan=plan_turn_and_write,
    fake=lambda qkv, cos, sin, positions, k_cache, *_: qkv.new_empty(
        (qkv.shape[0], qkv.shape[1] - 2 * k_cache.shape[2], qkv.shape[2])
    ),
)


def check(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
) -> None:  # fmt: skip
    if k_cache.dim() != 4 or qkv.dim() != 3 or qkv.shape[1] <= 2 * k_cache.shape[2] or qkv.shape[2] % 2:
        shapes = f"qkv {tuple(qkv.shape)}, k_cache {tuple(k_cache.shape)}"
        raise BadInput(f"{shapes}: use (tokens, heads + 2 * kv_heads, head_dim) and (pages, size, kv_heads, head_dim)")
    kv_heads, half = k_cache.shape[2], qkv.shape[2] // 2
    writing.check(qkv[:, -kv_heads:], qkv[:, -kv_heads:], k_cache, v_cache, slots, None, None, "")
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != half:
        raise BadInput(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: use (max_len, {half}) for both")
    if cos.dtype != sin.dtype or cos.dtype not in (qkv.dtype, torch.float32) or cos.device != qkv.device:
        raise BadInput("cos and sin are of qkv's data type or float32, on its device")
    if positions.shape != qkv.shape[:1] or positions.dtype not in (torch.int32, torch.int64):
        raise BadInput(f"positions are {positions.dtype} {tuple(positions.shape)}: use int64 ({qkv.shape[0]},)")
    if positions.device != qkv.device:
        raise BadInput("positions are on another device than qkv: bring them there")
    if qkv.device.type == "cpu" and not torch.compiler.is_compiling():
        for token in ((positions < 0) | (positions >= cos.shape[0])).nonzero().flatten().tolist():
            raise BadInput(f"positions[{token}] is {positions[token]}: the tables have 0 to {cos.shape[0] - 1}")


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    dependent: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of qkv (tokens, heads + 2 * kv_heads, head_dim) turned; k turned and v go into the caches, which are returned.

    As `rope` with the halves of a head as pairs, then `kv_write`. cos and sin are (max_len, head_dim / 2); a position
    outside gives NaN on a GPU. Slots are as for `kv_write`: a negative one is skipped. With `dependent` a Hopper GPU
    begins this launch, and the next dependent one, before the last has ended: a step inside of a CUDA graph gains by
    that. For inference.
    """
    check(qkv, cos, sin, positions, k_cache, v_cache, slots)
    return _rope_kv_write.call(qkv, cos, sin, positions, k_cache, v_cache, slots, dependent), k_cache, v_cache


def plan(*tensors: Any, dependent: bool = False) -> Plan:
    """What `rope_kv_write` runs with these arguments, and why."""
    check(*tensors)
    return _rope_kv_write.decide(*tensors, dependent)


def launch(*tensors: Any, dependent: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Our kernel, whether or not it wins."""
    check(*tensors)
    return _rope_kv_write.by_kernels(*tensors, dependent), tensors[4], tensors[5]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Slots in no order, each fifth padding; positions anywhere in tables of 64 rows."""
    generator, kind = generator_for(device, seed), getattr(torch, dtype)
    tokens, half = shape["tokens"], shape["head_dim"] // 2
    k, v, k_cache, v_cache, slots = writing.inputs(shape, dtype, device, seed)
    q_size = (tokens, shape["heads"], shape["head_dim"])
    q = torch.randn(*q_size, generator=generator, device=device, dtype=kind)
    angles = torch.rand(64, half, generator=generator, device=device, dtype=torch.float32) * 6.3
    positions = torch.arange(tokens, device=device) * 7 % 64
    return torch.cat((q, k, v), 1), angles.cos().to(kind), angles.sin().to(kind), positions, k_cache, v_cache, slots


_shapes = partial(shapes, "tokens heads kv_heads head_dim page")


ROPE_KV_WRITE = Op(
    name="rope_kv_write",
    summary="q and k turned, k and v into a cache in pages",
    reference=reference,
    call=rope_kv_write,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=launch,
            kernels=(Kernel(jit=_rope_kv_write_kernel),),
            variants=(partial(launch, dependent=True),),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes((1, 32, 8, 128, 16), (64, 32, 8, 128, 16), (2048, 32, 8, 128, 16)),
    test_shapes=_shapes((1, 1, 1, 16, 1), (7, 4, 2, 24, 4), (12, 7, 3, 16, 16), (3, 9, 1, 258, 4)),
    wrt=(),
    directions=("fwd",),
    writes=(4, 5),
    batch="",
    library_args=lambda *tensors: (*tensors, False),
)
