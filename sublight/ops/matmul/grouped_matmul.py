"""Rows in consecutive groups, each group times a matrix of its own: what a mixture of experts multiplies.

`ends[g]` is the row after group g's last; it lies on the device, where a router put it, and no call waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sublight.backend.device import Facts, facts
from sublight.backend.jit import cdiv
from sublight.backend.launch import Step, View
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import grouped_matmul as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.matmul import grouped
from sublight.ops.matmul.matmul import allows_tf32
from sublight.ops.matmul.product import ENGINE_BYTES
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered


def reference(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, tf32: bool = False) -> torch.Tensor:
    """PyTorch's products one by one: reads `ends` on the host; rows after the last end are zeros."""
    stops = [0, *ends.tolist()]
    if stops != sorted(stops) or stops[-1] > a.shape[0]:
        raise BadInput(f"ends {stops[1:]}: they rise, to at most the {a.shape[0]} rows of a")
    parts = [a[begin:end] @ b[group] for group, (begin, end) in enumerate(pairwise(stops))]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - stops[-1], b.shape[-1])])


class GroupTile(NamedTuple):
    """The result's rows and columns that a program takes at once, the bytes along k, and how it is compiled."""

    rows: int
    cols: int
    k_bytes: int
    warps: int
    stages: int


BLOCK_K = 64
IEEE_TILE = GroupTile(64, 64, 64, 8, 2)  # fp32 without tensor cores
PRODUCT_TILE = GroupTile(64, 128, 128, 4, 4)
WEIGHTS_TILE = GroupTile(64, 128, 128, 4, 3)


# on Hopper, whose copy engine loads the matrices; gated, a program has two tiles of so many columns
ENGINE_TILE = GroupTile(128, 256, 128, 8, 4)
GATED_TILE = GroupTile(128, 128, 128, 8, 4)
SMALL_ENGINE_TILE = GroupTile(64, 128, 128, 4, 4)
FEW_ROWS = 96  # a group, on average: with fewer, most of a tall tile's rows would be nobody's


def _at_once(gpu: Facts) -> int:
    return 2 * gpu.multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one operand, as a launch takes them: as they lie, or `index[row] // share` of them."""

    name: str
    strides: tuple[int, ...]
    index: str = ""  # the buffer with the index; empty: as they lie
    share: int = 1


def product_step(
    a: Rows, b: str, c: str, *, rows: int, dims: tuple[int, int, int], strides: tuple[int, ...], kind: torch.dtype,
    tf32: bool, gpu: Facts, is_aligned: bool = False,
) -> Step:  # fmt: skip
    """The launch of a grouped product by b (groups, k, n) of these `strides`; `dims` are groups, k and n."""
    groups, k, n = dims
    if not why_no_engine(a, dims, strides, kind, gpu, is_aligned=is_aligned):
        return engine_step(a, b, c, rows=rows, dims=dims, kind=kind, gpu=gpu, is_turned=strides[2] != 1)
    is_ieee = kind == torch.float32 and not tf32
    bm, bn, k_bytes, warps, stages = IEEE_TILE if is_ieee else PRODUCT_TILE
    bk = k_bytes // kind.itemsize
    most = (cdiv(rows, bm) + groups) * cdiv(n, bn)
    return Step(
        grouped._grouped_kernel, (min(_at_once(gpu), most),),
        rows, n, k, groups, a.share, *a.strides, *strides,
        on=f"{a.name} {b} ends {a.index or 'ends'} {c}", tile=(bm, bn, bk), BM=bm, BN=bn, BK=bk, EVEN=k % bk == 0,
        INDEXED=bool(a.index), PRECISION=gpu.precision(is_ieee), num_warps=warps,
        num_stages=gpu.stages(stages, (bm + bn) * k_bytes),
    )  # fmt: skip


def why_no_engine(
    a: Rows, dims: tuple[int, int, int], strides: tuple[int, ...], kind: torch.dtype, gpu: Facts, *, is_aligned: bool
) -> str:
    """Why Hopper's copy engine does not load the matrices; empty where it does."""
    _, k, n = dims
    if gpu.capability != 90 or kind.itemsize != 2:
        return "the copy engine's kernel is for 16 bits on Hopper"
    if strides not in ((k * n, 1, k), (k * n, n, 1)) or not is_aligned:
        return "matrices do not follow one another in memory"
    inner = k if strides == (k * n, 1, k) else n
    if inner * kind.itemsize % ENGINE_BYTES:
        return "rows of the matrices begin at odd places"
    if strides[2] == 1 and n > 1 and k % BLOCK_K:  # a block past a matrix's end would be the next one's beginning
        return f"matrices that lie along n, with a k that is no multiple of {BLOCK_K}"
    return "" if a.strides[1] == 1 else "A does not lie along k"


