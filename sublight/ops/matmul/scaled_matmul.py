"""C = A @ B of fp8 codes and their scales: one of each tensor, of each row and column, or of each 128 along k.

The codes are multiplied as they are; the scales come in where the sums are in fp32. Hopper's tensor cores add up fp8
products with some 14 bits: `fast` leaves whole sums to them, else every 128 of k goes into fp32 (`promoted.py`). A
weight (n, k) of codes is given as `weight.T`, its scales as `scales.T`, and nothing is moved for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from sublight.backend import private
from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import scaled_matmul as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Op, Plan, Provider
from sublight.ops.kernels.rows import copies_of, generator_for, why_no_kernel
from sublight.ops.matmul import persistent, promoted, split_k
from sublight.ops.matmul.product import Operand, Product, operands_of, product_of
from sublight.ops.matmul.promoted import BLOCK
from sublight.ops.matmul.steps import Work, align, by_engine
from sublight.ops.matmul.tiles import TRIED, Tile, split_of
from sublight.ops.quantize.quantize import quantize_fp8, quantize_fp8_blocks
from sublight.ops.record.library import Registered

Maybe = torch.Tensor | None
Scaling = Literal["tensor", "row", "columns", "blocks"]
CODES = torch.float8_e4m3fn
OUT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MULTIPLE = 16  # of n and k, for PyTorch's product
PROMOTED_TILE = Tile(bm=128, bn=128, bk=BLOCK, warps=8, stages=3)
DEFAULT_OUT = (
    "float16" if is_interpreted() else "bfloat16"
)  # of the record's calls: the interpreter's bf16 is not right
CODES_TILE = Tile(bm=64, bn=128, bk=BLOCK, warps=4, stages=2)


def scaling_of(m: int, n: int, k: int, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Scaling | None:
    """What the scales are of, by their shapes; None where they fit nothing.

    >>> scaling_of(4, 256, 300, torch.ones(4, 3), torch.ones(3, 2))
    'blocks'
    """
    pieces, shapes = cdiv(k, BLOCK), (tuple(scale_a.shape), tuple(scale_b.shape))
    if scale_a.numel() == scale_b.numel() == 1:
        return "tensor"
    if shapes[0] in ((m,), (m, 1)) and shapes[1] in ((n,), (1, n)):
        return "row"
    if shapes == ((m, pieces), (pieces, n)):
        return "columns"
    return "blocks" if shapes == ((m, pieces), (pieces, cdiv(n, BLOCK))) else None


def reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Maybe = None,
    out: str = DEFAULT_OUT, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's fp8 product where it has one for these scales, else the numbers multiplied in fp32."""
    (m, k), n = a.shape, b.shape[1]
    scaling = scaling_of(m, n, k, scale_a, scale_b)
    if a.dtype == CODES and a.is_cuda and not why_no_scaled_mm(a, b, scaling, out):
        by_row = scale_a.reshape(-1, 1).contiguous() if scaling == "row" else scale_a.reshape(())
        by_col = scale_b.reshape(1, -1).contiguous() if scaling == "row" else scale_b.reshape(())
        y: torch.Tensor = private.scaled_mm(
            a, b, scale_a=by_row, scale_b=by_col, out_dtype=OUT[out], use_fast_accum=fast
        )
        return y if bias is None else y + bias
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    if scaling in ("tensor", "row"):
        c = (a.to(wide) @ b.to(wide)) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    else:
        rows = scale_a.repeat_interleave(BLOCK, 1)[:, :k]
        cols = scale_b.repeat_interleave(BLOCK, 0)[:k]
        cols = cols if scaling == "columns" else cols.repeat_interleave(BLOCK, 1)[:, :n]
        c = (a.to(wide) * rows) @ (b.to(wide) * cols)
    c = c if bias is None else c + bias
    return c if wide == torch.float64 else c.to(OUT[out])


