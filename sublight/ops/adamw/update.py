"""The kernels of AdamW over many tensors: read parameter, gradient and both averages, write all but the gradient.

A table on the device says where each tensor lies; a program takes one chunk and finds its tensor in a list. A launch
before it has one program: it counts the steps and makes of them, and of the gradients' norm where that is to be
clipped, the few numbers that the update multiplies by. So nothing comes back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.errors import BadInput
from sublight.op import Kernel
from sublight.ops.adamw.tables import Batch, batches_of, put_back, together

FACTORS = 5  # a tensor's step size, 1 / sqrt(1 - beta2**step), what decay and clipping leave, its key
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_FACTORS, _CLIP_EPS = tl.constexpr(FACTORS), tl.constexpr(CLIP_EPS)
TICK_BLOCK = 128
JOINED = 4096  # sums of squares that one program makes one
NORM_BLOCK = 4096

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an update is told beside its tensors; lr may lie on the device."""

    lr: float | torch.Tensor = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False
    max_norm: float = 0.0  # of all gradients together; 0: they stay as they are
    stochastic: bool = False  # round bf16 parameters up or down by chance, so that they are right on average
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise BadInput(f"betas must be in [0, 1), not {self.beta1} and {self.beta2}")
        for name in ("lr", "eps", "weight_decay", "max_norm"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor) and not value >= 0:
                raise BadInput(f"{name} is {value}: it must not be negative")


@triton.jit
def _chunk_of(size_ptr, chunk_ptr, CHUNK: tl.constexpr):
    """This program's tensor, where its chunk starts, and how much of the tensor is left from there."""
    tensor = tl.load(chunk_ptr + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(size_ptr + 2 * tensor + 1)) * CHUNK
    return tensor, start, tl.load(size_ptr + 2 * tensor) - start


