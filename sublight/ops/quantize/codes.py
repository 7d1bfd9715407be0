"""8-bit codes and their scales: what the quantizing ops share, kernels' parts and the plan for one scale a row.

The largest magnitude gets the largest code (127, or fp8's 448), so x is about code * scale. Codes are to the nearest,
ties to even. A scale is at least 2**-100, so that a row of zeros divides by something. A row (or block of it) that
holds NaN or an infinity has a scale that is not finite and zeros for codes: all of it comes back as NaN, and nothing of
it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Call
from sublight.cost import Shape
from sublight.errors import BadInput
from sublight.op import Buffer, Plan
from sublight.ops.kernels.rows import ELEMENTS, SMALL_ROWS, block_for, copies_of, rows_of, split
from sublight.ops.record.tuning import Tile, tile_for

Kind = Literal["int8", "fp8"]
Pair = tuple[torch.Tensor, torch.Tensor]  # codes like x, scales (…, 1) or (…, blocks)
KINDS: tuple[Kind, ...] = ("int8", "fp8")
MOST = {"int8": 127.0, "fp8": 448.0}  # what a code can say
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LEAST_SCALE = 2.0**-100
LEAST = tl.constexpr(LEAST_SCALE)
FP8_CAPABILITY = 89  # from here on the hardware converts
TILE_COLS = 2048  # up to here several rows share a program
MAX_COLS = 16384  # up to here a multiprocessor's registers hold a row in fp32 …
MAX_PACKED_COLS = 32768  # … and in its 16-bit form
FEW_ROWS = 2  # a multiprocessor: up to here a row's own latency counts, not how many are under way
CHUNK = 8192
ROUNDER = tl.constexpr(1.5 * 2**23)  # a number below 2**22 added to it is rounded to a whole one, in its lowest bits
FP8_ROUNDER = tl.constexpr(1.5 * 2**14)  # the same, to a multiple of 2**-9: fp8 below its smallest normal number
FP8_NORMAL = tl.constexpr(2.0**-6)
WIDTHS = (768, 1600, 2560, 4096, 5120, 8192, 12288)
SHAPES: tuple[Shape, ...] = (
    *({"rows": ELEMENTS // cols, "cols": cols} for cols in WIDTHS),
    *({"rows": rows, "cols": 4096} for rows in SMALL_ROWS),
)
FORWARD_ONLY: dict[str, Any] = {  # of the records: codes have no gradient
    "shapes": SHAPES,
    "wrt": (),
    "directions": ("fwd",),
}


def check(x: torch.Tensor) -> None:
    """Numbers in rows; everything else has no scale."""
    if not x.is_floating_point():
        raise BadInput(f"quantization takes floating-point numbers, not {x.dtype}: convert x first")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise BadInput(f"quantization needs at least one column, x has the shape {tuple(x.shape)}")


def quantize(x: torch.Tensor, kind: Kind, block_size: int | None = None) -> Pair:
    """PyTorch's composition."""
    cols = x.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    if block_size is None:
        block_size = cols
    elif cols % block_size:
        wide = F.pad(wide, (0, -cols % block_size))
    blocks = wide.unflatten(-1, (-1, block_size))
    most = wide.new_full((), MOST[kind])  # on the GPU PyTorch multiplies by the reciprocal of a Python number
    scale = (blocks.abs().amax(-1, keepdim=True) / most).clamp_min(LEAST_SCALE)
    ratio = torch.where(torch.isfinite(scale), blocks / scale, 0.0)
    codes = (ratio.round() if kind == "int8" else ratio.clamp(-448.0, 448.0)).to(CODES[kind])
    return codes.flatten(-2)[..., :cols].contiguous(), scale.squeeze(-1)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, block_size: int | None = None) -> torch.Tensor:
    """The fp32 numbers that codes and scales stand for."""
    cols = codes.shape[-1]
    spread = scale if block_size is None else scale.repeat_interleave(block_size, -1)[..., :cols]
    return codes.float() * spread


