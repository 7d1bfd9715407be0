"""C = A @ B, with what often follows: bias, activation, residual, while the tile is still in registers.

The ladder, each step a provider: `naive` and `coalesced` (`ladder.py`) read the operands from memory for every row;
`tiled` brings them through shared memory, `tensor_core` multiplies by tensor cores, `swizzled` takes the tiles in an
order that the L2 likes (all three `tensor_core.py`); `persistent` keeps one program on each multiprocessor, and lets
Hopper's copy engine load (`persistent.py`). A linear layer's weight is (n, k): its product is `matmul(x, weight.T)`,
and nothing is moved for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sublight.backend.device import Facts, facts
from sublight.backend.jit import cdiv, next_power_of_2
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import matmul as cost
from sublight.op import Buffer, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.matmul import ladder, persistent, skinny, tensor_core
from sublight.ops.matmul.choice import why_cublas
from sublight.ops.matmul.epilogue import ACTIVATIONS, check_activation
from sublight.ops.matmul.product import Operand, Product, operands_of, product_of
from sublight.ops.matmul.tiles import persistent_tile, plain_tile
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

Maybe = torch.Tensor | None
LEAST_SPLIT = 2048  # of k: below, adding the parts up takes longer than is gained


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Maybe = None,
    residual: Maybe = None,
    activation: str = "none",
    tf32: bool = False,
) -> torch.Tensor:
    """PyTorch's composition; `tf32` it reads from its own switch."""
    y = a @ b
    if bias is not None:
        y = y + bias
    y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the steps of the ladder must know of a call."""

    product: Product
    operands: tuple[Operand, Operand]
    dtype: torch.dtype
    gpu: Facts
    epilogue: dict[str, Any]
    is_ieee: bool  # fp32 by plain multiply-adds: tensor cores would round it

    @property
    def on(self) -> str:
        """The tensors of a launch by pointers; what the epilogue does not use may be anything."""
        bias, residual = self.bias_and_residual
        return f"a b {bias} {residual} c"

    @property
    def bias_and_residual(self) -> tuple[str, str]:
        has_bias, has_residual = self.epilogue["HAS_BIAS"], self.epilogue["HAS_RESIDUAL"]
        return "bias" if has_bias else "a", "residual" if has_residual else "a"

    @property
    def numbers(self) -> tuple[int, ...]:
        p = self.product
        return p.m, p.n, p.k, p.am, p.ak, p.bk, p.bn, p.batch_a, p.batch_b


Steps = tuple[dict[str, Buffer], list[Step]]  # buffers beside the result, launches


def _naive(work: Work) -> Steps:
    p, bm, bn = work.product, 32, 32
    grid = (cdiv(p.m, bm), cdiv(p.n, bn), p.batches)
    tile = {"BM": bm, "BN": bn, "num_warps": 4}
    return {}, [Step(ladder._naive_kernel, grid, *work.numbers, on=work.on, tile=(bm, bn), **work.epilogue, **tile)]


def _coalesced(work: Work) -> Steps:
    p, bm, bn, bk = work.product, 8, 8, 64
    grid = (cdiv(p.m, bm), cdiv(p.n, bn), p.batches)
    tile = {"BM": bm, "BN": bn, "BK": bk, "num_warps": 4}
    step = Step(ladder._coalesced_kernel, grid, *work.numbers, on=work.on, tile=(bm, bn, bk), **work.epilogue, **tile)
    return {}, [step]


def _tiles(*, group: int, in_fp32: bool = False, is_persistent: bool = False) -> Callable[[Work], Steps]:
    def steps(work: Work) -> Steps:
        p, is_ieee = work.product, work.is_ieee or in_fp32
        tile = plain_tile(p.m, p.n, work.dtype.itemsize, work.gpu, is_ieee=is_ieee)
        constants = work.epilogue | tile.options() | {
            "GROUP": group, "EVEN": p.k % tile.bk == 0, "IN_FP32": in_fp32, "PRECISION": "ieee" if is_ieee else "tf32",
        }  # fmt: skip
        tiles = tile.count(p.m, p.n)
        if not is_persistent:
            kernel, numbers, grid = tensor_core._tile_kernel, work.numbers, (tiles, p.batches)
        else:
            at_once = work.gpu.multiprocessors * (1 if tile.warps > 4 else 2)
            kernel, numbers = tensor_core._every_tile_kernel, (*work.numbers, p.batches)
            grid = (min(at_once, tiles * p.batches), 1)
        return {}, [Step(kernel, grid, *numbers, on=work.on, tile=tile, **constants)]

    return steps


def _by_engine(work: Work) -> Steps:
    """Through Hopper's copy engine; operands that it cannot read are copied first."""
    p, gpu = work.product, work.gpu
    tile = persistent_tile(p.m, p.n, gpu)
    buffers: dict[str, Buffer] = {}
    steps: list[Step] = []
    operands = []
    for operand in work.operands:
        if operand.is_readable:
            operands.append(operand)
            continue
        copy = operand.aligned()
        buffers[copy.name] = Buffer(shape=(copy.outer, copy.apart), dtype=work.dtype)
        steps.append(_align(operand, copy))
        operands.append(copy)
    a, b = operands
    by_engine = p.n * work.dtype.itemsize % 16 == 0
    programs = min(gpu.multiprocessors, tile.count(p.m, p.n))
    c = Operand(name="c", rows=p.m, k=p.n, row_stride=p.n, k_stride=1, itemsize=work.dtype.itemsize, is_aligned=True)
    bias, residual = work.bias_and_residual
    views = {0: a.view(tile.bm, tile.bk), 1: b.view(tile.bn, tile.bk), 2: c.view(tile.bm, tile.bn // 2)}
    constants = work.epilogue | tile.options() | {
        "GROUP": tile.group, "A_TURNED": a.is_turned, "B_TURNED": not b.is_turned,
        "BY_ENGINE": by_engine, "FLAT": tile.is_flat,
    }  # fmt: skip
    if not by_engine:
        views[2] = views[0]  # nothing is stored through it
    steps.append(
        Step(
            persistent._persistent_kernel, (programs,), p.m, p.n, p.k,
            on=f"{a.name} {b.name} {'c' if by_engine else a.name} {bias} {residual} c",
            views=views, tile=tile, **constants,
        )
    )  # fmt: skip
    return buffers, steps


def _align(x: Operand, y: Operand) -> Step:
    unit = next(unit for unit in (8, 4, 2, 1) if x.inner % unit == 0 and x.apart % unit == 0 and y.apart % unit == 0)
    rows, cols = 16, 256
    numbers = (x.outer, x.inner // unit, x.apart // unit, y.apart // unit)
    grid = (cdiv(x.outer, rows), cdiv(x.inner, cols))
    constants = {"UNIT": unit, "ROWS": rows, "COLS": cols, "num_warps": 4}
    return Step(persistent._align_kernel, grid, *numbers, on=f"{x.name} {y.name}", tile=(rows, cols), **constants)


def _persistent(work: Work) -> Steps:
    if why_no_engine(work):
        return _tiles(group=8, is_persistent=True)(work)
    return _by_engine(work)


def _skinny(work: Work) -> Steps:
    """At most 64 rows; of one row, where both operands lie along k, without tensor cores."""
    p, itemsize = work.product, work.dtype.itemsize
    bias, residual = work.bias_and_residual
    if p.m == 1 and p.ak == 1 and p.bk == 1:
        bn, bk = 4, min(4096 // itemsize, next_power_of_2(p.k))
        constants = {"BN": bn, "BK": bk, "EVEN": p.k % bk == 0 and p.n % bn == 0, "num_warps": 4}
        step = Step(
            skinny._row_kernel, (cdiv(p.n, bn),), p.n, p.k, p.bn, on=work.on, tile=(bn, bk),
            **work.epilogue, **constants,
        )  # fmt: skip
        return {}, [step]
    bm, bk = max(16, next_power_of_2(p.m)), 32 if work.is_ieee else 256 // itemsize
    bn = 128 if p.m > 32 and p.n >= 96 * 128 and itemsize == 2 else 64
    tiles, blocks = cdiv(p.n, bn), cdiv(p.k, bk)
    splits = max(1, min(2 * work.gpu.multiprocessors // tiles, blocks, cdiv(p.k, LEAST_SPLIT)))
    per_split = cdiv(blocks, splits) * bk
    splits = cdiv(p.k, per_split)  # none without work
    constants = work.epilogue | {
        "BM": bm, "BN": bn, "BK": bk, "IS_PART": splits > 1, "EVEN": p.k % bk == 0,
        "PRECISION": "ieee" if work.is_ieee else "tf32", "num_warps": 4, "num_stages": 4 if itemsize == 2 else 2,
    }  # fmt: skip
    numbers = (p.m, p.n, p.k, p.am, p.ak, p.bk, p.bn, per_split)
    to = "c" if splits == 1 else "parts"
    on = f"a b {bias} {residual} {to}"
    step = Step(skinny._rows_kernel, (tiles, splits), *numbers, on=on, tile=(bm, bn, bk), **constants)
    if splits == 1:
        return {}, [step]
    block = 1024
    add = Step(
        skinny._add_parts_kernel, (p.m, cdiv(p.n, block)), p.m, p.n, splits, on=f"parts {bias} {residual} c",
        tile=(block,), BLOCK=block, num_warps=4, **work.epilogue,
    )  # fmt: skip
    return {"parts": Buffer(shape=(splits, p.m, p.n), dtype=torch.float32)}, [step, add]


def why_not_skinny(a: torch.Tensor, b: torch.Tensor, *_: Any) -> str:
    product = product_of(a, b)
    if product is None or product.batches > 1:
        return "it takes one product, not a batch"
    return "" if product.m <= skinny.MOST_ROWS else f"it is for at most {skinny.MOST_ROWS} rows"


def why_no_engine(work: Work) -> str:
    """Why Hopper's copy engine does not load these operands; empty where it does."""
    if work.gpu.capability // 10 != 9:
        return "tiles come by Hopper's copy engine, and this is another GPU"
    if work.dtype.itemsize != 2:
        return "the copy engine's kernel is for 16-bit operands"
    if work.product.batches > 1:
        return "the copy engine's kernel takes one product, not a batch"
    if not all(operand.is_whole for operand in work.operands):
        return "an operand has no dimension that lies in one piece"
    return ""


LADDER: dict[str, tuple[Callable[[Work], Steps], str]] = {
    "naive": (_naive, "every element of A and B from memory, one step of k at a time"),
    "coalesced": (_coalesced, "lanes of a warp read neighbours along k: sectors are used in full"),
    "tiled": (_tiles(group=1, in_fp32=True), "blocks of A and B come through shared memory, once a tile"),
    "tensor_core": (_tiles(group=1), "tensor cores multiply the blocks"),
    "swizzled": (_tiles(group=8), "tiles in an order in which programs share operands in the L2"),
    "skinny": (_skinny, "few rows: weights stream past them, k split where tiles are few"),
    "persistent": (_persistent, "one program a multiprocessor, tile after tile, loaded by Hopper's copy engine"),
}


def plan_by(
    provider: str, a: torch.Tensor, b: torch.Tensor, bias: Maybe, residual: Maybe, activation: str, tf32: bool
) -> Plan:
    """The plan of one step of the ladder."""
    copies = [name for name, x in (("bias", bias), ("residual", residual)) if x is not None and not x.is_contiguous()]
    product = product_of(a, b)
    if product is None:
        copies += ["a", "b"]
        a, b = _contiguous(a), _contiguous(b)
        product = product_of(a, b)
    assert product is not None
    work = Work(
        product=product,
        operands=operands_of(product, a, b),
        dtype=a.dtype,
        gpu=facts(a),
        epilogue={"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "ACTIVATION": activation},
        is_ieee=a.dtype == torch.float32 and not tf32,
    )
    steps_of, summary = LADDER[provider]
    buffers, steps = steps_of(work)
    return Plan(
        provider=provider,
        reason=summary,
        copies=tuple(copies),
        buffers={"c": Buffer(shape=(*a.shape[:-1], b.shape[-1]), dtype=a.dtype), **buffers},
        steps=tuple(steps),
        outputs=("c",),
    )


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """As it will lie when it was copied, without the copy."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_cuda else x.contiguous()


def why_torch(a: torch.Tensor, b: torch.Tensor, bias: Maybe, residual: Maybe, activation: str, tf32: bool) -> str:
    """Why a product goes to PyTorch (cuBLAS); empty where a kernel of ours takes it."""
    if reason := why_no_kernel(a):
        return reason
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        return "PyTorch multiplies vectors, and says what is wrong with shapes"
    if b.dim() > 2 and a.shape[:-2] != b.shape[:-2]:
        return "batches that differ: PyTorch broadcasts"
    if a.numel() == 0 or b.numel() == 0:
        return "nothing to multiply"
    others = [x for x in (b, bias, residual) if x is not None]
    if any(x.dtype != a.dtype or x.device != a.device for x in others):
        return "the arguments differ in data type or device"
    if bias is not None and tuple(bias.shape) != (b.shape[-1],):
        return "PyTorch broadcasts a bias that is no row"
    if residual is not None and tuple(residual.shape) != (*a.shape[:-1], b.shape[-1]):
        return "PyTorch broadcasts a residual of another shape"
    if activation != "none" and torch.is_grad_enabled() and any(x.requires_grad for x in (a, *others)):
        return "an activation's gradient needs what it was taken of, which our kernel does not keep"
    if not a.is_cuda:
        return ""  # interpreted, or planned for a GPU that is not here
    if torch.compiler.is_compiling():
        return "cuBLAS: torch.compile sees no addresses, which the choice depends on"
    product = product_of(a, b)
    if product is None:
        return "cuBLAS: the leading dimensions would have to be copied"
    return why_cublas(product, operands_of(product, a, b), a.dtype, facts(a))


def plan_product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Plan:
    return plan_by("persistent" if why_not_skinny(a, b) else "skinny", a, b, *rest)


def fake(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def backward(
    dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tf32: bool, wanted: tuple[bool, ...]
) -> tuple[Maybe, ...]:
    """The gradients of a, b, bias, residual, of those that are wanted: two products, each by its own plan."""
    wants_a, wants_b, wants_bias, wants_residual = wanted
    rows = dc.reshape(-1, dc.shape[-1])
    da = _matmul.call(dc, b.mT, None, None, "none", tf32) if wants_a else None
    db = None
    if wants_b and b.dim() == 2:
        db = _matmul.call(a.reshape(-1, a.shape[-1]).T, rows, None, None, "none", tf32)
    elif wants_b:
        db = _matmul.call(a.mT, dc, None, None, "none", tf32)
    return da, db, rows.sum(0) if wants_bias else None, dc if wants_residual else None


def _by_torch(saved: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same in PyTorch's ops, to be differentiated again."""
    (dc,), a, b = grads, saved["a"], saved["b"]
    rows = dc.reshape(-1, dc.shape[-1])
    db = a.reshape(-1, a.shape[-1]).T @ rows if b.dim() == 2 else a.mT @ dc
    return dc @ b.mT, db, rows.sum(0), dc


_matmul = Registered(
    schema="matmul(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str activation, bool tf32) -> Tensor c",
    reference=reference,
    theirs="torch.matmul",
    why_torch=why_torch,
    plan=plan_product,
    fake=fake,
    gradient=Gradient(
        by=SimpleNamespace(call=backward),
        saves=("a", "b"),
        options=("tf32",),
        gives=("a", "b", "bias", "residual"),
        by_torch=_by_torch,
        is_masked=True,
    ),
)


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: Maybe = None, residual: Maybe = None, *, activation: str = "none"
) -> torch.Tensor:
    """activation(a @ b + bias) + residual; a linear layer is `matmul(x, weight.T, bias)`.

    fp32 is rounded to tf32 where PyTorch is told to (`torch.set_float32_matmul_precision("high")`).
    """
    check_activation(activation)
    return _matmul.call(a, b, bias, residual, activation, allows_tf32(a))  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _precision() -> str:
    return torch.get_float32_matmul_precision()


def allows_tf32(a: torch.Tensor) -> bool:
    return a.dtype == torch.float32 and _precision() != "highest"


def arguments(
    a: torch.Tensor, b: torch.Tensor, bias: Maybe = None, residual: Maybe = None, activation: str = "none"
) -> Any:
    """What the registered op takes."""
    return a, b, bias, residual, activation, allows_tf32(a)


def launched_by(provider: str) -> Callable[..., torch.Tensor]:
    """The product by one step of the ladder, whether or not it wins."""

    def launch(*args: Any) -> torch.Tensor:
        given = arguments(*args)
        return _matmul.runner(plan_by(provider, *given))(*given)  # type: ignore[no-any-return]

    return launch


def backward_by(provider: str) -> Callable[..., Inputs]:
    """Both gradients by one step of the ladder; B's has as many rows as k, which few rows have no use for."""
    launch, of_b = launched_by(provider), launched_by("persistent" if provider == "skinny" else provider)

    def launch_backward(dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Inputs:
        return launch(dc, b.mT), of_b(a.mT, dc)

    return launch_backward


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """As a linear layer has them: both lie along k."""
    generator = generator_for(device, seed)
    made = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    return torch.randn(shape["m"], shape["k"], **made), torch.randn(shape["n"], shape["k"], **made).T


KERNELS = {
    "naive": (ladder.NAIVE,),
    "coalesced": (ladder.COALESCED,),
    "tiled": (tensor_core.TILE,),
    "tensor_core": (tensor_core.TILE,),
    "swizzled": (tensor_core.TILE,),
    "skinny": (skinny.ROW, skinny.ROWS, skinny.ADD_PARTS),
    "persistent": (persistent.PERSISTENT, persistent.ALIGN, tensor_core.EVERY_TILE),
}

MATMUL = Op(
    name="matmul",
    summary="A @ B, with bias, activation and residual",
    reference=reference,
    call=matmul,
    plan=lambda *args: _matmul.decide(*arguments(*args)),
    providers={
        name: Provider(
            launch=launched_by(name),
            backward=backward_by(name),
            kernels=KERNELS[name],
            why_not=why_not_skinny if name == "skinny" else lambda *inputs: "",
            summary=summary,
        )
        for name, (_, summary) in LADDER.items()
    },
    inputs=inputs,
    cost=cost,
    shapes=tuple({"m": m, "n": n, "k": k} for m, n, k in (
        (4096, 4096, 4096), (8192, 8192, 8192), (512, 14336, 4096), (4096, 14336, 4096), (4096, 4096, 14336),
        (8192, 28672, 8192), (4096, 100_000, 700), (8192, 50257, 768), (1, 4096, 4096), (16, 4096, 14336),
    )),
    test_shapes=tuple({"m": m, "n": n, "k": k} for m, n, k in (
        (1, 1, 1), (17, 15, 16), (16, 72, 63), (65, 64, 40), (130, 129, 72),
    )),
    batch="",
    library_args=arguments,
)  # fmt: skip
