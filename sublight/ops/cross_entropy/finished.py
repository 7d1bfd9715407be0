"""A gradient that the forward pass has finished: it is handed over once, times the gradient of the loss.

`backward()` is nearly always called on the loss, whose own gradient is then 1.0, and nothing is left to do. The
gradient is scaled where it lies and then belongs to whoever wanted it; a second backward pass computes it again. One
that will be differentiated again (`create_graph=True`) goes through the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sublight.backend.device import facts, why_not_here
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.backend.state import PLAIN, who_listens
from sublight.op import Kernel, Plan
from sublight.ops.kernels.rows import Rows, copies_of, rows_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

SCALE_BLOCK = 4096  # columns that a program takes at a time


@triton.jit
def _scale_kernel(
    d_ptr, dloss_ptr, count_ptr, rows, cols, d_stride, dloss_stride, factor,
    PER_ROW: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient times the loss's own, in place. That is 1.0 where the loss is what backward() was called on: then
    nothing is left to do, and only this kernel can know without waiting for the GPU."""
    scale = factor
    if LATE:
        count = tl.load(count_ptr)
        scale = tl.where(count > 0.0, tl.div_rn(factor, count), factor)
    by = tl.load(dloss_ptr).to(tl.float32) * scale
    rows_left = rows
    if not PER_ROW:
        rows_left = tl.where(by == 1.0, 0, rows)
    for row in range(tl.program_id(0), rows_left, tl.num_programs(0)):
        if PER_ROW:
            by = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32) * scale
        start = d_ptr + (row + tl.zeros([], tl.int64)) * d_stride  # int64: rows * cols may pass 2**31
        for chunk in range(tl.program_id(1) * BLOCK, tl.where(by == 1.0, 0, cols), tl.num_programs(1) * BLOCK):
            col = chunk + tl.arange(0, BLOCK)
            d = tl.load(start + col, mask=col < cols).to(tl.float32) * by
            tl.store(start + col, d.to(d_ptr.dtype.element_ty), mask=col < cols)


KERNEL = Kernel(jit=_scale_kernel)


def scale_step(d: Rows, dloss: torch.Tensor, *, late: bool, factor: float = 1.0, on: str) -> Step:
    """d *= dloss * factor (and one over the count where that is `late`), row by row where there is a loss a row."""
    programs = 8 * facts(dloss).multiprocessors  # few: where there is nothing to do, ending them is all that this costs
    across = min(d.rows, programs)
    return Step(
        _scale_kernel, (across, min(cdiv(d.cols, SCALE_BLOCK), max(1, programs // across))),
        d.rows, d.cols, d.apart, each_loss(dloss).apart, float(factor),
        on=on, PER_ROW=dloss.dim() > 0, LATE=late, BLOCK=SCALE_BLOCK, num_warps=8,
    )  # fmt: skip


def each_loss(dloss: torch.Tensor) -> Rows:
    """How far one loss's gradient is from the next."""
    return rows_of(dloss.unsqueeze(-1))


def _plan(d: Rows, dloss: torch.Tensor, *, late: bool, factor: float) -> Plan:
    return Plan(
        provider="sublight",
        reason="nothing is left to do where the loss's own gradient is 1",
        copies=copies_of(dloss=each_loss(dloss).is_copy),
        steps=(scale_step(d, dloss, late=late, factor=factor, on="gradient dloss count"),),
    )


def _scaled_copy(plan: Plan, gradient: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor, *_: Any) -> torch.Tensor:
    d = gradient.clone(memory_format=torch.contiguous_format)
    (step,) = plan.steps
    step(d, dloss.contiguous() if plan.copies else dloss, count)
    return d


SCALE_IN_PLACE = Registered(
    schema="cross_entropy_scale_in_place(Tensor(a!) gradient, Tensor dloss, Tensor count, bool late, float factor)"
    " -> ()",
    plan=lambda gradient, dloss, count, late, factor: _plan(rows_of(gradient), dloss, late=late, factor=factor),
    fake=lambda *args: None,
)
SCALED = Registered(
    schema="cross_entropy_scaled(Tensor gradient, Tensor dloss, Tensor count, bool late, float factor)"
    " -> Tensor scaled",
    plan=lambda gradient, dloss, count, late, factor: _plan(
        rows_of(gradient).in_one_piece, dloss, late=late, factor=factor
    ),
    fake=lambda gradient, *rest: torch.empty_like(gradient, memory_format=torch.contiguous_format),
    launch=_scaled_copy,
)


def is_unobserved(*tensors: torch.Tensor) -> bool:
    """Whether our kernels may write into these: nobody traces the call, or holds a tensor of a class of its own."""
    return not who_listens() and all(type(x) in PLAIN for x in tensors) and not why_not_here(tensors[0])


def scaled(d: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor, late: bool, factor: float = 1.0) -> torch.Tensor:
    """The gradient times the loss's own: in place, unless somebody traces this and holds d to be an output."""
    dloss = dloss.resolve_neg()
    if not is_unobserved(d, dloss, count):
        return SCALED.call(d, dloss, count, late, factor)  # type: ignore[no-any-return]
    SCALE_IN_PLACE.call(d, dloss, count, late, factor)
    return d


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished(Gradient):
    """All but the first of an op's outputs are what its gradient is made of.

    `by` is `in_python` of a function: (dloss, saved arguments by name, those outputs or None if they were handed over
    before, names of the arguments that want a gradient) -> a gradient for each of `gives`.
    """

    def set_up(self, ctx: Any, op: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        Gradient.set_up(self, ctx, op, inputs, outputs)
        ctx.finished = outputs[1:]  # not saved for backward: they change in place, once
        named = zip(op.arguments, inputs, strict=True)
        ctx.wanted = {name for name, x in named if isinstance(x, torch.Tensor) and x.requires_grad}

    def backward(self, ctx: Any, op: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        (dloss,) = grads
        if dloss is None:
            return (None,) * len(op.arguments)
        if torch.is_grad_enabled():
            return self._differentiable(ctx, op, grads)
        finished, ctx.finished = ctx.finished, None
        saved = dict(zip(self.saves, ctx.saved_tensors, strict=True)) | ctx.others
        return self._by_argument(op, self.by.call(dloss, saved, finished, ctx.wanted))
