"""One row by a weight, dense or packed, with what stands before and behind it in a decoding step, in one launch.

RMSNorm before the product, SwiGLU behind it or what it is added to: launches of their own are 2 µs each, of which a
step has hundreds. `stream` (Hopper) begins to read the weight while the launch before it still runs; its launch takes
the host long, since the copy engine wants the weight described, so it is for CUDA graphs. `plain` takes any GPU, size
and number of bits.

What is read before the launch before has ended must not be what that one writes. Which kernel made a weight cannot be
seen here, so by default `stream` waits before it reads, too; who knows that the weight is older says `fixed_weight`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, gl, next_power_of_2, tl, triton, why_no_gluon
from sublight.backend.launch import Step, View
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import row_linear as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.matmul import stream
from sublight.ops.matmul.packing import block_of, check_bits, check_group, dequantize, quantize_weight, words_of
from sublight.ops.record.library import Registered

Maybe = torch.Tensor | None
EPS = 1e-6
BITS = 4  # of a packed weight, unless given
DENSE = 16  # of a value of one that is not
SHARED_BYTES = {1: 226_000, 2: 115_000}  # for what is on its way and for the row, by programs of a multiprocessor
SHARED_REGISTERS = 80  # of a thread, where two programs share a multiprocessor
MOST_STAGES = 12
SMALL_STAGES, SMALL = 6, 2**25  # of a dense weight of so many bytes
PACKED_STAGES = {1: 6, 2: 4}  # of each program, by how many share a multiprocessor
SHORT = 8192  # k of a row that is normed in the registers of two programs
LONGEST = 32768  # k of a row that has room beside them


def reference(
    x: torch.Tensor, weight: torch.Tensor, scales: Maybe = None, zeros: Maybe = None, norm_weight: Maybe = None,
    bias: Maybe = None, residual: Maybe = None, bits: int = BITS, eps: float = EPS, gated: bool = False,
    fixed_weight: bool = False,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's composition."""
    if scales is not None and zeros is not None:
        weight = dequantize(weight, scales, zeros, bits, x.shape[-1]).to(x.dtype)
    y = F.linear(x if norm_weight is None else F.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual


@triton.jit
def _plain_kernel(
    x_ptr, norm_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, y_ptr, n, k, w_row, groups, eps,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight; with GATED, half of them gates, each followed by its up. n counts results."""
    row = tl.arange(0, BN)
    if GATED:
        result = tl.program_id(0).to(tl.int64) * (BN // 2) + row // 2
        place = result + row % 2 * n
    else:
        result = tl.program_id(0).to(tl.int64) * BN + row
        place = result
    step = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for start in range(0, k, BK):
        at = start + step
        inside = (result < n)[:, None] & (at < k)[None, :]
        x = tl.load(x_ptr + at, mask=at < k, other=0.0).to(tl.float32)
        squares += x * x
        if HAS_NORM:
            x *= tl.load(norm_ptr + at, mask=at < k, other=0.0).to(tl.float32)
        if BITS == 16:
            w = tl.load(w_ptr + place[:, None] * w_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        else:
            within = at % (512 // BITS)  # packing.py: place, word, half of it
            word = at // (512 // BITS) * 16 + within % 32 // 2
            words = tl.load(w_ptr + place[:, None] * w_row + word[None, :], mask=inside, other=0)
            values = words >> (within // 32 * BITS + within % 2 * 16)[None, :] & ((1 << BITS) - 1)
            group = place[:, None] * groups + (at // GROUP)[None, :]
            zero = tl.load(zeros_ptr + group, mask=inside, other=0.0).to(tl.float32)
            w = (values.to(tl.float32) - zero) * tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
        acc += w * x[None, :]
    sums = tl.sum(acc, axis=1)
    if HAS_NORM:
        sums *= tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + place, mask=result < n, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(sums.reshape(BN // 2, 2))
        at = tl.program_id(0).to(tl.int64) * (BN // 2) + tl.arange(0, BN // 2)
        sums = gate / (1.0 + tl.exp(-gate)) * up
    else:
        at = result
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=at < n)


def _names(norm_weight: Maybe, bias: Maybe, residual: Maybe) -> tuple[str, str]:
    """The tensors before and behind a weight; x stands for what is not there."""
    return f"x {'x' if norm_weight is None else 'norm_weight'}", " ".join(
        [
            "x" if bias is None else "bias",
            "x" if residual is None else "residual",
            "y",
        ]
    )


def _plan(
    provider: str, reason: str, x: torch.Tensor, weight: torch.Tensor, gated: bool, step: Step, copies: tuple[str, ...]
) -> Plan:
    return Plan(
        provider=provider,
        reason=reason,
        copies=copies,
        buffers={"y": Buffer(shape=(*x.shape[:-1], weight.shape[0] // (2 if gated else 1)), dtype=x.dtype)},
        steps=(step,),
        outputs=("y",),
    )


def plan_plain(
    x: torch.Tensor, weight: torch.Tensor, scales: Maybe, zeros: Maybe, norm_weight: Maybe, bias: Maybe,
    residual: Maybe, bits: int, eps: float, gated: bool, fixed_weight: bool,
) -> Plan:  # fmt: skip
    k, n = x.shape[-1], weight.shape[0] // (2 if gated else 1)
    bn, bk = 4, min(1024, max(16, next_power_of_2(k)))
    names = ("x", "weight", "scales", "zeros", "norm_weight", "bias", "residual")
    given = zip(names, (x, weight, scales, zeros, norm_weight, bias, residual), strict=True)
    groups = 1 if scales is None else scales.shape[1]
    front, behind = _names(norm_weight, bias, residual)
    step = Step(
        _plain_kernel, (cdiv(n, bn // 2 if gated else bn),), n, k, weight.shape[1], groups, float(eps),
        on=f"{front} weight {'x x' if scales is None else 'scales zeros'} {behind}", tile=(bn, bk),
        BITS=DENSE if scales is None else bits, GROUP=max(1, k // groups), HAS_NORM=norm_weight is not None,
        GATED=gated, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, BN=bn, BK=bk, num_warps=4,
    )  # fmt: skip
    copies = tuple(name for name, each in given if each is not None and not each.is_contiguous())
    return _plan("plain", "one row: products by plain multiply-adds, one launch in all", x, weight, gated, step, copies)


def plan_stream(
    x: torch.Tensor, weight: torch.Tensor, scales: Maybe, zeros: Maybe, norm_weight: Maybe, bias: Maybe,
    residual: Maybe, bits: int, eps: float, gated: bool, fixed_weight: bool, *, stages: int = 0, programs: int = 0,
    dependent: bool = True,
) -> Plan:  # fmt: skip
    """`dependent`: the launch begins before the one before it has ended, and waits where it needs the row, or with a
    weight that is not fixed, before it reads anything. Two `programs` share a multiprocessor where weights are packed:
    while one waits for shared memory the other takes values apart. A small dense weight, as the one behind attention
    is, has a ring of half the room: it is read beside the launch before."""
    is_short = norm_weight is None or x.shape[-1] <= SHORT
    programs = programs or (2 if scales is not None and is_short else 1)
    if not stages:
        dense = SMALL_STAGES if weight.nbytes <= SMALL else MOST_STAGES
        stages = dense if scales is None else PACKED_STAGES[programs]
    k, rows, n = x.shape[-1], weight.shape[0], weight.shape[0] // (2 if gated else 1)
    line = 2 * block_of(bits) if scales is not None else 2 * stream.LINE_WORDS  # values along k
    pieces, half = cdiv(k, line * stream.WARPS), stream.HALF_ROWS
    at_once = next_power_of_2(pieces)
    row_bytes = at_once * line * stream.WARPS * 2 + at_once * stream.WARPS * 8
    piece_bytes = stream.PIECE_BYTES
    columns = weight.shape[1] // (k // line)  # elements of a line
    lines = (k // line, rows, columns), (columns, weight.shape[1], 1), (stream.WARPS, half, columns)
    views = {2: View(*lines, gl.NVMMASharedLayout(128, 16 if scales is None else 32, rank=3))}
    if scales is not None:
        groups = scales.shape[1]
        of_scales = View((rows, groups), (groups, 1), (half, 2 * stream.WARPS), gl.NVMMASharedLayout(32, 16))
        views |= {3: of_scales, 4: of_scales}
        piece_bytes += 2 * 2 * half * 2 * stream.WARPS * 2
    step_rows = half if gated else 2 * half
    tiles = cdiv(n, step_rows)
    front, behind = _names(norm_weight, bias, residual)
    step = Step(
        stream._stream_kernel, (min(tiles, programs * facts(x).multiprocessors),),
        n, k, tiles, pieces, n if gated else half, step_rows, float(eps),
        on=f"{front} weight {'x x' if scales is None else 'scales zeros'} {behind}", views=views,
        tile=(2 * half, line * stream.WARPS), PIECES=at_once, BITS=DENSE if scales is None else bits,
        STAGES=min(stages, (SHARED_BYTES[programs] - row_bytes) // piece_bytes),
        HAS_NORM=norm_weight is not None, GATED=gated, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, DEPENDENT=dependent, EARLY=fixed_weight, num_warps=stream.WARPS,
        **({"launch_pdl": True} if dependent else {}), **({} if programs == 1 else {"maxnreg": SHARED_REGISTERS}),
    )  # fmt: skip
    early = ", from before the last launch ends" if dependent and fixed_weight else ""
    reason = f"one row on Hopper: the weight streams through a ring in shared memory{early}"
    return _plan("stream", reason, x, weight, gated, step, ())


def why_no_stream(x: torch.Tensor, weight: torch.Tensor, scales: Maybe, bits: int = BITS, *, k: int = 0) -> str:
    """Why `stream` does not take this; empty where it does. `k` where x is not the row, but one like it."""
    if why_no_gluon or is_interpreted():
        return why_no_gluon or "Gluon is not interpreted"
    if facts(x).capability != 90 or x.element_size() != 2:
        return f"it is for Hopper (sm_90) and 16 bits, not sm_{facts(x).capability} and {x.dtype}"
    if x.numel() != x.shape[-1]:
        return "it is for one row"
    k = k or (weight.shape[1] if scales is None else x.shape[-1])
    block = block_of(bits) if scales is not None else stream.LINE_WORDS
    if k % (2 * block) or k > LONGEST or (scales is not None and bits not in (2, 4)):
        return f"it is for 2, 4 and 16 bits, and k up to {LONGEST} in lines of 128 bytes, not for k = {k}"
    if scales is not None and (scales.shape[1] * block != k or scales.shape[1] % 8):
        return f"it is for groups of {block}, eight of them or a multiple, not {scales.shape[1]} of {k}"
    given = (x, weight) if scales is None else (x, weight, scales)
    is_whole = all(_is_whole(each) for each in given)
    return "" if is_whole else "it is for tensors in one piece, at 16 bytes"


def _is_whole(x: torch.Tensor) -> bool:
    """In one piece that begins at 16 bytes; a tensor that is traced has no address, the call itself asks again."""
    return x.is_contiguous() and (torch.compiler.is_compiling() or x.data_ptr() % 16 == 0)


def plan_row(*args: Any) -> Plan:
    x, weight, scales, zeros, *_, bits, _, _, _ = args
    is_alike = zeros is None or _is_whole(zeros)
    return plan_stream(*args) if is_alike and not why_no_stream(x, weight, scales, bits) else plan_plain(*args)


def why_torch(x: torch.Tensor, weight: torch.Tensor, scales: Maybe, *rest: Any) -> str:
    if reason := why_no_kernel(x):
        return reason
    if not x.numel() or not weight.numel():
        return "nothing to multiply"
    if x.numel() != x.shape[-1]:
        return "more than one row"
    return why_no_stream(x, weight, scales, rest[4]) if x.is_cuda else ""


def _fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if rest[-2] else 1)))


_row_linear = Registered(
    schema="row_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? zeros, Tensor? norm_weight, Tensor? bias, "
    "Tensor? residual, int bits, float eps, bool gated, bool fixed_weight) -> Tensor y",
    reference=reference,
    theirs="torch.nn.functional.rms_norm, torch.nn.functional.linear",
    why_torch=why_torch,
    plan=plan_row,
    fake=_fake,
)


def check(
    x: torch.Tensor, weight: torch.Tensor, scales: Maybe, zeros: Maybe, norm_weight: Maybe, bias: Maybe,
    residual: Maybe, bits: int, gated: bool,
) -> None:  # fmt: skip
    k = x.shape[-1] if x.dim() else 0
    if x.dim() < 1 or weight.dim() != 2:
        raise BadInput(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: use (…, k) and (n, k)")
    if (scales is None) != (zeros is None):
        raise BadInput("a packed weight has scales and zeros, a dense one neither: give both or none")
    if scales is not None and zeros is not None:
        check_bits(bits)
        if weight.dtype != torch.int32 or weight.shape[1] != words_of(k, bits):
            raise BadInput(f"{weight.dtype} {tuple(weight.shape)} is not packed from k = {k} of {bits} bits")
        if scales.dim() != 2 or scales.shape[0] != weight.shape[0] or scales.shape != zeros.shape:
            raise BadInput(
                f"scales {tuple(scales.shape)} and zeros {tuple(zeros.shape)}: use ({weight.shape[0]}, groups)"
            )
        if not scales.shape[1] or k % scales.shape[1]:
            raise BadInput(f"{scales.shape[1]} groups do not divide k = {k}")
        check_group(k, k // scales.shape[1], bits)
    elif weight.shape[1] != k:
        raise BadInput(f"weight {tuple(weight.shape)} for x {tuple(x.shape)}: use (n, {k}), or give scales and zeros")
    if gated and weight.shape[0] % 2:
        raise BadInput(f"a gated weight has as many gates as ups, not {weight.shape[0]} rows: put gate above up")
    n = weight.shape[0] // (2 if gated else 1)
    if norm_weight is not None and norm_weight.shape != (k,):
        raise BadInput(f"norm_weight {tuple(norm_weight.shape)}: use ({k},)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadInput(f"bias {tuple(bias.shape)}: use ({weight.shape[0]},)")
    if residual is not None and residual.shape != (*x.shape[:-1], n):
        raise BadInput(f"residual {tuple(residual.shape)}: use {(*x.shape[:-1], n)}")
    like = [each for each in (x, scales, zeros, norm_weight, bias, residual) if each is not None]
    like += [weight] if scales is None else []
    if len({each.dtype for each in like}) > 1 or len({each.device for each in (*like, weight)}) > 1:
        raise BadInput("x, the weights and what is added differ in data type or device: make them alike")
    if torch.is_grad_enabled() and any(each.requires_grad for each in like):
        raise BadInput("row_linear has no gradient: call it under torch.no_grad()")


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: Maybe = None,
    zeros: Maybe = None,
    norm_weight: Maybe = None,
    bias: Maybe = None,
    residual: Maybe = None,
    *,
    bits: int = BITS,
    eps: float = EPS,
    gated: bool = False,
    fixed_weight: bool = False,
) -> torch.Tensor:
    """RMSNorm(x) @ weight.T + bias + residual, x (…, k) one row; for inference.

    The weight is (n, k), or with `scales`, `zeros` and `bits` what `quantize_weight` makes of one. Without
    `norm_weight` x is taken as it is. With `gated` the weight is gate above up, and silu(gate) * up stands for the
    product. On a GPU it pays inside of a CUDA graph: a launch takes the host long. `fixed_weight` promises that no
    launch that may still run writes the weight (its scales, its zeros): then reading begins before the last one ends.
    """
    check(x, weight, scales, zeros, norm_weight, bias, residual, bits, gated)
    return _row_linear.call(  # type: ignore[no-any-return]
        x, weight, scales, zeros, norm_weight, bias, residual, bits, float(eps), gated, fixed_weight
    )


def _arguments(
    x: torch.Tensor, weight: torch.Tensor, scales: Maybe = None, zeros: Maybe = None, norm_weight: Maybe = None,
    bias: Maybe = None, residual: Maybe = None, bits: int = BITS, eps: float = EPS, gated: bool = False,
    fixed_weight: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    check(x, weight, scales, zeros, norm_weight, bias, residual, bits, gated)
    return x, weight, scales, zeros, norm_weight, bias, residual, bits, float(eps), bool(gated), bool(fixed_weight)


def launched_by(plan: Any) -> Any:
    def launch(*args: Any, **options: Any) -> Any:
        given = _arguments(*args, **options)
        return _row_linear.runner(plan(*given))(*given)

    return launch


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """A packed weight: a dense one has neither scales nor zeros."""
    rows, k, bits = shape["n"] * (2 if shape["gated"] else 1), shape["k"], shape["bits"]
    made: dict[str, Any] = {"generator": generator_for(device, seed), "device": device, "dtype": getattr(torch, dtype)}
    x, norm_weight, weight = torch.randn(1, k, **made), torch.randn(k, **made), torch.randn(rows, k, **made)
    if device == "meta":
        scales = torch.empty(rows, k // shape["group"], device=device, dtype=x.dtype)
        packed = torch.empty(rows, words_of(k, bits), device=device, dtype=torch.int32)
        return x, packed, scales, scales.clone(), norm_weight
    return x, *quantize_weight(weight, bits, shape["group"]), norm_weight


def _shapes(*sizes: tuple[int, int, int, int, int]) -> tuple[Shape, ...]:
    return tuple(dict(zip(("n", "k", "bits", "group", "gated"), size, strict=True)) for size in sizes)


def _options(shape: Shape) -> dict[str, Any]:
    return {"bits": shape["bits"], "gated": bool(shape["gated"])}


ROW_LINEAR = Op(
    name="row_linear",
    summary="one row by a packed weight, RMSNorm before it and SwiGLU or a sum behind it",
    reference=reference,
    call=row_linear,
    plan=lambda *args, **options: _row_linear.decide(*_arguments(*args, **options)),
    providers={
        "stream": Provider(
            launch=launched_by(plan_stream),
            kernels=(stream.STREAM,),
            why_not=lambda x, weight, scales, *_: why_no_stream(x, weight, scales, BITS),
            summary="the weight through a ring in shared memory, by the copy engine, from its first microsecond on",
        ),
        "plain": Provider(
            launch=launched_by(plan_plain),
            kernels=(Kernel(jit=_plain_kernel, narrow="a word's values are taken one by one"),),
            summary="words taken apart one value at a time, plain multiply-adds",
        ),
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        (6144, 4096, 4, 128, 0), (14336, 4096, 4, 128, 1), (4096, 4096, 4, 128, 0), (4096, 14336, 4, 128, 0)
    ),
    test_shapes=_shapes(
        *((1, 128, 4, 128, 0), (5, 96, 4, 32, 0), (17, 1024, 4, 128, 0), (9, 1024, 4, 128, 1)),
        *((3, 2048, 4, 128, 1), (7, 200, 4, 200, 1)),
    ),
    options={"gated": (0, 1), "bits": (4,), "group": (128, 32, 200)},
    call_options=_options,
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors, bits=4, gated=False: (*tensors, None, None, bits, EPS, gated, False),
)