def why_no_scaled_mm(a: torch.Tensor, b: torch.Tensor, scaling: Scaling | None, out: str) -> str:
    """Why PyTorch's fp8 product does not take codes on a GPU; empty where it does."""
    if scaling not in ("tensor", "row"):
        return "it takes no scales of blocks in this order"
    if facts(a).backend != "cuda" or facts(a).capability < 89:
        return "no fp8 tensor cores before sm_89"
    if b.shape[1] % MULTIPLE or a.shape[1] % MULTIPLE:
        return f"it takes n and k that are multiples of {MULTIPLE}"
    if not a.is_contiguous() or not b.T.is_contiguous():
        return "it takes codes that lie along k"
    if scaling == "row" and (out != "bfloat16" or facts(a).capability < 90):
        return "its scales of rows are for bf16 from Hopper on"
    return ""


def why_no_engine(product: Product, operands: tuple[Operand, Operand], gpu: Facts) -> str:
    if gpu.capability != 90:
        return "tiles come by Hopper's copy engine, and this is another GPU"
    return "" if all(x.is_whole and not x.is_turned for x in operands) else "Hopper multiplies codes that lie along k"


def plan_by(
    provider: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Maybe,
    out: str, fast: bool,
) -> Plan:  # fmt: skip
    """`codes` by pointers; `promoted` with sums in fp32; `persistent` with the tensor cores' own."""
    product = product_of(a, b)
    assert product is not None  # both have two dimensions
    m, n, k = product[:3]
    scaling = scaling_of(m, n, k, scale_a, scale_b)
    assert scaling is not None
    operands, gpu = operands_of(product, a, b), facts(a)
    copies = copies_of(bias=bias is not None and not bias.is_contiguous())
    if scaling == "row":
        copies += copies_of(scale_a=not scale_a.is_contiguous(), scale_b=not scale_b.is_contiguous())
    strides = (*scale_a.stride(), *scale_b.stride()) if scaling in ("columns", "blocks") else (0, 0, 0, 0)
    buffers = {"c": Buffer(shape=(m, n), dtype=OUT[out])}
    if provider == "codes" or why_no_engine(product, operands, gpu):
        steps = [_by_pointers(product, strides, scaling, has_bias=bias is not None)]
    elif provider == "persistent" and scaling in ("tensor", "row"):
        epilogue = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": False, "ACTIVATION": "none"}
        work = Work(
            product=product, operands=operands, dtype=CODES, gpu=gpu, epilogue=epilogue,
            scaled="tensor" if scaling == "tensor" else "row", out_dtype=OUT[out],
        )  # fmt: skip
        split = split_of(m, n, cdiv(k, 2), gpu)  # in time, a block of 128 codes is one of 64 numbers
        more, steps = by_engine(work, replace(split, tile=replace(split.tile, bk=2 * split.tile.bk)))
        buffers |= more
    else:
        more, steps = _promoted(product, operands, strides, scaling, OUT[out], gpu, has_bias=bias is not None)
        buffers |= more
    return Plan(
        provider=provider,
        reason=WAYS[provider],
        copies=copies,
        buffers=buffers,
        steps=tuple(steps),
        outputs=("c",),
    )


def _by_pointers(p: Product, strides: tuple[int, ...], scaling: Scaling, *, has_bias: bool) -> Step:
    tile = CODES_TILE
    return Step(
        promoted._codes_kernel, (tile.count(p.m, p.n),), *p[:7], *strides,
        on=f"a b {'bias' if has_bias else 'c'} c scale_a scale_b", tile=tile, GROUP=tile.group,
        HAS_BIAS=has_bias, SCALED=scaling, **tile.options(),
    )  # fmt: skip


