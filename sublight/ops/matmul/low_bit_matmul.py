"""A @ weight.T with a weight of 1, 2, 4 or 8 bits, packed, with a scale and a zero for each group along k.

Of up to 128 rows the tensor cores get values that a few integer instructions have made of the words, two at a time: of
up to 8 rows straight from registers, on Hopper of 17 and more, too, else by way of shared memory. Of one row in fp32,
plain arithmetic multiplies them; of more than 128 rows the weight is made whole first, which each row then pays a small
part of. All five read the same packing (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from sublight.backend.device import facts, is_interpreted, takes_ptx
from sublight.backend.jit import cdiv, gl, next_power_of_2, why_no_gluon
from sublight.backend.launch import Step, View
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import low_bit_matmul as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.matmul import fragments, low_bit, matmul, skinny, warpgroups
from sublight.ops.matmul.packing import WORDS, block_of, check_bits, check_group, dequantize, quantize_weight, words_of
from sublight.ops.matmul.product import Operand, Product
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

SAVED = ("packed", "scales", "zeros", "bits", "k")
FRAGMENT_ROWS = 8  # of A beside a tile of the weight
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # each is a number of bf16 and of fp16
MOST_ROWS = 128  # beyond, the weight is made whole
WARPGROUP_ROWS = 17  # from which on `warpgroups` was faster on an H200: with 16, `rows` was as fast
STAGE_BYTES = 220_000  # of shared memory, for what is on its way
MOST_SPLITS = 8  # of k …
LEAST_BLOCKS = 8  # … each of so many blocks


def reference(
    a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int = 4, k: int = 0
) -> torch.Tensor:
    """PyTorch's composition; k is a's last dimension."""
    return a @ dequantize(packed, scales, zeros, bits, a.shape[-1]).to(a.dtype).T


class Low:
    """The sizes that all ways need."""

    def __init__(self, a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        self.k, self.n, self.m = a.shape[-1], packed.shape[0], a.numel() // max(1, a.shape[-1])
        self.blocks, self.groups = packed.shape[1] // WORDS, scales.shape[1]
        self.group, self.block = self.k // self.groups, block_of(bits)
        is_shared = self.groups == 1 or self.group >= self.block  # by all places of a word
        per_scale = 16 // bits if is_shared else self.group // (2 * WORDS)  # places
        if a.element_size() == 4:
            per_scale = 1  # plain multiply-adds: short chains, as PyTorch's are
        self.constants = {"BITS": bits, "PER_SCALE": per_scale, "GROUP": 0 if self.groups == 1 else self.group}


def _by_row(low: Low, a: torch.Tensor) -> tuple[dict[str, Buffer], list[Step]]:
    bn, bb = 4, 16
    is_even = low.n % bn == 0 and low.blocks % bb == 0 and low.k % low.block == 0
    step = Step(
        low_bit._row_kernel, (cdiv(low.n, bn),), low.n, low.k, low.blocks, low.groups,
        on="a packed scales zeros c", tile=(bn, bb), BN=bn, BB=bb, EVEN=is_even, EXACT=a.element_size() == 4,
        num_warps=2, **low.constants,
    )  # fmt: skip
    return {}, [step]


def _by_fragments(low: Low, a: torch.Tensor) -> tuple[dict[str, Buffer], list[Step]]:
    tiles, many = cdiv(low.n, 16), 6 * facts(a).multiprocessors
    # few tiles: more warps share one; where all tiles run at once, few words each leave room for them
    warps, at_once = (8, 4) if tiles < many else (4, 2) if tiles <= many * 7 // 6 else (4, 4)
    rounds = cdiv(low.blocks, warps * at_once)
    step = Step(
        fragments._fragments_kernel, (tiles,), low.m, low.n, low.blocks, low.groups, rounds,
        on="a packed scales zeros c", tile=(16, warps), BITS=low.constants["BITS"],
        PER_GROUP=low.constants["GROUP"] // low.block, AT_ONCE=at_once,
        EVEN=low.n % 16 == 0 and rounds * warps * at_once == low.blocks, num_warps=warps,
    )  # fmt: skip
    return {}, [step]


def why_no_fragments(a: torch.Tensor, scales: torch.Tensor, bits: int) -> str:
    """Why words cannot go straight into the tensor cores' registers, or ""."""
    k, block = a.shape[-1], block_of(bits)
    if not has_pairs(a, bits):
        return "values become 16-bit floats two at a time: on NVIDIA's GPUs, of 16-bit activations and up to 4 bits"
    if why_no_gluon or is_interpreted():
        return why_no_gluon or "Gluon is not interpreted"
    if a.numel() > FRAGMENT_ROWS * k:
        return f"it is for at most {FRAGMENT_ROWS} rows"
    if k % block or (k // scales.shape[1] % block and scales.shape[1] > 1):
        return f"k and groups are not whole blocks of {block}"
    return "" if a.is_contiguous() and a.data_ptr() % 16 == 0 else "rows of A do not begin at 16 bytes"


def _by_rows(low: Low, a: torch.Tensor) -> tuple[dict[str, Buffer], list[Step]]:
    bm, bn = min(64, max(16, next_power_of_2(low.m))), 64
    tiles, down = cdiv(low.n, bn), cdiv(low.m, bm)
    programs = (7 if low.m <= 16 else 2) * facts(a).multiprocessors
    splits = max(1, min(programs // (tiles * down), cdiv(low.blocks, LEAST_BLOCKS), MOST_SPLITS))
    per_split = cdiv(low.blocks, splits)
    splits = cdiv(low.blocks, per_split)
    stage_bytes = bm * low.block * a.element_size() + bn * WORDS * 4  # rows of A, words of codes
    step = Step(
        low_bit._rows_kernel, (tiles, splits, down),
        low.m, low.n, low.k, low.k, low.blocks, low.groups, per_split,
        on=f"a packed scales zeros {'parts' if splits > 1 else 'c'}", tile=(bm, bn), BM=bm, BN=bn,
        IS_PART=splits > 1, PRECISION=facts(a).precision(a.dtype == torch.float32),
        PAIRS=has_pairs(a, low.constants["BITS"]), num_warps=4, num_stages=facts(a).stages(4, stage_bytes),
        **low.constants,
    )  # fmt: skip
    return _with_parts(low, step, splits)


def _with_parts(low: Low, step: Step, splits: int) -> tuple[dict[str, Buffer], list[Step]]:
    """A launch that gives sums, or parts of them, which a second one adds up in their order."""
    if splits == 1:
        return {}, [step]
    block = 1024
    add = Step(
        skinny._add_parts_kernel, (low.m, cdiv(low.n, block)), low.m, low.n, splits, on="parts a a c", tile=(block,),
        HAS_BIAS=False, HAS_RESIDUAL=False, ACTIVATION="none", BLOCK=block, num_warps=4,
    )  # fmt: skip
    return {"parts": Buffer(shape=(splits, low.m, low.n), dtype=torch.float32)}, [step, add]


def _by_warpgroups(low: Low, a: torch.Tensor) -> tuple[dict[str, Buffer], list[Step]]:
    bits, rows = low.constants["BITS"], warpgroups.GROUPS * warpgroups.ROWS
    bm = min(MOST_ROWS, max(16, next_power_of_2(low.m)))
    tiles, down = cdiv(low.n, rows), cdiv(low.m, bm)
    splits = max(1, min(facts(a).multiprocessors // (tiles * down), low.blocks // LEAST_BLOCKS, MOST_SPLITS))
    per_split = cdiv(low.blocks, splits)
    splits = cdiv(low.blocks, per_split)
    values = View((low.m, low.k), (low.k, 1), (bm, 128), gl.NVMMASharedLayout(128, 16))
    of_words = (low.n, low.blocks * WORDS)
    words = View(of_words, (of_words[1], 1), (warpgroups.ROWS, WORDS), gl.NVMMASharedLayout(64, 32))
    stages = min(6 if bm <= 32 else 5 if bm > 64 else 4, STAGE_BYTES // (rows * WORDS * 4 + bm * 2 * low.block))
    step = Step(
        warpgroups._warpgroups_kernel, (tiles, splits, down), low.m, low.n, low.blocks, low.groups, per_split,
        on=f"a packed scales zeros {'parts' if splits > 1 else 'c'}", views={0: values, 1: words}, tile=(bm, rows),
        BITS=bits, PER_SCALE=low.constants["PER_SCALE"], GROUP=low.constants["GROUP"], BM=bm, STAGES=stages,
        IS_PART=splits > 1, num_warps=4,
    )  # fmt: skip
    return _with_parts(low, step, splits)


def why_no_warpgroups(a: torch.Tensor, scales: torch.Tensor, bits: int) -> str:
    """Why a warpgroup cannot take the values from its registers, or ""."""
    k = a.shape[-1]
    if bits not in (2, 4) or a.element_size() != 2:
        return "it is for 16-bit activations and weights of 2 or 4 bits"
    if why_no_gluon or is_interpreted():
        return why_no_gluon or "Gluon is not interpreted"
    if facts(a).capability != 90:
        return f"written for Hopper (sm_90), this is sm_{facts(a).capability}"
    if a.numel() > MOST_ROWS * k:
        return f"it is for at most {MOST_ROWS} rows"
    if k // scales.shape[1] < block_of(bits) // 4 and scales.shape[1] > 1:
        return f"groups of {k // scales.shape[1]}: a block of {block_of(bits)} has at most four"
    return "" if a.is_contiguous() and a.data_ptr() % 16 == 0 and k % 8 == 0 else "rows of A do not begin at 16 bytes"


def has_pairs(a: torch.Tensor, bits: int) -> bool:
    """Whether two values at once become 16-bit floats: NVIDIA's instructions, and few enough bits."""
    return takes_ptx() and facts(a).capability >= 80 and a.element_size() == 2 and bits <= 4


def _by_whole_weight(low: Low, a: torch.Tensor) -> tuple[dict[str, Buffer], list[Step]]:
    stride, itemsize = cdiv(low.k, 8) * 8, a.element_size()
    bn = 32
    unpack = Step(
        low_bit._unpack_kernel, (cdiv(low.n, bn) * low.blocks,), low.n, low.k, low.blocks, low.groups, stride,
        on="packed scales zeros b", tile=(bn,), BN=bn, num_warps=4, **low.constants,
    )  # fmt: skip
    sides: dict[str, Any] = {"k": low.k, "k_stride": 1, "itemsize": itemsize}
    work = matmul.Work(
        product=Product(low.m, low.n, low.k, low.k, 1, 1, stride),
        operands=(
            Operand(name="a", rows=low.m, row_stride=low.k, is_aligned=a.data_ptr() % 16 == 0, **sides),
            Operand(name="b", rows=low.n, row_stride=stride, is_aligned=True, **sides),
        ),
        dtype=a.dtype,
        gpu=facts(a),
        epilogue={"HAS_BIAS": False, "HAS_RESIDUAL": False, "ACTIVATION": "none"},
        is_ieee=a.dtype == torch.float32,
    )
    buffers, steps = matmul.LADDER["persistent"][0](work)
    return {"b": Buffer(shape=(low.n, stride), dtype=a.dtype), **buffers}, [unpack, *steps]


WAYS: dict[str, tuple[Callable[[Low, torch.Tensor], tuple[dict[str, Buffer], list[Step]]], str, int]] = {
    "row": (_by_row, "one row: words taken apart in registers, sums by plain multiply-adds", 1),
    "fragments": (
        _by_fragments,
        "up to 8 rows: values become floats two at a time, in the registers that the tensor cores read",
        FRAGMENT_ROWS,
    ),
    "warpgroups": (
        _by_warpgroups,
        "up to 128 rows on Hopper: values become floats in the registers that a warpgroup multiplies from",
        MOST_ROWS,
    ),
    "rows": (
        _by_rows,
        "few rows: values become floats two at a time on their way to the tensor cores",
        MOST_ROWS,
    ),
    "whole": (_by_whole_weight, "many rows: the weight is made whole, then a product in 16 bits", 2**62),
}


def plan_by(
    provider: str, a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, k: int
) -> Plan:
    low = Low(a, packed, scales, bits)
    steps_of, reason, _ = WAYS[provider]
    given = {"a": a, "packed": packed, "scales": scales, "zeros": zeros}
    buffers, steps = steps_of(low, a)
    return Plan(
        provider=provider,
        reason=reason,
        copies=tuple(name for name, x in given.items() if not x.is_contiguous()),
        buffers={"c": Buffer(shape=(*a.shape[:-1], low.n), dtype=a.dtype), **buffers},
        steps=tuple(steps),
        outputs=("c",),
    )


def plan_product(a: torch.Tensor, *rest: Any) -> Plan:
    _, scales, _, bits, _ = rest
    rows = a.numel() // max(1, a.shape[-1])
    if not why_no_fragments(a, scales, bits):
        way = "fragments"
    elif rows == 1 and a.element_size() == 4:
        way = "row"
    elif rows >= WARPGROUP_ROWS and not why_no_warpgroups(a, scales, bits):
        way = "warpgroups"
    else:
        way = "rows" if rows <= MOST_ROWS else "whole"
    return plan_by(way, a, *rest)


def why_torch(
    a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, k: int
) -> str:
    if reason := why_no_kernel(a):
        return reason
    if a.numel() == 0 or packed.numel() == 0:
        return "nothing to multiply"
    if any(x.device != a.device for x in (packed, scales, zeros)) or any(x.dtype != a.dtype for x in (scales, zeros)):
        return "the arguments differ in data type or device"
    return ""


def backward(dc: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *rest: Any) -> Inputs:
    """The gradient of a, for what is trained beside frozen weights: a product with the weight made whole."""
    bits, k, *_ = rest
    return (dc @ dequantize(packed, scales, zeros, bits, k).to(dc.dtype),)


_low_bit = Registered(
    schema="low_bit_matmul(Tensor a, Tensor packed, Tensor scales, Tensor zeros, int bits, int k) -> Tensor c",
    reference=reference,
    theirs="unpack, torch.matmul",
    why_torch=why_torch,
    plan=plan_product,
    fake=lambda a, packed, *_: a.new_empty((*a.shape[:-1], packed.shape[0])),
    gradient=Gradient(
        by=SimpleNamespace(call=backward),
        saves=("packed", "scales", "zeros"),
        options=("bits", "k"),
        gives=("a",),
        by_torch=lambda saved, grads: backward(*grads, *(saved[name] for name in SAVED)),
    ),
)


def low_bit_matmul(
    a: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int = 4,
    *,
    scale_a: torch.Tensor | None = None,
) -> torch.Tensor:
    """a (…, k) @ weight.T, where `packed`, `scales`, `zeros` are what `quantize_weight` makes of a weight (n, k).

    `a` may be codes, int8 or fp8, with a scale for each row in `scale_a` (…, 1), as `quantize_int8` and `quantize_fp8`
    make them: any code is a number of 16 bits, in which the product is made. Of the arguments only `a` has a gradient:
    weights of few bits stay as they are, what is trained lies beside them.
    """
    is_codes = a.dtype in CODES
    if is_codes != (scale_a is not None) or not (is_codes or a.is_floating_point()):
        raise BadInput(
            f"activations in {a.dtype} {'with' if scale_a is not None else 'without'} scale_a: use floats without it, "
            "or codes (int8, fp8) with a scale for each row"
        )
    if scale_a is not None:
        if scale_a.shape != (*a.shape[:-1], 1):
            raise BadInput(f"scale_a {tuple(scale_a.shape)} for codes {tuple(a.shape)}: one for each row, (…, 1)")
        small = a.to(scales.dtype) / 128  # exact, and no sum of them leaves fp16's range
        sums = low_bit_matmul(small, packed, scales, zeros, bits)
        return (sums.float() * (scale_a.float() * 128)).to(scales.dtype)
    check_bits(bits)
    k = a.shape[-1]
    if packed.dtype != torch.int32 or packed.shape[-1] != words_of(k, bits):
        raise BadInput(f"{packed.dtype} {tuple(packed.shape)} is not packed from k = {k} of {bits} bits")
    if scales.shape != zeros.shape or scales.dim() != 2 or scales.shape[0] != packed.shape[0]:
        raise BadInput(
            f"scales {tuple(scales.shape)}, zeros {tuple(zeros.shape)} for {packed.shape[0]} rows of weights"
        )
    if scales.shape[1] == 0 or k % scales.shape[1]:
        raise BadInput(f"{scales.shape[1]} groups do not divide k = {k}")
    check_group(k, k // scales.shape[1], bits)
    return _low_bit.call(a, packed, scales, zeros, bits, k)  # type: ignore[no-any-return]


def launched_by(provider: str) -> Callable[..., torch.Tensor]:
    def launch(a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int = 4) -> Any:
        given = (a, packed, scales, zeros, bits, a.shape[-1])
        return _low_bit.runner(plan_by(provider, *given))(*given)

    return launch


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator = generator_for(device, seed)
    made: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    a, weight = torch.randn(shape["m"], shape["k"], **made), torch.randn(shape["n"], shape["k"], **made)
    if device == "meta":
        words = words_of(shape["k"], 4)
        scales = torch.empty(shape["n"], shape["k"] // shape["group"], device=device, dtype=weight.dtype)
        return a, torch.empty(shape["n"], words, device=device, dtype=torch.int32), scales, scales.clone()
    return a, *quantize_weight(weight, 4, shape["group"])


WHY_NOT = {"fragments": why_no_fragments, "warpgroups": why_no_warpgroups}


def _why_not(name: str, most: int) -> Callable[..., str]:
    def why_not(a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: Any, bits: int = 4) -> str:
        rows = a.numel() // max(1, a.shape[-1])
        if name in WHY_NOT:
            return WHY_NOT[name](a, scales, bits)
        return "" if rows <= most else f"it is for at most {most} row{'s' * (most > 1)}"

    return why_not


KERNELS = {
    "row": (low_bit.ROW,),
    "fragments": (fragments.FRAGMENTS,),
    "warpgroups": (warpgroups.WARPGROUPS, skinny.ADD_PARTS),
    "rows": (low_bit.ROWS, skinny.ADD_PARTS),
    "whole": (low_bit.UNPACK, *matmul.KERNELS["persistent"]),
}
LOW_BIT_MATMUL = Op(
    name="low_bit_matmul",
    summary="A @ weight.T with a packed weight of 1 to 8 bits",
    reference=reference,
    call=low_bit_matmul,
    plan=lambda a, packed, scales, zeros, bits=4: _low_bit.decide(a, packed, scales, zeros, bits, a.shape[-1]),
    providers={
        name: Provider(launch=launched_by(name), kernels=KERNELS[name], why_not=_why_not(name, most), summary=summary)
        for name, (_, summary, most) in WAYS.items()
    },
    inputs=inputs,
    cost=cost,
    shapes=tuple(
        {"m": m, "n": n, "k": k, "bits": 4, "group": 128}
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))
        for m in (1, 16, 64, 128, 2048)
    ),
    test_shapes=tuple(
        {"m": m, "n": n, "k": k, "bits": 4, "group": group}
        for m, n, k, group in (
            (1, 17, 128, 128),
            (1, 5, 96, 32),
            (3, 70, 256, 64),
            (20, 33, 200, 200),
            (131, 9, 128, 32),
            (130, 9, 100, 100),
        )
    ),
    options={"bits": (4,), "group": (128, 64, 32, 200, 100)},
    wrt=(0,),
    directions=("fwd",),
    batch="",
    library_args=lambda a, *rest: (a, *rest, 4, a.shape[-1]),
)
