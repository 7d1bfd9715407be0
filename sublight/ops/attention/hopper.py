"""Attention forward for Hopper, in Gluon: one warp copies, two warpgroups multiply, softmax runs under the products.

A tile is 128 queries, half of them in each warpgroup. The copying warp keeps several blocks of keys and values on their
way. A warpgroup starts the product of its queries with the next keys, then that of the last weights with their values;
while the tensor cores work on both, it makes the weights of the scores that are ready. Blocks come from the last to the
first, so that those with a mask come first.

A program stays on its multiprocessor and takes one tile after the other: the copying warp fetches the next queries and
keys while the last products of a tile run and its result is stored. Who takes which tile is fixed before the launch:
see `dealt`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, gl, gluon, hopper, tile_in, tile_out, why_no_gluon
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.parts import (
    LOG2_E,
    Sizes,
    copies_of,
    has_copy_engine,
    result_like,
    sizes_of,
    strides_of,
    sums_buffers,
    view_of,
)
from sublight.ops.attention.slots import slot_of

QUERIES, KEYS = 128, 128
MIN_TILES, MIN_KEYS = 2048, 4096  # from which on it was timed to be faster than cuDNN
EVEN = 0.95  # of the longest program's work, the mean: below it tiles are programs of their own
STAGES = {64: 4, 128: 2}  # blocks of keys and values on their way, by the size of a head


@gluon.jit
def _tile_of(index, blocks, together, heads, QUERIES: gl.constexpr):
    """Batch entry, head and first query of a tile; with a causal mask the last queries have most to do."""
    turn = index % (together * blocks)
    entry = index // (together * blocks) * together + turn % together
    return entry // heads, entry % heads, (blocks - 1 - turn // together) * QUERIES


@gluon.jit
def _rounds(tiles, span):
    return tiles // span * ((span + gl.num_programs(0) - 1) // gl.num_programs(0))


@gluon.jit
def _index_of(number, span):
    """The tile of a round, and whether there is one: see `dealt`."""
    programs = gl.num_programs(0)
    rounds = (span + programs - 1) // programs
    turn = number % rounds
    program = gl.program_id(0)
    rank = turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)
    return number // rounds * span + rank, rank < span


@gluon.jit
def _blocks_of(first, q_len, kv_len, CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """Blocks of keys that some of a tile's queries see; one at least, which may be hidden whole."""
    end = kv_len
    if CAUSAL:
        end = gl.minimum(end, gl.minimum(first + QUERIES, q_len) + kv_len - q_len)
    return gl.maximum((gl.maximum(end, 0) + KEYS - 1) // KEYS, 1)


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    q_len, kv_len, heads, share, blocks, together, tiles, span,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    done = 0
    taken = 0
    for number in range(0, _rounds(tiles, span)):
        index, is_there = _index_of(number, span)
        if is_there:
            batch, head, first = _tile_of(index, blocks, together, heads, QUERIES)
            count = _blocks_of(first, q_len, kv_len, CAUSAL, QUERIES, KEYS)
            room, phase = slot_of(taken, 2)
            hopper.mbarrier.wait(q_empty.index(room), phase ^ 1)
            hopper.mbarrier.expect(q_full.index(room), QUERIES * HEAD_DIM * 2)
            for half in gl.static_range(2):
                place = [batch, head, first + half * (QUERIES // 2), 0]
                tile_in(q_desc, place, q_full.index(room), qs.index(room * 2 + half))
            for turn in range(0, count):
                slot, phase = slot_of(done + turn, STAGES)
                place = [batch, head // share, (count - 1 - turn) * KEYS, 0]
                hopper.mbarrier.wait(k_empty.index(slot), phase ^ 1)
                hopper.mbarrier.expect(k_full.index(slot), KEYS * HEAD_DIM * 2)
                tile_in(k_desc, place, k_full.index(slot), ks.index(slot))
                hopper.mbarrier.wait(v_empty.index(slot), phase ^ 1)
                hopper.mbarrier.expect(v_full.index(slot), KEYS * HEAD_DIM * 2)
                tile_in(v_desc, place, v_full.index(slot), vs.index(slot))
            done += count
            taken += 1


@gluon.jit
def _hidden(product, position, start, kv_len, CAUSAL: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr):
    """-inf where a query does not see a key."""
    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    seen = key[None, :] < kv_len
    if CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    return gl.where(seen, product, float("-inf"))


@gluon.jit
def _sums(weights):
    """Of each thread's own columns: what the four threads of a row hold is added up once, at the end."""
    return gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 8]), 1)


@gluon.jit
def _turn(
    out, packed, top, total, q, ks, vs, k_full, k_empty, v_full, v_empty, turn, start, position, kv_len, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr, out_layout: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """The scores of this turn's keys, under them the values of the turn before by their weights."""
    slot, phase = slot_of(turn, STAGES)
    old_slot, old_phase = slot_of(turn - 1, STAGES)
    none = gl.zeros([out.shape[0], KEYS], gl.float32, layout)
    k = ks.index(slot).reshape([KEYS, HEAD_DIM])
    v = vs.index(old_slot).reshape([KEYS, HEAD_DIM])
    hopper.mbarrier.wait(k_full.index(slot), phase)
    product = hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    hopper.mbarrier.wait(v_full.index(old_slot), old_phase)
    out = hopper.warpgroup_mma(packed, v, out, is_async=True)
    product = hopper.warpgroup_mma_wait(1, deps=(product,))
    hopper.mbarrier.arrive(k_empty.index(slot), count=1)
    if MASKED:
        product = _hidden(product, position, start, kv_len, CAUSAL, KEYS, layout)
    new_top = gl.maximum(top, gl.max(product, 1) * scale)
    base = gl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = gl.exp2(product * scale - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * gl.convert_layout(shrink[:, None], total.type.layout, assert_trivial=True) + _sums(weights)
    # the assembler would move the wait for the product above the softmax, but not over a branch, which this is
    hopper.mbarrier.wait(v_full.index(old_slot), old_phase, deps=(vs,))
    out, packed, weights = hopper.warpgroup_mma_wait(0, deps=(out, packed, weights))
    hopper.mbarrier.arrive(v_empty.index(old_slot), count=1)
    packed = gl.convert_layout(weights.to(packed.dtype), left)
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
    return out, packed, new_top, total


@gluon.jit
def _attend(
    out_desc, lse_ptr, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    q_len, kv_len, heads, blocks, together, index, taken, done, scale, HALF: gl.constexpr, MORE_MASKED: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of a tile; how many blocks of keys it took."""
    ROWS: gl.constexpr = QUERIES // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    batch, head, tile = _tile_of(index, blocks, together, heads, QUERIES)
    count = _blocks_of(tile, q_len, kv_len, CAUSAL, QUERIES, KEYS)
    first = tile + HALF * ROWS
    position = first + kv_len - q_len + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    room, q_phase = slot_of(taken, 2)
    place = qs.index(room * 2 + HALF)
    q_shared = place.reshape([ROWS, HEAD_DIM])
    hopper.mbarrier.wait(q_full.index(room), q_phase)
    if IN_REGISTERS:
        q = q_shared.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
    else:
        q = q_shared
    slot, phase = slot_of(done, STAGES)
    hopper.mbarrier.wait(k_full.index(slot), phase)
    none = gl.zeros([ROWS, KEYS], gl.float32, layout)
    k = ks.index(slot).reshape([KEYS, HEAD_DIM])
    product = hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    product = hopper.warpgroup_mma_wait(0, deps=(product,))
    hopper.mbarrier.arrive(k_empty.index(slot), count=1)
    product = _hidden(product, position, (count - 1) * KEYS, kv_len, CAUSAL, KEYS, layout)
    top = gl.max(product, 1) * scale
    weights = gl.exp2(product * scale - gl.where(top == float("-inf"), 0.0, top)[:, None])
    total = _sums(weights)
    packed = gl.convert_layout(weights.to(qs.dtype), left)
    hopper.tma.store_wait(0)  # the result of the tile before has left its place, where the queries after these come
    hopper.mbarrier.arrive(q_empty.index(room ^ 1), count=1, pred=taken > 0)
    out = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
    begin = 1
    if MORE_MASKED:
        whole = gl.minimum(kv_len // KEYS, gl.maximum(first + kv_len - q_len + 1, 0) // KEYS)  # these come last
        begin = gl.maximum(count - whole, 1)
        for turn in range(1, begin):
            out, packed, top, total = _turn(
                out, packed, top, total, q, ks, vs, k_full, k_empty, v_full, v_empty, done + turn,
                (count - 1 - turn) * KEYS, position, kv_len, scale,
                True, CAUSAL, KEYS, HEAD_DIM, STAGES, layout, out_layout, left,
            )  # fmt: skip
    for turn in range(begin, count):
        out, packed, top, total = _turn(
            out, packed, top, total, q, ks, vs, k_full, k_empty, v_full, v_empty, done + turn,
            (count - 1 - turn) * KEYS, position, kv_len, scale,
            False, CAUSAL, KEYS, HEAD_DIM, STAGES, layout, out_layout, left,
        )  # fmt: skip
    slot, phase = slot_of(done + count - 1, STAGES)
    hopper.mbarrier.wait(v_full.index(slot), phase)
    out = hopper.warpgroup_mma(packed, vs.index(slot).reshape([KEYS, HEAD_DIM]), out, is_async=True)
    out, packed = hopper.warpgroup_mma_wait(0, deps=(out, packed))
    hopper.mbarrier.arrive(v_empty.index(slot), count=1)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, layout))
    some = gl.where(total == 0.0, 1.0, total)  # a query that sees nothing gets zeros
    out = out * gl.convert_layout(1.0 / some, gl.SliceLayout(1, out_layout))[:, None]
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    lse = (top + gl.log2(some)) * 0.6931471805599453
    gl.store(lse_ptr + (batch * heads + head).to(gl.int64) * q_len + row, lse, mask=row < q_len)
    q_shared.store(out.to(out_desc.dtype))  # this half of the queries is done with
    hopper.fence_async_shared()
    tile_out(out_desc, [batch, head, first, 0], place)
    return count


@gluon.jit
def _multiply(
    out_desc, lse_ptr, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    q_len, kv_len, heads, blocks, together, tiles, span, scale, HALF: gl.constexpr, MORE_MASKED: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup."""
    done = 0
    taken = 0
    for number in range(0, _rounds(tiles, span)):
        index, is_there = _index_of(number, span)
        if is_there:
            done += _attend(
                out_desc, lse_ptr, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                q_len, kv_len, heads, blocks, together, index, taken, done, scale, HALF, MORE_MASKED, IN_REGISTERS,
                CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES,
            )  # fmt: skip
            taken += 1
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "share", "blocks", "together", "tiles", "span"])
def _hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, q_len, kv_len, heads, share, blocks, together, tiles, span, scale,
    MORE_MASKED: gl.constexpr, IN_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The queries of two tiles have room; each place of theirs takes the tile's result in the end."""
    qs = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 1, QUERIES // 2, HEAD_DIM], q_desc.layout)
    ks = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], k_desc.layout)
    vs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], v_desc.layout)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for slot in gl.static_range(2):
        hopper.mbarrier.init(q_full.index(slot), count=1)
        hopper.mbarrier.init(q_empty.index(slot), count=2)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(slot), count=1)
        hopper.mbarrier.init(v_full.index(slot), count=1)
        hopper.mbarrier.init(k_empty.index(slot), count=2)  # both warpgroups are done with it
        hopper.mbarrier.init(v_empty.index(slot), count=2)
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now
    gl.warp_specialize(
        [
            (_multiply, (out_desc, lse_ptr, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, q_len,
                         kv_len, heads, blocks, together, tiles, span, scale, 0, MORE_MASKED, IN_REGISTERS,
                         CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
            (_multiply, (out_desc, lse_ptr, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, q_len,
                         kv_len, heads, blocks, together, tiles, span, scale, 1, MORE_MASKED, IN_REGISTERS,
                         CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
            (_copy, (q_desc, k_desc, v_desc, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, q_len,
                     kv_len, heads, share, blocks, together, tiles, span, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
        ],
        [4, 1],  # warps of the second warpgroup and of the copying one …
        [240, 24],  # … and registers of their threads
    )  # fmt: skip


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> str:
    """Why this step does not take these arguments; empty where it does."""
    if why_no_gluon or (is_interpreted() and q.device.type == "cpu"):
        return why_no_gluon or "Gluon is not interpreted"
    if facts(q).capability != 90:
        return f"written for Hopper (sm_90), this is sm_{facts(q).capability}"
    if q.element_size() != 2 or q.shape[3] not in (64, 128):
        return f"16-bit data types and heads of 64 or 128, not {q.dtype} and {q.shape[3]}"
    if mask.window or softcap or scale <= 0:
        return "no window, no soft cap, a positive scale"
    sources = [x.contiguous() if name in copies_of(q=q, k=k, v=v) else x for name, x in (("q", q), ("k", k), ("v", v))]
    return "" if has_copy_engine(facts(q), *sources) else "rows at 16-byte boundaries"


def is_faster(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float
) -> bool:  # fmt: skip
    """Whether this step was faster than cuDNN on an H200, without a gradient, at such sizes."""
    if torch.compiler.is_compiling() or why_not(q, k, v, mask, softcap, scale):
        return False
    sizes = sizes_of(q, k)
    is_causal = mask.needed(sizes.q_len, sizes.kv_len).causal
    tiles = cdiv(sizes.q_len, QUERIES) * sizes.batch * sizes.heads
    return (is_causal or sizes.head_dim == 128) and tiles >= MIN_TILES and sizes.kv_len >= MIN_KEYS


def dealt(sizes: Sizes, blocks: int, is_causal: bool, multiprocessors: int) -> tuple[int, int, int]:
    """How many programs run, how many heads take turns, and how many tiles are dealt out at a time.

    Tiles of equal work are dealt out in rounds, all of them. With a causal mask the tiles of some heads at a time,
    longest first, are dealt out there and back again, so that whoever had a long one gets a short one. So many heads as
    come out evenly; where none do, every tile is a program of its own, and the GPU deals them out as it goes.

    >>> long, short = Sizes(4, 16, 16, 4096, 4096, 128), Sizes(4, 16, 16, 512, 512, 128)
    >>> dealt(long, 32, False, 132), dealt(long, 32, True, 132), dealt(short, 4, True, 132)
    ((132, 8, 2048), (132, 8, 256), (256, 8, 256))
    """
    heads, together = sizes.batch * sizes.heads, sizes.together()
    tiles = heads * blocks
    if tiles <= multiprocessors:
        return tiles, together, tiles
    if not is_causal:
        return multiprocessors, together, tiles
    best = max(
        (each for each in range(1, heads + 1) if heads % each == 0 and each <= 2 * together),
        key=lambda each: evenness(each, blocks, multiprocessors),
    )
    if evenness(best, blocks, multiprocessors) < EVEN:
        return tiles, together, tiles
    return multiprocessors, best, best * blocks


def evenness(together: int, blocks: int, programs: int) -> float:
    """The mean of what programs have to do over the most, tiles of so many heads dealt out there and back again.

    >>> round(evenness(8, 32, 132), 2), round(evenness(4, 32, 132), 2)
    (1.0, 0.51)
    """
    work = [0] * programs
    for rank in range(together * blocks):
        turn, place = divmod(rank, programs)
        work[programs - 1 - place if turn % 2 else place] += blocks - rank // together + 1
    return sum(work) / programs / max(work)


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> Plan:
    sizes, out = sizes_of(q, k), result_like(q)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    blocks = cdiv(sizes.q_len, QUERIES)
    tiles = blocks * sizes.batch * sizes.heads
    programs, together, span = dealt(sizes, blocks, mask.causal, facts(q).multiprocessors)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]

    def view(x: torch.Tensor | Buffer, strides: tuple[int, ...], rows: int) -> View:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, sizes.head_dim], kind)
        return replace(view_of(x.shape, strides, rows, sizes.head_dim), layout=layout)

    views = {
        0: view(q, strides_of(q), QUERIES // 2),
        1: view(k, strides_of(k), KEYS),
        2: view(v, strides_of(v), KEYS),
        3: view(out, out.strides, QUERIES // 2),
    }
    step = Step(
        _hopper_kernel, (programs,),
        sizes.q_len, sizes.kv_len, sizes.heads, sizes.share, blocks, together, tiles, span, scale * LOG2_E,
        on="q k v out lse", views=views,
        # a block that only some queries see is the last one, unless tiles and blocks are out of step
        MORE_MASKED=mask.causal and (sizes.kv_len - sizes.q_len) % KEYS != 0,
        IN_REGISTERS=sizes.head_dim == 64,
        CAUSAL=mask.causal, QUERIES=QUERIES, KEYS=KEYS, HEAD_DIM=sizes.head_dim, STAGES=STAGES[sizes.head_dim],
        num_warps=4,
    )  # fmt: skip
    return Plan(
        provider="hopper",
        reason="one warp copies, two warpgroups multiply, softmax under the products: on an H200 1.03 to 1.16 times as "
        "fast as cuDNN from 4096 keys on (heads of 128, or causal ones of 64)",
        copies=copies_of(q=q, k=k, v=v),
        buffers={"out": out, **sums_buffers(q)},
        steps=(step,),
        outputs=("out", "lse", "sums"),
    )