def _promoted(
    p: Product, operands: tuple[Operand, Operand], strides: tuple[int, ...], scaling: Scaling, out: torch.dtype,
    gpu: Facts, *, has_bias: bool,
) -> tuple[dict[str, Buffer], list[Step]]:  # fmt: skip
    tile = TRIED.get() or PROMOTED_TILE
    c_cols = tile.bn // 2
    at_once = gpu.multiprocessors * (1 if tile.warps > 4 else 2)
    buffers, steps, (a, b) = align(operands, CODES)
    by_engine = out.itemsize == 2 and p.n * out.itemsize % 16 == 0
    c = Operand(
        name="c", rows=p.m, k=p.n, row_stride=p.n, k_stride=1, itemsize=out.itemsize, is_aligned=True
    )  # fmt: skip
    views = {0: a.view(tile.bm, tile.bk), 1: b.view(tile.bn, tile.bk), 2: c.view(tile.bm, c_cols)}
    if not by_engine:
        views[2] = views[0]  # nothing is stored through it
    step = Step(
        promoted._promoted_kernel, (min(at_once, tile.count(p.m, p.n)),), p.m, p.n, p.k, *strides,
        on=f"{a.name} {b.name} {'c' if by_engine else a.name} {'bias' if has_bias else 'c'} c scale_a scale_b",
        views=views, tile=tile, HAS_BIAS=has_bias, SCALED=scaling, GROUP=tile.group, BY_ENGINE=by_engine,
        C_COLS=c_cols, FLAT=tile.is_flat, **tile.options(),
    )  # fmt: skip
    return buffers, [*steps, step]


WAYS = {
    "codes": "tiles by pointers, every 128 of k added up in fp32",
    "persistent": "tiles by Hopper's copy engine, whole sums by its tensor cores",
    "promoted": "tiles by Hopper's copy engine, every 128 of k added up in fp32",
}


def why_torch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Maybe, out: str, fast: bool
) -> str:
    """Why PyTorch's fp8 product takes the codes; empty where a kernel of ours does."""
    if reason := why_no_kernel(scale_a):
        return reason
    if a.numel() == 0 or b.numel() == 0:
        return "nothing to multiply"
    if not a.is_cuda:  # interpreted, or planned for a GPU that is not here, which torch.compile need not know
        is_known = torch.compiler.is_compiling() or facts(a).capability >= 89
        return "" if is_known else "no fp8 tensor cores before sm_89"
    scaling = scaling_of(a.shape[0], b.shape[1], a.shape[1], scale_a, scale_b)
    if reason := why_no_scaled_mm(a, b, scaling, out):
        return "" if facts(a).capability >= 89 else reason
    return "torch._scaled_mm: no product of ours with such scales is known to be faster"


def fake(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=OUT[rest[-2]])


_scaled = Registered(
    schema=(
        "scaled_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, str out, bool fast) "
        "-> Tensor c"
    ),
    reference=reference,
    theirs="torch._scaled_mm",
    why_torch=why_torch,
    plan=lambda *args: plan_by("persistent" if args[-1] else "promoted", *args),
    fake=fake,
)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Maybe = None, *,
    out_dtype: torch.dtype = torch.bfloat16, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """(a * scale_a) @ (b * scale_b) + bias of fp8 codes a (m, k) and b (k, n).

    Scales are fp32: one each; (m,) and (n,); or for every 128 of k, (m, pieces) and (pieces, n), or (pieces, n / 128)
    where a 128 x 128 block of b has one, pieces being k / 128. `fast` leaves the sums to the tensor cores, which keep
    some 14 bits of them. Codes have no gradient: `fp8_linear` has one.
    """
    given = (a, b, scale_a, scale_b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or {a.dtype, b.dtype} != {CODES}:
        raise BadInput(f"scaled_matmul takes codes (m, k) and (k, n) of float8_e4m3fn, not {_kinds(a, b)}")
    if {scale_a.dtype, scale_b.dtype} != {torch.float32}:
        raise BadInput(f"scales are float32, not {scale_a.dtype} and {scale_b.dtype}")
    if scaling_of(a.shape[0], b.shape[1], a.shape[1], scale_a, scale_b) is None:
        raise BadInput(f"scales fit neither tensors nor rows nor blocks of 128: {_kinds(*given)}")
    name = next((name for name, dtype in OUT.items() if dtype == out_dtype), None)
    if name is None:
        raise BadInput(f"scaled_matmul gives {', '.join(OUT)}, not {out_dtype}")
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or bias.dtype != out_dtype):
        raise BadInput(f"bias is {name} ({b.shape[1]},), not {_kinds(bias)}")
    return _scaled.call(*given, bias, name, fast)  # type: ignore[no-any-return]


