"""RMSNorm and the product behind it in one launch, for one row, as decoding has it; a residual or SwiGLU, too.

One row's product streams the weight past it, so the row itself is nothing: every program norms it anew. The norm's
scale is one number, so it multiplies the finished sums: the row's squares are added up beside its products, and no
program waits for a norm. With `gated` the weight is gate above up; a program has the same rows of both, and writes
silu(gate) * up. What a launch between two products costs, some microseconds a layer, is saved.

Where weights are `frozen` a launch need not wait for the one before it to read them: on Hopper it begins while that one
ends (programmatic dependent launch), brings its first block of weights into the L2, and only then waits for x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import rms_norm_linear as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.record.library import Registered

Maybe = torch.Tensor | None
EPS = 1e-6
ROW_BYTES = 2 << 20  # of a weight: a smaller one's launches cost as much apart


def reference(
    x: torch.Tensor, norm_weight: Maybe, weight: torch.Tensor, bias: Maybe = None, residual: Maybe = None,
    eps: float = EPS, gated: bool = False, frozen: bool = False,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's composition."""
    normed = x if norm_weight is None else F.rms_norm(x, x.shape[-1:], norm_weight, eps)
    y = F.linear(normed, weight, bias)
    if not gated:
        return y if residual is None else y + residual
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _norm_linear_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, n, k, w_row, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight: with GATED, half of them gates, each followed by its up. n counts results.

    Neighbours along k that a thread loads at once it adds up at once, as `skinny._row_kernel` does: it needs half the
    registers so.
    """
    WIDE: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth
    TOGETHER: tl.constexpr = WIDE if BK >= WIDE else BK
    LINE: tl.constexpr = 8 * WIDE  # elements of 128 bytes
    row = tl.arange(0, BN)
    if GATED:
        result = tl.program_id(0).to(tl.int64) * (BN // 2) + row // 2
        place = result + row % 2 * n
    else:
        result = tl.program_id(0).to(tl.int64) * BN + row
        place = result
    step = tl.arange(0, BK)
    w_at = w_ptr + place[:, None] * w_row + step[None, :]
    acc = tl.zeros([BN, BK // TOGETHER], tl.float32)
    squares = tl.zeros([BK // TOGETHER], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        line = tl.arange(0, BK // LINE) * LINE
        lines_at = w_ptr + place[:, None] * w_row + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines_at], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()  # x is there
    for start in range(0, k, BK):
        if EVEN:  # whole blocks
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + step).to(tl.float32)
            scale = tl.load(norm_ptr + start + step).to(tl.float32) if HAS_NORM else 1.0
        else:
            inside = step < k - start
            w = tl.load(w_at + start, mask=(result < n)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + step, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(norm_ptr + start + step, mask=inside, other=0.0).to(tl.float32) if HAS_NORM else 1.0
        acc += tl.sum((w.to(tl.float32) * (x * scale)[None, :]).reshape(BN, BK // TOGETHER, TOGETHER), 2)
        if HAS_NORM:
            squares += tl.sum((x * x).reshape(BK // TOGETHER, TOGETHER), 1)
    sums = tl.sum(acc, axis=1)
    if HAS_NORM:
        sums *= tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + place, mask=result < n, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(sums.reshape(BN // 2, 2))
        at = tl.program_id(0).to(tl.int64) * (BN // 2) + tl.arange(0, BN // 2)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=at < n)
    else:
        if HAS_RESIDUAL:
            sums += tl.load(residual_ptr + result, mask=result < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + result, sums.to(y_ptr.dtype.element_ty), mask=result < n)


def plan_row(
    x: torch.Tensor, norm_weight: Maybe, weight: torch.Tensor, bias: Maybe, residual: Maybe, eps: float, gated: bool,
    frozen: bool,
) -> Plan:  # fmt: skip
    k, n = x.shape[-1], weight.shape[0] // (2 if gated else 1)
    bn, bk = 4, min(4096 // x.element_size(), next_power_of_2(k))
    per_program = bn // 2 if gated else bn
    given = {"x": x, "norm_weight": norm_weight, "weight": weight, "bias": bias, "residual": residual}
    copies = tuple(name for name, each in given.items() if each is not None and not _is_whole(each))
    w_row = k if "weight" in copies else weight.stride(0)
    is_even = n % per_program == 0 and k % bk == 0
    is_early = frozen and is_even and x.is_cuda and facts(x).capability >= 90 and "weight" not in copies
    more: dict[str, Any] = {"launch_pdl": True} if is_early else {}
    on = [name if each is not None else "x" for name, each in given.items()]
    step = Step(
        _norm_linear_kernel, (cdiv(n, per_program),), n, k, w_row, float(eps),
        on=" ".join((*on, "y")), tile=(bn, bk), HAS_NORM=norm_weight is not None, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, GATED=gated, BN=bn, BK=bk, EVEN=is_even, EARLY=is_early, num_warps=4, **more,
    )  # fmt: skip
    early = "; it begins while the launch before it ends" if is_early else ""
    return Plan(
        provider="sublight",
        reason=f"one row: its norm's scale multiplies the finished sums, one launch in all{early}",
        copies=copies,
        buffers={"y": Buffer(shape=(*x.shape[:-1], n), dtype=x.dtype)},
        steps=(step,),
        outputs=("y",),
    )


def _is_whole(x: torch.Tensor) -> bool:
    """Whether rows lie in one piece; of a weight they may lie apart."""
    return x.stride(-1) == 1 if x.dim() == 2 and x.shape[0] > 1 else x.is_contiguous()


def why_no_way(x: torch.Tensor) -> str:
    """Why our kernel does not take this; empty where it does."""
    if reason := why_no_kernel(x):
        return reason
    if x.numel() != x.shape[-1]:
        return "more than one row: the norm by itself, then cuBLAS"
    return "" if x.numel() else "nothing to multiply"


def why_torch(x: torch.Tensor, norm_weight: Maybe, weight: torch.Tensor, *rest: Any) -> str:
    if reason := why_no_way(x):
        return reason
    if not weight.numel():
        return "nothing to multiply"
    if x.is_cuda and (facts(x).capability != 90 or x.element_size() != 2):
        return "cuBLAS: our products of one row are timed on Hopper, in 16 bits"
    return "cuBLAS: a weight below 2 MiB" if x.is_cuda and weight.nbytes < ROW_BYTES else ""


def _fake(
    x: torch.Tensor, norm_weight: Maybe, weight: torch.Tensor, bias: Maybe, residual: Maybe, eps: float, gated: bool,
    frozen: bool,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if gated else 1)))


_rms_norm_linear = Registered(
    schema="rms_norm_linear(Tensor x, Tensor? norm_weight, Tensor weight, Tensor? bias, Tensor? residual, float eps, "
    "bool gated, bool frozen) -> Tensor y",
    reference=reference,
    theirs="torch.nn.functional.rms_norm, torch.nn.functional.linear",
    why_torch=why_torch,
    plan=plan_row,
    fake=_fake,
)


def check(x: torch.Tensor, norm_weight: Maybe, weight: torch.Tensor, bias: Maybe, residual: Maybe, gated: bool) -> None:
    k = x.shape[-1] if x.dim() else 0
    norm_shape = (k,) if norm_weight is None else tuple(norm_weight.shape)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != k or norm_shape != (k,):
        shapes = f"x {tuple(x.shape)}, norm_weight {norm_shape}, weight {tuple(weight.shape)}"
        raise BadInput(f"{shapes}: use (…, k), (k,) and (n, k)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(f"bias {tuple(bias.shape)}: use ({weight.shape[0]},)")
    if gated and weight.shape[0] % 2:
        raise BadInput(f"a gated weight has as many gates as ups, not {weight.shape[0]} rows: put gate above up")
    if residual is not None and (gated or residual.shape != (*x.shape[:-1], weight.shape[0])):
        wanted = "leave it out of a gated product" if gated else f"use {(*x.shape[:-1], weight.shape[0])}"
        raise BadInput(f"residual {tuple(residual.shape)}: {wanted}")
    given = [each for each in (x, norm_weight, weight, bias, residual) if each is not None]
    if len({(each.dtype, each.device) for each in given}) > 1:
        raise BadInput("x, the weights, the bias and the residual differ in data type or device: make them alike")
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        raise BadInput("rms_norm_linear has no gradient: call it under torch.no_grad()")


def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    bias: Maybe = None,
    *,
    residual: Maybe = None,
    eps: float = EPS,
    gated: bool = False,
    frozen: bool = False,
) -> torch.Tensor:
    """RMSNorm(x) @ weight.T + bias + residual, x (…, k), weight (n, k); for inference. None as norm_weight: no norm.

    With `gated` the weight is gate above up, and the result silu(gate) * up, half as wide. One row is one launch of
    ours; more rows go to PyTorch. `frozen` is the caller's word that whatever was launched just before does not write
    the weight: it may then be read while that launch still runs.
    """
    check(x, norm_weight, weight, bias, residual, gated)
    return _rms_norm_linear.call(x, norm_weight, weight, bias, residual, float(eps), gated, frozen)  # type: ignore[no-any-return]


def _arguments(
    x: torch.Tensor, norm_weight: Maybe, weight: torch.Tensor, bias: Maybe = None, residual: Maybe = None,
    eps: float = EPS, gated: bool = False, frozen: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    check(x, norm_weight, weight, bias, residual, gated)
    return x, norm_weight, weight, bias, residual, float(eps), bool(gated), bool(frozen)


def launch(*args: Any, **options: Any) -> torch.Tensor:
    """Our kernel, whether or not it wins."""
    return _rms_norm_linear.by_kernels(*_arguments(*args, **options))  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    n, k = shape["n"] * (2 if shape["gated"] else 1), shape["k"]
    made: dict[str, Any] = {"generator": generator_for(device, seed), "device": device, "dtype": getattr(torch, dtype)}
    return torch.randn(1, k, **made), torch.randn(k, **made), torch.randn(n, k, **made)


def _shapes(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple({"n": n, "k": k, "gated": gated} for n, k, gated in sizes)


RMS_NORM_LINEAR = Op(
    name="rms_norm_linear",
    summary="RMSNorm and the product behind it, with a residual or SwiGLU, of one row",
    reference=reference,
    call=rms_norm_linear,
    plan=lambda *args, **options: _rms_norm_linear.decide(*_arguments(*args, **options)),
    providers={
        "sublight": Provider(
            launch=launch,
            kernels=(Kernel(jit=_norm_linear_kernel, narrow="rows of odd width begin anywhere"),),
            why_not=lambda x, *_: "" if x.numel() == x.shape[-1] else "it is for one row",
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes((6144, 4096, 0), (14336, 4096, 1), (4096, 4096, 0)),
    test_shapes=_shapes((1, 1, 0), (5, 127, 0), (8, 128, 1), (7, 129, 1), (3, 2049, 0), (6, 4100, 1)),
    options={"gated": (0, 1)},
    call_options=lambda shape: {"gated": bool(shape["gated"])},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors, gated=False: (*tensors, None, None, EPS, gated, False),
)
