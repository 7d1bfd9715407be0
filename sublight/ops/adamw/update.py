"""The kernels of AdamW over many tensors: read parameter, gradient and both averages, write all but the gradient.

A table on the device says where each tensor lies; a program takes one chunk and finds its tensor in a list. A launch
before it has one program: it counts the steps and makes of them, and of the gradients' norm where that is to be
clipped, the few numbers that the update multiplies by. So nothing comes back to the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Plan
from sublight.ops.adamw.tables import Batch, Group
from sublight.ops.record.by_name import buffers_of, take

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
def _squares_kernel(gs_ptr, size_ptr, chunk_ptr, g_ptr, part_ptr, before, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """A chunk's sum of squares; `before` chunks are of launches before."""
    part_ptr += before
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


@triton.jit(do_not_specialize=["seed"])  # one kernel for every seed
def _tick_kernel(
    steps_ptr, factor_ptr, part_ptr, norm_ptr, lr_ptr, tensors, parts, lr, log_beta1, log_beta2, decay, max_norm,
    seed: tl.int32,
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


class Task(NamedTuple):
    """A group of tensors, and those settings that change which kernels are compiled."""

    group: Group
    maximize: bool
    is_stochastic: bool
    lr: tuple[torch.dtype, bool] | None  # data type and alignment of an lr that lies on the device


def task_of(group: Group, s: Settings) -> Task:
    lr = (s.lr.dtype, s.lr.data_ptr() % 16 == 0) if isinstance(s.lr, torch.Tensor) else None
    return Task(group, s.maximize, s.stochastic and group.kind.param == torch.bfloat16, lr)


@functools.lru_cache(maxsize=1024)  # the same steps every time: a step's second launch is quicker than its first
def plan_tasks(tasks: tuple[Task, ...], *, clips: bool, increments: bool) -> Plan:
    """All launches of an update: squares of the gradients where they are clipped, then a tick and an update a group.

    Tensors and numbers of the i-th task are named `i.grads`, `i.lr`, …: `run` says what they are.
    """
    steps: list[Step] = []
    counts = [task.group.chunks if clips else 0 for task in tasks]
    known, squares = sum(counts), "parts"
    buffers = {
        "norm": Buffer(shape=(), dtype=torch.float32),
        "parts": Buffer(shape=(max(1, known),), dtype=torch.float32),
    }
    for i, count in enumerate(counts):
        if count:
            on = f"{i}.grads {i}.sizes {i}.chunks {i}.grad parts"
            steps.append(Step(_squares_kernel, (count,), sum(counts[:i]), on=on, **_chunk_options(tasks[i].group)))
    if known > JOINED:
        joined = cdiv(known, JOINED)
        steps.append(Step(_join_kernel, (joined,), known, on="parts joined", BLOCK=JOINED, num_warps=4))
        buffers["joined"] = Buffer(shape=(joined,), dtype=torch.float32)
        known, squares = joined, "joined"
    for i, task in enumerate(tasks):
        buffers[f"{i}.factors"] = Buffer(shape=(task.group.tensors, FACTORS), dtype=torch.float32)
        steps.append(_tick(i, task, squares, known, clips=clips, increments=increments))
        if task.group.chunks:
            steps.append(_update(i, task))
    tensors = sum(task.group.tensors for task in tasks)
    return Plan(
        provider="sublight",
        reason=f"{tensors} tensors in {len(tasks)} launch{'es' if len(tasks) > 1 else ''}, one for each data type",
        buffers=buffers,
        steps=tuple(steps),
        outputs=("norm",),
    )


def _chunk_options(group: Group) -> dict[str, Any]:
    return {"CHUNK": group.tile.block, "ALIGNED": group.kind.is_aligned, **group.tile.options()}


def _tick(i: int, task: Task, squares: str, known: int, *, clips: bool, increments: bool) -> Step:
    """The steps counted on, and each tensor's factors; with `clips` the norm, of `known` sums of squares."""
    numbers = [f"{i}.{name}" for name in ("lr", "log_beta1", "log_beta2", "weight_decay", "max_norm", "seed")]
    return Step(
        _tick_kernel, (1,), task.group.tensors, known, *numbers,
        on=f"{i}.steps {i}.factors {squares} norm {'norm' if task.lr is None else f'{i}.lr'}",
        INCREMENT=increments, CLIP=clips, LR_THERE=task.lr is not None,
        BLOCK=TICK_BLOCK, NORM_BLOCK=NORM_BLOCK, num_warps=4,
    )  # fmt: skip


def _update(i: int, task: Task) -> Step:
    on = [
        *("params", "grads", "exp_avgs", "exp_avg_sqs", "sizes", "chunks", "factors"),
        *("param", "grad", "average"),
    ]
    return Step(
        _update_kernel, (task.group.chunks,), *[f"{i}.{name}" for name in ("weight1", "beta2", "weight2", "eps")],
        on=" ".join(f"{i}.{name}" for name in on), tile=task.group.tile,
        MAXIMIZE=task.maximize, STOCHASTIC=task.is_stochastic, **_chunk_options(task.group),
    )  # fmt: skip


def run(plan: Plan, work: Sequence[tuple[Batch, Settings]]) -> torch.Tensor:
    """The plan's launches on these tensors, in place; gives the norm of all gradients, if they are clipped (else 0)."""
    counts = [buffer.shape[0] for name, buffer in plan.buffers.items() if name.endswith(".factors")]
    if counts != [batch.group.tensors for batch, _ in work]:
        raise AssertionError(f"planned for groups of {counts} tensors, launched on others")
    tensors = buffers_of(plan, work[0][0].sizes.device)
    numbers: dict[str, float] = {}
    for i, (batch, s) in enumerate(work):
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "sizes", "chunks", "param", "grad", "average")
        own = (*batch.where, batch.sizes, batch.chunks, *batch.kinds)
        tensors |= {f"{i}.{name}": x for name, x in zip(names, own, strict=True)}
        numbers |= {f"{i}.{name}": number for name, number in numbers_of(s).items()}
        if isinstance(s.lr, torch.Tensor):
            tensors[f"{i}.lr"] = s.lr
    for step in plan.steps:
        take(step, tensors, numbers)
    return tensors["norm"]


def numbers_of(s: Settings) -> dict[str, float]:
    """What the kernels get of the settings; an lr on the device they load."""
    return {
        "lr": 0.0 if isinstance(s.lr, torch.Tensor) else float(s.lr),
        "log_beta1": max(-1e4, math.log(s.beta1 or 1e-300)),
        "log_beta2": max(-1e4, math.log(s.beta2 or 1e-300)),
        "weight_decay": float(s.weight_decay),
        "max_norm": float(s.max_norm),
        "seed": s.seed & 0x7FFFFFFF,
        "weight1": 1.0 - s.beta1,
        "beta2": float(s.beta2),
        "weight2": 1.0 - s.beta2,
        "eps": float(s.eps),
    }


def update(work: Sequence[tuple[Batch, Settings]], *, increments: bool) -> torch.Tensor:
    """Plan and run; with `increments` the steps are counted on first."""
    tasks = tuple(task_of(batch.group, settings) for batch, settings in work)
    return run(plan_tasks(tasks, clips=bool(work[0][1].max_norm), increments=increments), work)


LAST_CHUNK = "only in a tensor's last chunk, of which a mask takes as many elements as there are"
KERNELS = (Kernel(jit=_tick_kernel), Kernel(jit=_update_kernel, narrow=LAST_CHUNK))
CLIPPED_KERNELS = (Kernel(jit=_squares_kernel, narrow=LAST_CHUNK), Kernel(jit=_join_kernel), *KERNELS)