def _kinds(*tensors: torch.Tensor) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors)


def launched_by(provider: str) -> Any:
    """The product by one of our kernels, whether or not it wins."""

    def launch(*args: Any) -> torch.Tensor:
        given = arguments(*args, fast=provider == "persistent")
        return _scaled.runner(plan_by(provider, *given))(*given)  # type: ignore[no-any-return]

    return launch


def arguments(*args: Any, fast: bool = False) -> tuple[Any, ...]:
    """What the registered op takes."""
    return (*args, *(None, DEFAULT_OUT, fast)[len(args) - 4 :])


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Codes of random numbers, as our quantize ops give them; the weight lies along k."""
    generator = generator_for(device, seed)
    a, b = (torch.randn(shape[rows], shape["k"], generator=generator, device=device) for rows in ("m", "n"))
    if device == "meta":
        pieces = cdiv(shape["k"], shape["block"]) if shape["block"] else 1
        scales = (torch.empty(shape["m"], pieces, device=device), torch.empty(shape["n"], pieces, device=device).T)
        return a.to(CODES), b.to(CODES).T, *scales
    quantize = quantize_fp8_blocks if shape["block"] else quantize_fp8
    (codes_a, scale_a), (codes_b, scale_b) = quantize(a), quantize(b)
    return codes_a, codes_b.T, scale_a.float(), scale_b.float().T


SCALED_MATMUL = Op(
    name="scaled_matmul",
    summary="A @ B of fp8 codes, with scales of tensors, rows or blocks",
    reference=reference,
    call=scaled_matmul,
    plan=lambda *args: _scaled.decide(*arguments(*args)),
    providers={
        "codes": Provider(launch=launched_by("codes"), kernels=(promoted.CODES,), summary=WAYS["codes"]),
        "persistent": Provider(
            launch=launched_by("persistent"),
            kernels=(persistent.PERSISTENT, persistent.ALIGN, split_k.SPLIT, split_k.ADD_PIECES, promoted.CODES),
            why_not=lambda a, b, sa, sb, *_: (
                "whole sums have no place for scales of blocks"
                if scaling_of(a.shape[0], b.shape[1], a.shape[1], sa, sb) in ("columns", "blocks")
                else ""
            ),
            summary=WAYS["persistent"],
        ),
        "promoted": Provider(
            launch=launched_by("promoted"),
            kernels=(promoted.PROMOTED, persistent.ALIGN, promoted.CODES),
            summary=WAYS["promoted"],
        ),
    },
    inputs=inputs,
    cost=cost,
    shapes=tuple(
        {"m": m, "n": n, "k": k, "block": block}
        for m, n, k in ((8192, 8192, 8192), (4096, 14336, 4096), (512, 10240, 16384), (256, 4096, 4096))
        for block in (0, BLOCK)
    ),
    test_shapes=tuple(
        {"m": m, "n": n, "k": k, "block": block}
        for m, n, k, block in ((1, 1, 1, 0), (17, 15, 130, 128), (65, 130, 63, 0), (130, 72, 300, 128))
    ),
    dtypes={"float8_e4m3fn": ("float8_e4m3fn", "float8_e4m3fn", "float32", "float32")},
    options={"block": (0, BLOCK)},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=arguments,
)