@triton.jit
def magnitude_of(x):
    """The bits of |x|, which order as the numbers do, NaN above infinity: a maximum of numbers would pass over NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def top_of(x, axis: tl.constexpr):
    """The largest magnitude, or NaN."""
    return tl.max(magnitude_of(x), axis).to(tl.float32, bitcast=True)


@triton.jit
def larger_of(top, other):
    """Of two such."""
    return tl.maximum(magnitude_of(top), magnitude_of(other)).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(top, KIND: tl.constexpr):
    """What one step of the code stands for; 2**-100 at least, NaN where `top` is."""
    if KIND == "int8":
        scale = tl.div_rn(top, 127.0)
    else:
        scale = tl.div_rn(top, 448.0)
    return tl.where(scale < LEAST, LEAST, scale)


@triton.jit
def ratio_of(x, scale, DIVIDE: tl.constexpr):
    """x / scale as IEEE rounds it, without a division for every element: what the product with the reciprocal leaves
    of x is found exactly by a fused multiply-add and divided in turn. The interpreter has none that rounds once."""
    if DIVIDE:
        return tl.div_rn(x, scale + tl.zeros_like(x))
    else:
        reciprocal = tl.div_rn(1.0, scale) + tl.zeros_like(x)
        ratio = x * reciprocal
        return tl.fma(tl.fma(ratio, tl.zeros_like(x) - scale, x), reciprocal, ratio)


@triton.jit
def code_of(ratio, KIND: tl.constexpr):
    """The nearest code, ties to even, of a ratio that is at most a rounding error above the largest."""
    if KIND == "int8":
        return (ratio + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    elif KIND == "fp8":
        return ratio.to(tl.float8e4nv)
    else:  # its bits, where nothing else converts: a sign, four bits of exponent biased by 7, three of mantissa
        bits = ratio.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        small = (tl.abs(ratio) + FP8_ROUNDER).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(tl.abs(ratio) < FP8_NORMAL, small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def finite_code_of(ratio, scale, KIND: tl.constexpr):
    """The same, and zero where the scale is not finite."""
    return code_of(tl.where(scale < float("inf"), ratio, 0.0), KIND)


def form_of(kind: Kind, gpu: Facts) -> str:
    """How a kernel makes codes of that kind: fp8 by its bits where it cannot be converted to."""
    return "fp8_bits" if kind == "fp8" and (is_interpreted() or gpu.capability < FP8_CAPABILITY) else kind


def vector_of(x: torch.Tensor) -> int:
    """Neighbours that one thread takes: one load of 16 bytes. Triton would go by the codes, which are smaller, and then
    every load leaves a gap that the next one fills."""
    return 16 // x.element_size()


def buffers_of(x: torch.Tensor, kind: Kind, form: str, scales: int = 1) -> dict[str, Buffer]:
    """Codes like x and so many scales a row; fp8 that kernels cannot convert to they see as its bits."""
    bits = torch.int8 if form == "fp8_bits" else None
    return {
        "codes": Buffer(shape=tuple(x.shape), dtype=CODES[kind], bits=bits),
        "scale": Buffer(shape=(*x.shape[:-1], scales), dtype=torch.float32),
    }


def plan_rows(
    name: str,
    kernels: tuple[Any, Any, Any],
    x: torch.Tensor,
    kind: Kind,
    *,
    weight: torch.Tensor | None = None,
    numbers: tuple[float, ...] = (),
    each: int = 32,
    of_row: Callable[[bool], dict[str, Any]] = lambda few: {},
    **constants: Any,
) -> Plan:
    """One scale a row, by the kernel for its width: several rows a program, one row in registers, or in chunks.

    The three take x, weight if there is one, codes and scale; how many rows (the first alone), columns and elements
    from row to row; then `numbers`. `of_row` are constants of the second, which may depend on whether rows are few.
    """
    layout, gpu = rows_of(x), facts(x)
    rows, cols, apart, itemsize, *_ = layout
    packed = layout.is_packed and (weight is None or rows_of(weight).is_packed)
    few, form = rows <= FEW_ROWS * gpu.multiprocessors, form_of(kind, gpu)
    tile = tile_of(name, cols, itemsize, packed=packed, capability=gpu.capability, few=few, each=each)
    on = "x codes scale" if weight is None else "x weight codes scale"
    constants |= {"KIND": form, "VECTOR": vector_of(x)}
    by_tile, by_row, by_chunks = kernels
    if tile is None:
        reason = f"{cols} columns: in chunks, twice"
        step = Step(by_chunks, (rows,), cols, apart, *numbers, on=on, BLOCK=CHUNK, num_warps=16, **constants)
    elif cols <= TILE_COLS:
        reason, grid = f"{cols} columns: {tile.rows_text}", (cdiv(rows, tile.rows),)
        constants |= {"ROWS": tile.rows, "BLOCK": tile.block, "TAIL": tile.tail, **tile.options()}
        step = Step(by_tile, grid, rows, cols, apart, *numbers, on=on, tile=tile, **constants)
    else:
        reason = f"{cols} columns: one row in registers"
        constants |= {"BLOCK": tile.block, "TAIL": tile.tail, "PACKED": tile.packed and packed, **tile.options()}
        step = Step(by_row, (rows,), cols, apart, *numbers, on=on, tile=tile, **constants, **of_row(few))
    buffers = buffers_of(x, kind, form)
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(x=layout.is_copy, weight=weight is not None and not weight.is_contiguous()),
        buffers=buffers,
        steps=(step,),
        outputs=tuple(buffers),
    )


def tile_of(
    kernel: str, cols: int, itemsize: int, *, packed: bool, capability: int = 90, few: bool = False, each: int = 32
) -> Tile | None:
    """How a row is shared out, in two blocks where one would leave many threads idle; None where no multiprocessor
    holds it. A thread takes the more of a row the more a row costs however narrow it is: `each` columns of 16 bits."""
    whole = block_for(cols)
    if whole > (MAX_PACKED_COLS if packed else MAX_COLS):
        return None
    block, tail = split(cols)
    if few and whole <= MAX_COLS:  # all the threads there are, each with one load
        kernel, rule = f"{kernel}_few", Tile(block=block, tail=tail, warps=min(32, max(1, whole // 256)))
    elif cols <= TILE_COLS:  # a warp's own, so that no reduction leaves it
        rule = Tile(rows=max(1, 2048 // whole), block=block, tail=tail, warps=1)
    else:
        warps = min(32, max(1, block * itemsize // (64 * each)))
        rule = Tile(block=block, tail=tail, warps=warps, packed=packed)
    return tile_for(kernel, cols, itemsize, packable=packed, capability=capability, rule=rule)


def fake(x: torch.Tensor, kind: Kind, block_size: int | None = None) -> Pair:
    """The shapes that a quantization gives."""
    count = 1 if block_size is None else -(-x.shape[-1] // block_size)
    codes = torch.empty_like(x, dtype=CODES[kind], memory_format=torch.contiguous_format)
    return codes, x.new_empty((*x.shape[:-1], count), dtype=torch.float32)


def as_numbers(call: Call, *, exact: Call = lambda x: x, block_size: int | None = None) -> Call:
    """What codes and scales stand for, to be judged by how far it is from x: for float64 that is x itself."""

    def numbers(*inputs: torch.Tensor) -> Pair:
        codes, scale = call(*inputs)
        if inputs[0].dtype == torch.float64:
            return exact(*inputs), scale
        return dequantize(codes, scale, block_size), scale

    return numbers
