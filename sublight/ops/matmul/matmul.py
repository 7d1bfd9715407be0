"""C = A @ B, with what often follows: bias, activation, residual, while the tile is still in registers.

The ladder, each step a provider: `naive` and `coalesced` (`ladder.py`) read the operands from memory for every row;
`tiled` brings them through shared memory; `tensor_core` multiplies by tensor cores; `swizzled` takes the tiles in an
order that the L2 likes (all three `tensor_core.py`); `persistent` (`persistent.py`) keeps one program on each
multiprocessor and lets Hopper's copy engine load. The plan takes the last one that the operands' layout and the GPU
allow, and PyTorch's (cuBLAS) where that was measured to be faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, tl
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.kernels.rows import why_no_kernel
from sublight.ops.matmul import ladder, persistent, tensor_core
from sublight.ops.matmul.epilogue import ACTIVATIONS
from sublight.ops.matmul.tiles import persistent_tile, plain_tile
from sublight.ops.record.library import Registered

LADDER = ("naive", "coalesced", "tiled", "tensor_core", "swizzled", "persistent")
SCHEMA = "Tensor a, Tensor b, Tensor? bias, Tensor? residual, str activation"
OUT = (
    {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    if hasattr(tl, "float32")
    else {}
)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    y = a @ b
    if bias is not None:
        y = y + bias
    y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


class Product(NamedTuple):
    """A product as the kernels see it: sizes and strides, a batch of them where there are more dimensions."""

    m: int
    n: int
    k: int
    am: int
    ak: int
    bk: int
    bn: int
    batches: int = 1
    batch_a: int = 0
    batch_b: int = 0


def product_of(a: torch.Tensor, b: torch.Tensor) -> Product | None:
    """The sizes and strides of a @ b; None where the leading dimensions do not come down to one batch: then copies are
    made of them.

    >>> product_of(torch.empty(2, 3, 8), torch.empty(16, 8).T)
    Product(m=6, n=16, k=8, am=8, ak=1, bk=1, bn=8, batches=1, batch_a=0, batch_b=0)
    """
    k, n = b.shape[-2:]
    if b.dim() == 2:  # rows of all leading dimensions are rows of one matrix
        rows, apart = _one_stride(a.shape[:-1], a.stride()[:-1])
        return None if apart is None else Product(rows, n, k, apart, a.stride(-1), *b.stride())
    batches, batch_a = _one_stride(a.shape[:-2], a.stride()[:-2])
    _, batch_b = _one_stride(b.shape[:-2], b.stride()[:-2])
    if batch_a is None or batch_b is None or a.shape[:-2] != b.shape[:-2]:
        return None
    return Product(a.shape[-2], n, k, *a.stride()[-2:], *b.stride()[-2:], batches, batch_a, batch_b)


def _one_stride(sizes: Any, strides: Any) -> tuple[int, int | None]:
    """How many entries these dimensions have, and the one stride from each to the next; None where there is none."""
    count, apart = 1, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if count == 1:
            apart = stride
        elif stride != count * apart:
            return 0, None
        count *= size
    return count, apart


def plan_by(
    provider: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
) -> Plan:
    """The plan of one step of the ladder."""
    product, copies = product_of(a, b), []
    if product is None:
        copies = ["a", "b"]
        product = product_of(a.contiguous(), b.contiguous())
    assert product is not None
    out = Buffer(shape=(*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    copies += [name for name, x in (("bias", bias), ("residual", residual)) if x is not None and not x.is_contiguous()]
    epilogue = {
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "HAS_SCALE": False, "ACTIVATION": activation,
    }  # fmt: skip
    step = STEPS[provider](product, a, b, epilogue)
    return Plan(
        provider=provider,
        reason=REASONS[provider],
        copies=tuple(copies),
        buffers={"c": out},
        steps=(step,),
        outputs=("c",),
    )


def _on(epilogue: dict[str, Any]) -> str:
    """The tensors of a launch by pointers; what the epilogue does not use is not looked at."""
    return f"a b {'bias' if epilogue['HAS_BIAS'] else 'b'} {'residual' if epilogue['HAS_RESIDUAL'] else 'b'} c"


def _outer(rows: int, cols: int, warps: int) -> Any:
    def step(p: Product, a: torch.Tensor, b: torch.Tensor, epilogue: dict[str, Any]) -> Step:
        numbers = (p.m, p.n, p.k, p.am, p.ak, p.bk, p.bn, p.n, 1.0)
        grid = (cdiv(p.m, rows), cdiv(p.n, cols))
        shape = {"ROWS": rows, "COLS": cols, "num_warps": warps}
        return Step(ladder._outer_kernel, grid, *numbers, on=_on(epilogue), tile=(rows, cols), **epilogue, **shape)

    return step


def _tiles(*, group: int, is_wide: bool) -> Any:
    def step(p: Product, a: torch.Tensor, b: torch.Tensor, epilogue: dict[str, Any]) -> Step:
        is_ieee = is_wide or (a.dtype == torch.float32 and not allows_tf32())
        tile = plain_tile(p.m, p.n, a.element_size(), facts(a), is_ieee=is_ieee)
        numbers = (p.m, p.n, p.k, p.am, p.ak, p.bk, p.bn, p.batch_a, p.batch_b, p.n, 1.0)
        constants = {
            "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": group, "EVEN": p.k % tile.bk == 0, "WIDE": is_wide,
            "PRECISION": "ieee" if is_ieee else "tf32", **tile.options(),
        }  # fmt: skip
        grid = (cdiv(p.m, tile.bm) * cdiv(p.n, tile.bn), p.batches)
        return Step(tensor_core._tile_kernel, grid, *numbers, on=_on(epilogue), tile=tile, **epilogue, **constants)

    return step


def _persistent(p: Product, a: torch.Tensor, b: torch.Tensor, epilogue: dict[str, Any]) -> Step:
    gpu = facts(a)
    tile = persistent_tile(p.m, p.n, p.k, gpu)
    programs = min(gpu.multiprocessors, cdiv(p.m, tile.bm) * cdiv(p.n, tile.bn))
    a_turned, b_turned = p.ak != 1, p.bk == 1
    views = {
        0: View((p.k, p.m), (p.ak, 1), (tile.bk, tile.bm)) if a_turned
        else View((p.m, p.k), (p.am, 1), (tile.bm, tile.bk)),
        1: View((p.n, p.k), (p.bn, 1), (tile.bn, tile.bk)) if b_turned
        else View((p.k, p.n), (p.bk, 1), (tile.bk, tile.bn)),
        2: View((p.m, p.n), (p.n, 1), (tile.bm, tile.bn // 2)),
    }  # fmt: skip
    constants = {
        "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": tile.group, "PROGRAMS": programs, "A_TURNED": a_turned,
        "B_TURNED": b_turned, "FLAT": True, "OUT": OUT[a.dtype], **tile.options(),
    }  # fmt: skip
    _, _, bias, residual, _ = _on(epilogue).split()
    return Step(
        persistent._persistent_kernel, (programs,), p.m, p.n, p.k, p.n, 1.0,
        on=f"a b c {bias} {residual}", views=views, tile=tile, **epilogue, **constants,
    )  # fmt: skip


def allows_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)


STEPS = {
    "naive": _outer(64, 16, 4),
    "coalesced": _outer(8, 128, 4),
    "tiled": _tiles(group=1, is_wide=True),
    "tensor_core": _tiles(group=1, is_wide=False),
    "swizzled": _tiles(group=8, is_wide=False),
    "persistent": _persistent,
}
REASONS = {
    "naive": "every row of A and column of B from memory",
    "coalesced": "the same, by neighbours",
    "tiled": "through shared memory",
    "tensor_core": "by tensor cores",
    "swizzled": "by tensor cores, tiles in an order that shares the L2",
    "persistent": "one program a multiprocessor, tiles by Hopper's copy engine",
}


def why_not_persistent(a: torch.Tensor, b: torch.Tensor, *_: Any) -> str:
    """Why Hopper's copy engine cannot load these operands; empty where it can."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return "the persistent kernel is for 16-bit operands"
    product = product_of(a, b)
    if product is None or product.batches > 1:
        return "the persistent kernel takes one product, not a batch"
    if facts(a).capability != 90 and not is_interpreted():
        return "the persistent kernel is for Hopper (sm_90)"
    per_16_bytes = 16 // a.element_size()
    a_apart = product.am if product.ak == 1 else product.ak if product.am == 1 else 0
    b_apart = product.bn if product.bk == 1 else product.bk if product.bn == 1 else 0
    if not a_apart or not b_apart or min(product.m, product.n, product.k) < 1:
        return "an operand has no dimension that lies in one piece"
    if a_apart % per_16_bytes or b_apart % per_16_bytes or product.n % per_16_bytes:
        return "rows do not begin at multiples of 16 bytes"
    if a.data_ptr() % 16 or b.data_ptr() % 16:
        return "an operand does not begin at a multiple of 16 bytes"
    return ""


def why_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
) -> str:
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
    if a.dtype == torch.float32:
        return "fp32: cuBLAS's kernels are faster than ours"
    return ""


def plan_product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
) -> Plan:
    """Our best step for these operands."""
    provider = "swizzled" if why_not_persistent(a, b) else "persistent"
    return plan_by(provider, a, b, bias, residual, activation)


def fake(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _plan_backward(dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Plan:
    raise AssertionError("a gradient is two products: `_backward` makes them")  # pragma: no cover


MATMUL_OP = Registered(
    schema=f"matmul({SCHEMA}) -> Tensor c",
    reference=reference,
    theirs="torch.matmul",
    why_torch=why_torch,
    plan=plan_product,
    fake=fake,
)
