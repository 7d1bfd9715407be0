"""The kernels behind qk_norm_rope and their plans: heads normalised, then turned by the parts that rope has too.

A row is a head, and the few threads that hold it find its root mean square among themselves, so the norm costs no
memory traffic and no barrier. The backward pass finds it again instead of keeping it; its programs take many tiles
each and add up their shares of the weights' gradients in a fixed order, and a second launch adds the shares.
"""

from __future__ import annotations

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Plan
from sublight.ops.kernels.column_sums import add_to
from sublight.ops.kernels.pointwise import check_alike
from sublight.ops.kernels.rows import copies_of, sum_of, sums_of
from sublight.ops.norm.parts import reciprocal_root
from sublight.ops.record.tuning import tile_for
from sublight.ops.rotary import rotary
from sublight.ops.rotary.parts import load_angles, load_pairs, row_places, store_pairs, tile_here

FEW_BYTES = 2**15  # of q, a multiprocessor: up to here a row's own latency counts
SHARES, SHARE_COLS = 256, 16  # that one step of the second launch adds, and columns that a program of it takes


@triton.jit
def _load_rest(ptr, mask, HALF: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    """What of a row is normalised but not turned."""
    col = tl.arange(0, REST_BLOCK)[None, None, :]
    return tl.load(ptr + 2 * HALF + col, mask=mask & (col < REST), other=0.0).to(tl.float32)


@triton.jit
def _store_rest(ptr, x, mask, HALF: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    col = tl.arange(0, REST_BLOCK)[None, None, :]
    tl.store(ptr + 2 * HALF + col, x.to(ptr.dtype.element_ty), mask=mask & (col < REST))


@triton.jit
def _scale(first, second, rest, inside, eps, HEAD_DIM: tl.constexpr, REST: tl.constexpr, EXACT: tl.constexpr):
    """Each row's 1 / sqrt(mean(x²) + eps); of rows outside the tensor any that is finite, even where eps is zero."""
    squares = tl.sum(first * first + second * second, 2)[:, :, None]
    if REST:
        squares += tl.sum(rest * rest, 2)[:, :, None]
    squares = tl.where(inside, squares, 1.0)
    if EXACT:
        return reciprocal_root(squares, HEAD_DIM, eps)
    return tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)  # every thread of a row does this, and 16 bits do not show it


@triton.jit
def _normal_turn(
    x_ptr, y_ptr, w_ptr, cos_ptr, sin_ptr, positions_ptr, batch, token, head, eps,
    q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
    x_batch, x_token, x_head, y_batch, y_token, y_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, TABLE_UNIT: tl.constexpr,
    POSITIONS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    x_row = x_ptr + row_places(batch, token, head, x_batch, x_token, x_head, UNIT)
    y_row = y_ptr + row_places(batch, token, head, y_batch, y_token, y_head, UNIT)
    w_row = w_ptr + 0 * (token + head)  # the same for every row, laid out as the rows are
    inside = token < q_len
    first, second = load_pairs(x_row, inside, HALF, BLOCK, PAIRS)
    rest = first
    if REST:
        rest = _load_rest(x_row, inside, HALF, REST, REST_BLOCK)
    w_first, w_second = load_pairs(w_row, inside, HALF, BLOCK, PAIRS)
    cos, sin = load_angles(
        cos_ptr, sin_ptr, positions_ptr, batch, token, q_len, max_len,
        cos_stride, sin_stride, positions_batch, positions_token,
        HEADS, HALF, BLOCK, STEP, RUN, TABLE_UNIT, POSITIONS, False,
    )  # fmt: skip
    rstd = _scale(first, second, rest, inside, eps, 2 * HALF + REST, REST, EXACT)
    first, second = first * rstd * w_first, second * rstd * w_second
    store_pairs(y_row, first * cos - second * sin, second * cos + first * sin, inside, HALF, BLOCK, PAIRS)
    if REST:
        y = rest * rstd * _load_rest(w_row, inside, HALF, REST, REST_BLOCK)
        _store_rest(y_row, y, inside, HALF, REST, REST_BLOCK)


@triton.jit
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, eps,
    q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    q_out_batch, q_out_token, q_out_head, k_out_batch, k_out_token, k_out_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, TABLE_UNIT: tl.constexpr,
    POSITIONS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    batch, token_tile, head_tile = tile_here(Q_TILES + K_TILES, HEADS_FIRST)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    if head_tile < Q_TILES:
        _normal_turn(
            q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, positions_ptr, batch, token, head + head_tile * HEADS,
            eps, q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
            q_batch, q_token, q_head, q_out_batch, q_out_token, q_out_head,
            HEADS, HALF, BLOCK, REST, REST_BLOCK, PAIRS, UNIT, STEP, RUN, TABLE_UNIT, POSITIONS, EXACT,
        )  # fmt: skip
    else:
        _normal_turn(
            k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
            batch, token, head + (head_tile - Q_TILES) * HEADS,
            eps, q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
            k_batch, k_token, k_head, k_out_batch, k_out_token, k_out_head,
            HEADS, HALF, BLOCK, REST, REST_BLOCK, PAIRS, UNIT, STEP, RUN, TABLE_UNIT, POSITIONS, EXACT,
        )  # fmt: skip


def plan_forward(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, positions: torch.Tensor | None, eps: float, rotary_dim: int, interleaved: bool,
) -> Plan:  # fmt: skip
    """The launch that gives q and k, normalised and turned."""
    rotary.check(q, k, cos, sin, positions, rotary_dim)
    check_weights(q, q_weight, k_weight)
    gpu, item = facts(q), q.element_size()
    # a root that few warps find for many rows leaves them waiting less; with few rows there are none to wait for
    many = q.numel() * item > FEW_BYTES * gpu.multiprocessors
    rule = rotary.rule(rotary_dim, item, warps=2, loads=2) if many else rotary.rule(rotary_dim, item)
    tile = tile_for("qk_norm_rope", rotary_dim, item, packable=True, capability=gpu.capability, rule=rule)
    reads = [rotary.heads_of(x) for x in (q, k)]
    rooms = {"q_turned": rotary.room_like(q), "k_turned": rotary.room_like(k)}
    tensors = (*reads, *(rotary.heads_of_room(room) for room in rooms.values()))
    weights = _read(q_weight, k_weight)
    where = rotary.layout(q, k, cos, sin, positions, rotary_dim, interleaved, tile, tensors, weights=weights)
    step = Step(
        _qk_norm_rope_kernel, where.grid, eps, *where.numbers, tile=tile,
        on=f"q k q_turned k_turned q_weight k_weight {where.tables}",
        **where.constants, EXACT=item == 4, **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="q and k read once and written once",
        copies=(*copies_of(q=reads[0].is_copy, k=reads[1].is_copy), *_copies(q_weight, k_weight), *where.copies),
        buffers=rooms,
        steps=(step,),
        outputs=tuple(rooms),
    )


def check_weights(q: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
    for weight in (q_weight, k_weight):
        if weight.shape != q.shape[-1:] or weight.device != q.device:
            given = f"{tuple(weight.shape)} on {weight.device}"
            raise BadInput(f"the weights must be ({q.shape[-1]},), a head's width, on {q.device}, not {given}")


def _read(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weights that the kernels read where they are; others are copied, and a copy is always aligned."""
    return tuple(weight for weight in weights if weight.is_contiguous())


def _copies(q_weight: torch.Tensor, k_weight: torch.Tensor) -> tuple[str, ...]:
    return copies_of(q_weight=not q_weight.is_contiguous(), k_weight=not k_weight.is_contiguous())


@triton.jit
def _over_rows(total, rest, SUMS: tl.constexpr):
    """The sum over a tile's rows, in the shape of one; an infinite total has no rest."""
    total += tl.where(rest == rest, rest, 0.0)
    flat = tl.reshape(total, (total.shape[0] * total.shape[1], total.shape[2]))
    return sum_of(flat, 0, SUMS)[None, None, :]


@triton.jit
def _walk(
    dy_ptr, x_ptr, dx_ptr, w_ptr, dw_ptr, cos_ptr, sin_ptr, positions_ptr, share, step, sequences, token_tiles, eps,
    q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
    dy_batch, dy_token, dy_head, x_batch, x_token, x_head, dx_batch, dx_token, dx_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, HEAD_TILES: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, TABLE_UNIT: tl.constexpr,
    POSITIONS: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every step-th tile from the share-th on; `dw_ptr` is where this program leaves its sums."""
    row = tl.zeros([TOKENS, HEADS, 1], tl.int32)
    w_first, w_second = load_pairs(w_ptr + row, row == 0, HALF, BLOCK, PAIRS)
    dw_first = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    dw_second = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    dw_rest = tl.zeros([TOKENS, HEADS, REST_BLOCK], tl.float32)
    lost_first, lost_second, lost_rest = dw_first, dw_second, dw_rest  # by rounding these sums
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    for tile in tl.range(share, sequences * token_tiles * HEAD_TILES, step, num_stages=STAGES):
        if HEADS_FIRST:
            head_tile, rest_tile = tile % HEAD_TILES, tile // HEAD_TILES
            token_tile, batch = rest_tile % token_tiles, rest_tile // token_tiles
        else:
            token_tile, rest_tile = tile % token_tiles, tile // token_tiles
            head_tile, batch = rest_tile % HEAD_TILES, rest_tile // HEAD_TILES
        token = token_tile * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        head = head_tile * HEADS + tl.arange(0, HEADS)[None, :, None]
        inside = token < q_len
        x_row = x_ptr + row_places(batch, token, head, x_batch, x_token, x_head, UNIT)
        dy_row = dy_ptr + row_places(batch, token, head, dy_batch, dy_token, dy_head, UNIT)
        dx_row = dx_ptr + row_places(batch, token, head, dx_batch, dx_token, dx_head, UNIT)
        first, second = load_pairs(x_row, inside, HALF, BLOCK, PAIRS)
        dy_first, dy_second = load_pairs(dy_row, inside, HALF, BLOCK, PAIRS)
        rest, dy_rest, w_rest = first, first, first
        if REST:
            rest = _load_rest(x_row, inside, HALF, REST, REST_BLOCK)
            dy_rest = _load_rest(dy_row, inside, HALF, REST, REST_BLOCK)
            w_rest = _load_rest(w_ptr + row, inside, HALF, REST, REST_BLOCK)
        cos, sin = load_angles(
            cos_ptr, sin_ptr, positions_ptr, batch, token, q_len, max_len,
            cos_stride, sin_stride, positions_batch, positions_token,
            HEADS, HALF, BLOCK, STEP, RUN, TABLE_UNIT, POSITIONS, True,
        )  # fmt: skip
        g_first, g_second = dy_first * cos - dy_second * sin, dy_second * cos + dy_first * sin
        rstd = _scale(first, second, rest, inside, eps, HEAD_DIM, REST, EXACT)
        first, second = first * rstd, second * rstd
        dw_first, lost_first = add_to(dw_first, lost_first, g_first * first, EXACT)
        dw_second, lost_second = add_to(dw_second, lost_second, g_second * second, EXACT)
        g_first, g_second = g_first * w_first, g_second * w_second
        along = tl.sum(g_first * first + g_second * second, 2)[:, :, None]  # of the gradient, along the normalised row
        if REST:
            rest *= rstd
            dw_rest, lost_rest = add_to(dw_rest, lost_rest, dy_rest * rest, EXACT)
            dy_rest *= w_rest
            along += tl.sum(dy_rest * rest, 2)[:, :, None]
        along = along * (1.0 / HEAD_DIM)
        store_pairs(
            dx_row, (g_first - first * along) * rstd, (g_second - second * along) * rstd, inside, HALF, BLOCK, PAIRS
        )
        if REST:
            _store_rest(dx_row, (dy_rest - rest * along) * rstd, inside, HALF, REST, REST_BLOCK)
    out, here = dw_ptr + tl.zeros([1, 1, 1], tl.int32), tl.full([1, 1, 1], 1, tl.int1)
    APART: tl.constexpr = "halves" if PAIRS == "halves" else "neighbours"  # shares are fp32, and few
    dw_first, dw_second = _over_rows(dw_first, lost_first, SUMS), _over_rows(dw_second, lost_second, SUMS)
    store_pairs(out, dw_first, dw_second, here, HALF, BLOCK, APART)
    if REST:
        _store_rest(out, _over_rows(dw_rest, lost_rest, SUMS), here, HALF, REST, REST_BLOCK)


@triton.jit
def _qk_norm_rope_backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, dq_ptr, dk_ptr, q_weight_ptr, k_weight_ptr, shares_ptr,
    cos_ptr, sin_ptr, positions_ptr, q_programs, sequences, token_tiles, eps,
    q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
    dq_out_batch, dq_out_token, dq_out_head, dk_out_batch, dk_out_token, dk_out_head,
    q_batch, q_token, q_head, k_batch, k_token, k_head, dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, TABLE_UNIT: tl.constexpr,
    POSITIONS: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    dw_ptr = shares_ptr + share.to(tl.int64) * (2 * HALF + REST)
    if share < q_programs:
        _walk(
            dq_out_ptr, q_ptr, dq_ptr, q_weight_ptr, dw_ptr, cos_ptr, sin_ptr, positions_ptr,
            share, q_programs, sequences, token_tiles, eps,
            q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
            dq_out_batch, dq_out_token, dq_out_head, q_batch, q_token, q_head, dq_batch, dq_token, dq_head,
            TOKENS, HEADS, HEADS_FIRST, Q_TILES, HALF, BLOCK, REST, REST_BLOCK,
            PAIRS, UNIT, STEP, RUN, TABLE_UNIT, POSITIONS, EXACT, SUMS, STAGES,
        )  # fmt: skip
    else:
        _walk(
            dk_out_ptr, k_ptr, dk_ptr, k_weight_ptr, dw_ptr, cos_ptr, sin_ptr, positions_ptr,
            share - q_programs, tl.num_programs(0) - q_programs, sequences, token_tiles, eps,
            q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
            dk_out_batch, dk_out_token, dk_out_head, k_batch, k_token, k_head, dk_batch, dk_token, dk_head,
            TOKENS, HEADS, HEADS_FIRST, K_TILES, HALF, BLOCK, REST, REST_BLOCK,
            PAIRS, UNIT, STEP, RUN, TABLE_UNIT, POSITIONS, EXACT, SUMS, STAGES,
        )  # fmt: skip


@triton.jit
def _weights_kernel(
    shares_ptr, dwq_ptr, dwk_ptr, q_programs, programs, HEAD_DIM: tl.constexpr,
    SHARES: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The sum of the q programs' shares, by the second half of this launch that of the k programs'."""
    is_k = tl.program_id(1) == 1
    first, last = tl.where(is_k, q_programs, 0), tl.where(is_k, programs, q_programs)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([SHARES, BLOCK], tl.float32)
    rest = total
    for start in tl.range(first, last, SHARES, num_stages=3):
        share = start + tl.arange(0, SHARES)[:, None]
        dw = tl.load(shares_ptr + share * HEAD_DIM + col, mask=(share < last) & (col < HEAD_DIM), other=0.0)
        total, rest = add_to(total, rest, dw, SUMS != "plain")
    dw = sum_of(total + tl.where(rest == rest, rest, 0.0), 0, SUMS)[None, :].to(dwq_ptr.dtype.element_ty)
    if is_k:
        tl.store(dwk_ptr + col, dw, mask=col < HEAD_DIM)
    else:
        tl.store(dwq_ptr + col, dw, mask=col < HEAD_DIM)


def plan_backward(
    dq_turned: torch.Tensor, dk_turned: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    eps: float, rotary_dim: int, interleaved: bool,
) -> Plan:  # fmt: skip
    """The launch that gives dq, dk and shares of the weights' gradients, then the one that adds the shares up."""
    rotary.check(q, k, cos, sin, positions, rotary_dim)
    check_weights(q, q_weight, k_weight)
    check_alike(dq=dq_turned, q=q)
    check_alike(dk=dk_turned, k=k)
    gpu, item, width = facts(q), q.element_size(), q.shape[-1]
    # GeForce and Ampere spill in 128 registers, as do rows that no vector fits, whose places take registers too
    lean = 90 <= gpu.capability < 120 and rotary_dim // 2 * item % 16 == 0
    registers, programs = (128, 8) if lean else (168, 6)
    programs = 1 if is_interpreted() else programs
    rule = rotary.rule(rotary_dim, item, warps=2, registers=registers, programs=programs, stages=3)
    tile = tile_for("qk_norm_rope_backward", rotary_dim, item, packable=True, capability=gpu.capability, rule=rule)
    reads = {"dq_turned": dq_turned, "dk_turned": dk_turned, "q": q, "k": k}
    heads = {name: rotary.heads_of(x) for name, x in reads.items()}
    rooms = {"dq": rotary.room_like(q), "dk": rotary.room_like(k)}
    tensors = (*heads.values(), *(rotary.heads_of_room(room) for room in rooms.values()))
    weights = _read(q_weight, k_weight)
    where = rotary.layout(q, k, cos, sin, positions, rotary_dim, interleaved, tile, tensors, weights=weights)
    tiles = where.batch * where.token_tiles
    q_tiles, k_tiles = tiles * where.constants["Q_TILES"], tiles * where.constants["K_TILES"]
    every = tile.programs * gpu.multiprocessors  # shared between q and k as their tiles are
    q_programs = min(q_tiles, max(1, every * q_tiles // (q_tiles + k_tiles)))
    programs = q_programs + min(k_tiles, max(1, every - q_programs))
    walk = Step(
        _qk_norm_rope_backward_kernel, (programs,), q_programs, where.batch, where.token_tiles, eps, *where.numbers,
        on=f"{' '.join((*reads, *rooms))} q_weight k_weight shares {where.tables}", tile=tile,
        **where.constants, EXACT=item == 4, SUMS=sums_of(q), STAGES=tile.stages, **tile.options(),
    )  # fmt: skip
    add = Step(
        _weights_kernel, (cdiv(width, SHARE_COLS), 2), q_programs, programs, on="shares dq_weight dk_weight",
        HEAD_DIM=width, SHARES=SHARES, BLOCK=SHARE_COLS, SUMS=sums_of(q), num_warps=8,
    )  # fmt: skip
    gradients = {
        **rooms,
        "dq_weight": Buffer(shape=(width,), dtype=q_weight.dtype),
        "dk_weight": Buffer(shape=(width,), dtype=k_weight.dtype),
    }
    return Plan(
        provider="sublight",
        reason="each program takes many tiles and adds up its share of the weights' gradients",
        copies=(
            *copies_of(**{name: each.is_copy for name, each in heads.items()}),
            *_copies(q_weight, k_weight),
            *where.copies,
        ),
        buffers={**gradients, "shares": Buffer(shape=(programs, width), dtype=torch.float32)},
        steps=(walk, add),
        outputs=tuple(gradients),
    )


KERNELS = tuple(Kernel(jit=jit) for jit in (_qk_norm_rope_kernel, _qk_norm_rope_backward_kernel, _weights_kernel))
