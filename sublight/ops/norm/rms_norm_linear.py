"""RMSNorm and the product behind it in one launch, for one row, as decoding has it; gate and up of a SwiGLU, too.

One row's product streams the weight past it, so the row itself is nothing: every program norms it anew. The norm's
scale is one number, so it multiplies the finished sums: the row's squares are added up beside its products, and no
program waits for a norm. With `gated` the weight is gate above up; a program has the same rows of both, and writes
silu(gate) * up. What a launch between two products costs, some microseconds a layer, is saved.
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
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, eps: float = EPS,
    gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's composition."""
    y = F.linear(F.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias)
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _norm_linear_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, n, k, w_row, eps,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight: with GATED, half of them gates, each followed by its up. n counts results.

    Neighbours along k that a thread loads at once it adds up at once, as `skinny._row_kernel` does: it needs half the
    registers so.
    """
    WIDE: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth
    TOGETHER: tl.constexpr = WIDE if BK >= WIDE else BK
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
    for start in range(0, k, BK):
        if EVEN:  # whole blocks
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + step).to(tl.float32)
            scale = tl.load(norm_ptr + start + step).to(tl.float32)
        else:
            inside = step < k - start
            w = tl.load(w_at + start, mask=(result < n)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + step, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(norm_ptr + start + step, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum((w.to(tl.float32) * (x * scale)[None, :]).reshape(BN, BK // TOGETHER, TOGETHER), 2)
        squares += tl.sum((x * x).reshape(BK // TOGETHER, TOGETHER), 1)
    sums = tl.sum(acc, axis=1) * tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + place, mask=result < n, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(sums.reshape(BN // 2, 2))
        at = tl.program_id(0).to(tl.int64) * (BN // 2) + tl.arange(0, BN // 2)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=at < n)
    else:
        tl.store(y_ptr + result, sums.to(y_ptr.dtype.element_ty), mask=result < n)


def plan_row(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: Maybe, eps: float, gated: bool
) -> Plan:
    k, n = x.shape[-1], weight.shape[0] // (2 if gated else 1)
    bn, bk = 4, min(4096 // x.element_size(), next_power_of_2(k))
    per_program = bn // 2 if gated else bn
    given = {"x": x, "norm_weight": norm_weight, "weight": weight, "bias": bias}
    copies = tuple(name for name, each in given.items() if each is not None and not _is_whole(each))
    w_row = k if "weight" in copies else weight.stride(0)
    step = Step(
        _norm_linear_kernel, (cdiv(n, per_program),), n, k, w_row, float(eps),
        on=f"x norm_weight weight {'bias' if bias is not None else 'x'} y", tile=(bn, bk),
        HAS_BIAS=bias is not None, GATED=gated, BN=bn, BK=bk,
        EVEN=n % per_program == 0 and k % bk == 0, num_warps=4,
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one row: its norm's scale multiplies the finished sums, one launch in all",
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


def why_torch(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: Maybe, eps: float, gated: bool
) -> str:
    if reason := why_no_way(x):
        return reason
    if not weight.numel():
        return "nothing to multiply"
    if x.is_cuda and (facts(x).capability != 90 or x.element_size() != 2):
        return "cuBLAS: our products of one row are timed on Hopper, in 16 bits"
    return "cuBLAS: a weight below 2 MiB" if x.is_cuda and weight.nbytes < ROW_BYTES else ""


def _fake(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if rest[-1] else 1)))


_rms_norm_linear = Registered(
    schema="rms_norm_linear(Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, bool gated)"
    " -> Tensor y",
    reference=reference,
    theirs="torch.nn.functional.rms_norm, torch.nn.functional.linear",
    why_torch=why_torch,
    plan=plan_row,
    fake=_fake,
)


def check(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: Maybe, gated: bool) -> None:
    k = x.shape[-1] if x.dim() else 0
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != k or norm_weight.shape != (k,):
        shapes = f"x {tuple(x.shape)}, norm_weight {tuple(norm_weight.shape)}, weight {tuple(weight.shape)}"
        raise BadInput(f"{shapes}: use (…, k), (k,) and (n, k)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(f"bias {tuple(bias.shape)}: use ({weight.shape[0]},)")
    if gated and weight.shape[0] % 2:
        raise BadInput(f"a gated weight has as many gates as ups, not {weight.shape[0]} rows: put gate above up")
    given = [each for each in (x, norm_weight, weight, bias) if each is not None]
    if len({(each.dtype, each.device) for each in given}) > 1:
        raise BadInput("x, the weights and the bias differ in data type or device: make them alike")
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        raise BadInput("rms_norm_linear has no gradient: call it under torch.no_grad()")


def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe = None,
    *,
    eps: float = EPS,
    gated: bool = False,
) -> torch.Tensor:
    """RMSNorm(x) @ weight.T + bias, x (…, k), weight (n, k); for inference.

    With `gated` the weight is gate above up, and the result silu(gate) * up, half as wide. One row is one launch of
    ours; more rows go to PyTorch.
    """
    check(x, norm_weight, weight, bias, gated)
    return _rms_norm_linear.call(x, norm_weight, weight, bias, float(eps), gated)  # type: ignore[no-any-return]


def _arguments(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, eps: float = EPS,
    gated: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    check(x, norm_weight, weight, bias, gated)
    return x, norm_weight, weight, bias, float(eps), bool(gated)


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
    summary="RMSNorm and the product behind it, of one row",
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
    library_args=lambda *tensors, gated=False: (*tensors, None, EPS, gated),
)