def engine_step(
    a: Rows, b: str, c: str, *, rows: int, dims: tuple[int, int, int], kind: torch.dtype, gpu: Facts,
    is_turned: bool = True, is_gated: bool = False, hidden: str = "",
) -> Step:  # fmt: skip
    """The launch on Hopper; gated, b has 2 * n columns a group, and `hidden` is what they give, where it is kept."""
    groups, k, n = dims
    if rows < FEW_ROWS * groups:
        tile = SMALL_ENGINE_TILE
    else:
        tile = GATED_TILE if is_gated else ENGINE_TILE
    bm, bn, k_bytes, warps, stages = tile
    bk, per_group = k_bytes // kind.itemsize, 2 * n if is_gated else n
    most = (cdiv(rows, bm) + groups) * cdiv(n, bn)
    at_once = gpu.multiprocessors * (1 if warps > 4 else 2)
    if is_turned:
        view = View((groups * per_group, k), (k, 1), (bn, bk))
    else:
        view = View((groups * k, n), (n, 1), (bk, bn))
    return Step(
        grouped._grouped_engine_kernel, (min(at_once, most),), rows, n, k, groups, a.share, a.strides[0],
        on=f"{a.name} {b} ends {a.index or 'ends'} {c} {hidden or c}", views={1: view}, tile=tile,
        BM=bm, BN=bn, BK=bk, EVEN=k % bk == 0, INDEXED=bool(a.index), B_TURNED=is_turned, GATED=is_gated,
        KEPT=bool(hidden), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def weights_step(
    a: Rows, dc: Rows, db: str, *, rows: int, dims: tuple[int, int, int], kind: torch.dtype, tf32: bool, gpu: Facts
) -> Step:
    """The launch that gives the gradient of b; `dims` are groups, k and n."""
    groups, k, n = dims
    is_ieee = kind == torch.float32 and not tf32
    bk, bn, rows_bytes, warps, stages = IEEE_TILE if is_ieee else WEIGHTS_TILE
    br = rows_bytes // kind.itemsize
    tiles = groups * cdiv(k, bk) * cdiv(n, bn)
    return Step(
        grouped._grouped_weights_kernel, (min(_at_once(gpu), tiles),),
        rows, n, k, groups, max(a.share, dc.share), *a.strides, *dc.strides,
        on=f"{a.name} {dc.name} ends {a.index or dc.index or 'ends'} {db}", tile=(bk, bn, br), BK=bk, BN=bn, BR=br,
        INDEXED="a" if a.index else "dc" if dc.index else "",
        PRECISION=gpu.precision(is_ieee), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def plan_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, tf32: bool) -> Plan:
    groups, k, n = b.shape
    step = product_step(
        Rows(name="a", strides=a.stride()), "b", "c",
        rows=a.shape[0], dims=(groups, k, n), strides=b.stride(), kind=a.dtype, tf32=tf32, gpu=facts(a),
        is_aligned=b.data_ptr() % ENGINE_BYTES == 0,
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one launch over all groups, tiles counted on the device",
        copies=() if ends.is_contiguous() else ("ends",),
        buffers={"c": Buffer(shape=(a.shape[0], n), dtype=a.dtype, is_zero=True)},  # rows after the last end
        steps=(step,),
        outputs=("c",),
    )


def plan_weights(a: torch.Tensor, dc: torch.Tensor, ends: torch.Tensor, tf32: bool) -> Plan:
    dims = ends.numel(), a.shape[1], dc.shape[1]
    step = weights_step(
        Rows(name="a", strides=a.stride()), Rows(name="dc", strides=dc.stride()), "db",
        rows=a.shape[0], dims=dims, kind=a.dtype, tf32=tf32, gpu=facts(a),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="each group's matrix by its own rows",
        copies=() if ends.is_contiguous() else ("ends",),
        buffers={"db": Buffer(shape=dims, dtype=a.dtype)},
        steps=(step,),
        outputs=("db",),
    )


def why_torch(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, tf32: bool) -> str:
    if reason := why_no_kernel(a):
        return reason
    if a.numel() == 0 or b.numel() == 0:
        return "nothing to multiply"
    if b.dtype != a.dtype or b.device != a.device or ends.device != a.device:
        return "the arguments differ in data type or device"
    return ""


def backward(dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    """Of a, a grouped product with each matrix turned; of b, each group's rows of a and dc."""
    tf32, (wants_a, wants_b) = rest
    return (
        _grouped.call(dc, b.mT, ends, tf32) if wants_a else None,
        _grouped_weights.call(a, dc, ends, tf32) if wants_b else None,
    )


def weights_reference(a: torch.Tensor, dc: torch.Tensor, ends: torch.Tensor, tf32: bool = False) -> torch.Tensor:
    stops = [0, *ends.tolist()]
    return torch.stack([a[begin:end].T @ dc[begin:end] for begin, end in pairwise(stops)])


def _by_torch(saved: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    (dc,), (a, b, ends) = grads, (saved[name] for name in ("a", "b", "ends"))
    return reference(dc, b.mT, ends), weights_reference(a, dc, ends)


_grouped_weights = Registered(
    schema="grouped_matmul_weights(Tensor a, Tensor dc, Tensor ends, bool tf32) -> Tensor db",
    reference=weights_reference,
    theirs="a product a group",
    why_torch=why_torch,
    plan=plan_weights,
    fake=lambda a, dc, ends, tf32: a.new_empty((ends.numel(), a.shape[1], dc.shape[1])),
)
_grouped = Registered(
    schema="grouped_matmul(Tensor a, Tensor b, Tensor ends, bool tf32) -> Tensor c",
    reference=reference,
    theirs="a product a group",
    why_torch=why_torch,
    plan=plan_product,
    fake=lambda a, b, ends, tf32: a.new_empty((a.shape[0], b.shape[-1])),
    gradient=Gradient(
        by=SimpleNamespace(call=backward),
        saves=("a", "b", "ends"),
        options=("tf32",),
        gives=("a", "b"),
        by_torch=_by_torch,
        is_masked=True,
    ),
)


def grouped_matmul(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """a (rows, k), whose rows lie group by group, times b (groups, k, n): c (rows, n).

    `ends` (groups,) holds the row after each group's last, in rising order; what lies after the last end is zero. It is
    not looked at on the host where our kernels run, so that nothing waits for it: ends beyond the rows are taken for
    the last row there, and are an error elsewhere.
    """
    if a.dim() != 2 or b.dim() != 3 or ends.dim() != 1 or ends.dtype not in (torch.int32, torch.int64):
        raise BadInput(
            f"grouped_matmul takes a (rows, k), b (groups, k, n), whole ends (groups,), not {_kinds(a, b, ends)}"
        )
    if a.shape[1] != b.shape[1] or b.shape[0] != ends.shape[0]:
        raise BadInput(f"a, b and ends do not fit together: {_kinds(a, b, ends)}")
    return _grouped.call(a, b, ends, allows_tf32(a))  # type: ignore[no-any-return]


def _kinds(*tensors: torch.Tensor) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors)


def launch(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _grouped.by_kernels(a, b, ends, allows_tf32(a))  # type: ignore[no-any-return]


def launch_backward(dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> Inputs:
    tf32 = allows_tf32(a)
    return _grouped.by_kernels(dc, b.mT, ends, tf32), _grouped_weights.by_kernels(a, dc, ends, tf32)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Groups of random sizes, some of them empty."""
    generator = generator_for(device, seed)
    made: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    a = torch.randn(shape["m"], shape["k"], **made)
    b = torch.randn(shape["groups"], shape["n"], shape["k"], **made).mT
    if device == "meta":
        return a, b, torch.empty(shape["groups"], dtype=torch.int32, device=device)
    cuts = torch.randint(shape["m"] + 1, (shape["groups"],), generator=generator, device=device, dtype=torch.int32)
    ends = cuts.sort().values
    ends[-1] = shape["m"]
    return a, b, ends


GROUPED_MATMUL = Op(
    name="grouped_matmul",
    summary="rows in groups, each times its own matrix, in one launch",
    reference=reference,
    call=grouped_matmul,
    plan=lambda a, b, ends: _grouped.decide(a, b, ends, allows_tf32(a)),
    providers={
        "sublight": Provider(
            launch=launch,
            backward=launch_backward,
            kernels=(grouped.GROUPED, grouped.GROUPED_ENGINE, grouped.GROUPED_WEIGHTS),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=(
        {"m": 65536, "n": 1536, "k": 2048, "groups": 128},
        {"m": 65536, "n": 2048, "k": 768, "groups": 128},
        {"m": 8192, "n": 14336, "k": 4096, "groups": 8},
    ),
    test_shapes=(
        {"m": 1, "n": 1, "k": 1, "groups": 1},
        {"m": 40, "n": 33, "k": 17, "groups": 5},
        {"m": 150, "n": 130, "k": 64, "groups": 3},
    ),
    wrt=(0, 1),
    batch="",
    library_args=lambda a, b, ends: (a, b, ends, allows_tf32(a)),
)