@triton.jit
def _address(ptr, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer that was stored as a number; Triton moves 16 bytes at once only where it knows of the boundary."""
    own_ptr = tl.load(ptr).to(kind)
    return tl.multiple_of(own_ptr, 16) if ALIGNED else own_ptr


@triton.jit
def _squares_kernel(gs_ptr, size_ptr, chunk_ptr, g_ptr, part_ptr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    tensor, start, left = _chunk_of(size_ptr, chunk_ptr, CHUNK)
    place = tl.arange(0, CHUNK)
    own_ptr = _address(gs_ptr + tensor, g_ptr.dtype, ALIGNED) + start
    if left >= CHUNK:
        g = tl.load(own_ptr + place).to(tl.float32)
        tl.store(part_ptr + tl.program_id(0), tl.sum(g * g, 0))
    else:
        g = tl.load(own_ptr + place, mask=place < left, other=0.0).to(tl.float32)
        tl.store(part_ptr + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _join_kernel(part_ptr, joined_ptr, parts, BLOCK: tl.constexpr):
    """Sums of squares, a block of them made one: a single program needs them all and must not read half a million."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(joined_ptr + tl.program_id(0), tl.sum(tl.load(part_ptr + place, mask=place < parts, other=0.0), 0))


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, without losing the digits of a small x."""
    near = tl.maximum(x, -0.4)
    series = 1.0 + near / 6.0 * (1.0 + near / 7.0 * (1.0 + near / 8.0))
    series = 1.0 + near / 2.0 * (1.0 + near / 3.0 * (1.0 + near / 4.0 * (1.0 + near / 5.0 * series)))
    return tl.where(x > -0.4, -near * series, 1.0 - tl.exp(x))


@triton.jit
def _mixed(x):
    """32 bits of which each depends on all bits of x: noise from a counter."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _tick_kernel(
    steps_ptr, factor_ptr, part_ptr, norm_ptr, lr_ptr, tensors, parts, lr, log_beta1, log_beta2, decay, max_norm, seed,
    INCREMENT: tl.constexpr, CLIP: tl.constexpr, LR_THERE: tl.constexpr, BLOCK: tl.constexpr, NORM_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the steps count on, and every tensor gets its factors."""
    clip = 1.0
    norm = 0.0
    if CLIP:
        squares = tl.zeros([NORM_BLOCK], tl.float32)
        for start in tl.range(0, parts, NORM_BLOCK):
            place = start + tl.arange(0, NORM_BLOCK)
            squares += tl.load(part_ptr + place, mask=place < parts, other=0.0)
        norm = tl.sqrt(tl.sum(squares, 0))
        clip = max_norm / (norm + _CLIP_EPS)
        clip = tl.where(clip > 1.0, 1.0, clip)  # NaN stays: it must not pass for a small norm
    tl.store(norm_ptr, norm)
    if LR_THERE:
        lr = tl.load(lr_ptr).to(tl.float32)
    for start in tl.range(0, tensors, BLOCK):
        tensor = start + tl.arange(0, BLOCK)
        inside = tensor < tensors
        step_ptr = tl.load(steps_ptr + tensor, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(step_ptr, mask=inside, other=1.0)
        if INCREMENT:
            step += 1.0
            tl.store(step_ptr, step, mask=inside)
        own_ptr = factor_ptr + tensor * _FACTORS
        tl.store(own_ptr, lr / _one_minus_exp(step * log_beta1), mask=inside)
        tl.store(own_ptr + 1, 1.0 / tl.sqrt(_one_minus_exp(step * log_beta2)), mask=inside)
        tl.store(own_ptr + 2, 1.0 - lr * decay + tl.zeros([BLOCK], tl.float32), mask=inside)
        tl.store(own_ptr + 3, clip + tl.zeros([BLOCK], tl.float32), mask=inside)
        key = _mixed(
            _mixed(step.to(tl.uint32) + (tl.zeros([BLOCK], tl.uint32) + seed) * 0x9E3779B1) + tensor.to(tl.uint32)
        )
        tl.store(own_ptr + 4, key.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _rounded_by_chance(x, noise):
    """bf16 above or below x, above as often as x is near it: 16 bits of noise carry into the 16 that stay, or not."""
    bits = x.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
    bits = tl.where(x == x, bits, 0x7FC00000)  # a NaN's bits must not carry into its sign
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _update_chunk(
    p_ptr, g_ptr, m_ptr, v_ptr, factor_ptr, start, left, weight1, beta2, weight2, eps,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    place = tl.max_contiguous(tl.arange(0, CHUNK), 4)  # a thread's share of 16-bit and of fp32 tensors is the same
    if MASKED:
        mask = place < left
    else:
        mask = None
    g = tl.load(g_ptr + place, mask=mask).to(tl.float32)
    p = tl.load(p_ptr + place, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + place, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + place, mask=mask).to(tl.float32)
    size = tl.load(factor_ptr)
    unbias = tl.load(factor_ptr + 1)
    keep = tl.load(factor_ptr + 2)
    g *= tl.load(factor_ptr + 3)
    if MAXIMIZE:
        g = -g
    m += (g - m) * weight1
    v = v * beta2 + g * g * weight2
    if p_ptr.dtype.element_ty == tl.float32:  # a parameter of zero shows every digit of its update
        p = p * keep - size * tl.div_rn(m, tl.sqrt_rn(v) * unbias + eps)
    else:
        p = p * keep - size * (m / (tl.sqrt(v) * unbias + eps))
    tl.store(m_ptr + place, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + place, v.to(v_ptr.dtype.element_ty), mask=mask)
    if STOCHASTIC:
        key = tl.load(factor_ptr + 4).to(tl.uint32, bitcast=True) + _mixed((start // CHUNK).to(tl.uint32))
        tl.store(p_ptr + place, _rounded_by_chance(p, _mixed(place.to(tl.uint32) * 0x9E3779B1 + key)), mask=mask)
    else:
        tl.store(p_ptr + place, p.to(p_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _update_kernel(
    ps_ptr, gs_ptr, ms_ptr, vs_ptr, size_ptr, chunk_ptr, factor_ptr, p_ptr, g_ptr, m_ptr, weight1, beta2, weight2, eps,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """The pointers p, g and m are there for their data types; where the tensors lie is said by ps, gs, ms and vs."""
    tensor, start, left = _chunk_of(size_ptr, chunk_ptr, CHUNK)
    own_p_ptr = _address(ps_ptr + tensor, p_ptr.dtype, ALIGNED) + start
    own_g_ptr = _address(gs_ptr + tensor, g_ptr.dtype, ALIGNED) + start
    own_m_ptr = _address(ms_ptr + tensor, m_ptr.dtype, ALIGNED) + start
    own_v_ptr = _address(vs_ptr + tensor, m_ptr.dtype, ALIGNED) + start
    own_factor_ptr = factor_ptr + tensor * _FACTORS
    if left >= CHUNK:  # a mask of which nothing is known would make every load a small one
        _update_chunk(
            own_p_ptr, own_g_ptr, own_m_ptr, own_v_ptr, own_factor_ptr, start, left, weight1, beta2, weight2, eps,
            CHUNK, False, MAXIMIZE, STOCHASTIC,
        )  # fmt: skip
    else:
        _update_chunk(
            own_p_ptr, own_g_ptr, own_m_ptr, own_v_ptr, own_factor_ptr, start, left, weight1, beta2, weight2, eps,
            CHUNK, True, MAXIMIZE, STOCHASTIC,
        )  # fmt: skip


def update(work: Sequence[tuple[Batch, Settings]], *, increment: bool) -> torch.Tensor:
    """Launch it all, batch by batch; gives the norm of all gradients, which only max_norm asks for (else 0)."""
    first, settings = work[0]
    device = first.sizes.device
    norm = torch.empty((), dtype=torch.float32, device=device)
    counts = [batch.chunks.numel() for batch, _ in work] if settings.max_norm else []
    parts = torch.empty(max(1, sum(counts)), dtype=torch.float32, device=device)
    for i, count in enumerate(counts):
        batch, own = work[i][0], parts[sum(counts[:i]) :]
        if count:
            _squares_kernel[(count,)](
                batch.where[1], batch.sizes, batch.chunks, batch.kinds[1], own,
                CHUNK=batch.tile.block, ALIGNED=batch.aligned, **batch.tile.options(),
            )  # fmt: skip
    known = sum(counts)
    if known > JOINED:
        joined = torch.empty(cdiv(known, JOINED), dtype=torch.float32, device=device)
        _join_kernel[(joined.numel(),)](parts, joined, known, BLOCK=JOINED, num_warps=4)
        parts, known = joined, joined.numel()
    for batch, s in work:
        *four, steps = batch.where
        factors = torch.empty((steps.numel(), FACTORS), dtype=torch.float32, device=device)
        tick(batch, s, factors, parts, norm, parts=known, increment=increment)
        if batch.chunks.numel():
            _update_kernel[(batch.chunks.numel(),)](
                *four, batch.sizes, batch.chunks, factors, *batch.kinds, 1 - s.beta1, s.beta2, 1 - s.beta2,
                float(s.eps), CHUNK=batch.tile.block, ALIGNED=batch.aligned, MAXIMIZE=s.maximize,
                STOCHASTIC=s.stochastic and batch.kinds[0].dtype == torch.bfloat16, **batch.tile.options(),
            )  # fmt: skip
    return norm


def tick(
    batch: Batch, s: Settings, factors: torch.Tensor, squares: torch.Tensor, norm: torch.Tensor, *, parts: int,
    increment: bool,
) -> None:  # fmt: skip
    """Count the steps on, and write each tensor's factors, and the norm where `parts` sums of squares are there."""
    there = isinstance(s.lr, torch.Tensor)
    steps = batch.where[-1]
    _tick_kernel[(1,)](
        steps, factors, squares, norm, s.lr if there else norm, steps.numel(), parts, 0.0 if there else float(s.lr),
        *(max(-1e4, math.log(beta or 1e-300)) for beta in (s.beta1, s.beta2)), float(s.weight_decay),
        float(s.max_norm), s.seed & 0x7FFFFFFF, INCREMENT=increment, CLIP=bool(s.max_norm), LR_THERE=there,
        BLOCK=TICK_BLOCK, NORM_BLOCK=NORM_BLOCK, num_warps=4,
    )  # fmt: skip


def launch_update(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """Our kernels on these tensors, in place; gives the gradients' norm, if it is clipped (else 0)."""
    fours = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
    own = together(fours)
    batches = batches_of([(*four, step) for four in own])
    norm = update([(batch, settings) for batch in batches], increment=False)
    put_back(fours, own)
    return norm


LAST_CHUNK = "only in a tensor's last chunk, of which a mask takes as many elements as there are"
KERNELS = (Kernel(jit=_tick_kernel), Kernel(jit=_update_kernel, narrow=LAST_CHUNK))
CLIPPED_KERNELS = (Kernel(jit=_squares_kernel, narrow=LAST_CHUNK), Kernel(jit=_join_kernel), *KERNELS)
