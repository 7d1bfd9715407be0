"""Sum, maximum and its index over one dimension or several that are neighbours: read x once, write what is left.

The gradient of a sum is dy seen again at every place, a view that moves nothing. That of a maximum goes to the first
place that holds it, as with `torch.max(x, dim)` (`torch.amax` would spread it over equals, and read x again for that).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.reduce import reduce_argmax as argmax_cost
from sublight.cost.reduce import reduce_max as max_cost
from sublight.cost.reduce import reduce_sum as sum_cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.pointwise import block_for_columns
from sublight.ops.kernels.rows import copies_of, generator_for, sums_of, why_no_kernel
from sublight.ops.record.library import Registered
from sublight.ops.record.sized_gradient import SizedGradient, gradient_by
from sublight.ops.record.tuning import Tile
from sublight.ops.reduce.reduction import KERNELS, plan_reduction

Dims = int | tuple[int, ...] | None


def sum_reference(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _torch_sum(x, *ends_of(x, dim), keepdim)


def max_reference(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _torch_max(x, *ends_of(x, dim), keepdim)[0]


def argmax_reference(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _torch_argmax(x, *ends_of(x, dim), keepdim)


def ends_of(x: torch.Tensor, dim: Dims) -> tuple[int, int]:
    """The first and the last of the dimensions that are meant; None means all."""
    if x.dim() == 0:
        raise BadInput("a tensor without dimensions has nothing to reduce: it is its own sum and maximum")
    given = tuple(range(x.dim())) if dim is None else tuple(dim) if isinstance(dim, Iterable) else (dim,)
    if not given or any(isinstance(each, float) or not -x.dim() <= each < x.dim() for each in given):
        raise BadInput(f"dim {dim!r} of a tensor with {x.dim()} dimensions: use {-x.dim()} to {x.dim() - 1}")
    dims = {each % x.dim() for each in given}
    first, last = min(dims), max(dims)
    if len(given) != len(dims) or last - first != len(dims) - 1:
        raise BadInput(f"dim {dim!r} must name neighbours, each once: permute the tensor, or reduce twice")
    return first, last


def left_of(x: torch.Tensor, first: int, last: int, keepdim: bool) -> tuple[int, ...]:
    """The shape of the result."""
    return (*x.shape[:first], *((1,) * (last + 1 - first) if keepdim else ()), *x.shape[last + 1 :])


def _torch_sum(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return x.sum(tuple(range(first, last + 1)), keepdim)


def _torch_max(x: torch.Tensor, first: int, last: int, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = x.flatten(first, last).max(first)
    left = left_of(x, first, last, keepdim)
    return values.reshape(left), indices.reshape(left)


def _torch_argmax(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return x.flatten(first, last).argmax(first).reshape(left_of(x, first, last, keepdim))


@triton.jit
def _spread_kernel(
    dy_ptr, index_ptr, dx_ptr, n, inner, blocks, col_blocks, ROWS: tl.constexpr, COLS: tl.constexpr, ALONG: tl.constexpr
):
    """dx is dy at the index along n and zero elsewhere; (inner, n) with ALONG, else (outer, n, inner)."""
    piece = tl.program_id(0)
    col = (piece % col_blocks).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    row = (piece // col_blocks % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if ALONG:
        index = tl.load(index_ptr + row, mask=row < inner, other=-1)
        dy = tl.load(dy_ptr + row, mask=row < inner, other=0.0)
        dx = tl.where(col == index, dy, 0.0).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * n + col, dx, mask=(row < inner) & (col < n))
    else:
        out = (piece // col_blocks // blocks).to(tl.int64)
        index = tl.load(index_ptr + out * inner + col, mask=col < inner, other=-1)
        dy = tl.load(dy_ptr + out * inner + col, mask=col < inner, other=0.0)
        dx = tl.where(row == index, dy, 0.0).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + (out * n + row) * inner + col, dx, mask=(row < n) & (col < inner))


MANY = 2**22  # elements: 1024 programs of 4096


def plan_spread(dy: torch.Tensor, indices: torch.Tensor, sizes: Sequence[int], first: int, last: int) -> Plan:
    """The gradient of a maximum, of these sizes: zero but where the maximum stood."""
    outer, n, inner = around(sizes, first, last)
    width, height = (n, outer) if inner == 1 else (inner, n)
    # 16 bytes a lane, four times over where programs abound: each waits once, for its index, before it can store
    times = 4 if outer * n * inner >= MANY else 1
    elements = times * 4 * 32 * 16 // dy.element_size()
    cols = block_for_columns(width, min(elements, 1024))
    rows = elements // cols
    col_blocks, blocks = cdiv(width, cols), cdiv(height, rows)
    step = Step(
        _spread_kernel, (col_blocks * blocks * (1 if inner == 1 else outer),),
        n, outer if inner == 1 else inner, blocks, col_blocks,
        on="dy indices dx", tile=Tile(rows=rows, block=cols, warps=4),
        ROWS=rows, COLS=cols, ALONG=inner == 1, num_warps=4,
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="dy where the maximum stood, zeros elsewhere",
        copies=copies_of(dy=not dy.is_contiguous(), indices=not indices.is_contiguous()),
        buffers={"dx": Buffer(shape=tuple(sizes), dtype=dy.dtype)},
        steps=(step,),
        outputs=("dx",),
    )


def around(sizes: Sequence[int], first: int, last: int) -> tuple[int, int, int]:
    """A tensor's elements before, in and behind the dimensions first … last."""
    return math.prod(sizes[:first]), math.prod(sizes[first : last + 1]), math.prod(sizes[last + 1 :])


def _spread_by_torch(
    dy: torch.Tensor, indices: torch.Tensor, sizes: Sequence[int], first: int, last: int
) -> torch.Tensor:
    outer, n, inner = around(sizes, first, last)
    zeros = dy.new_zeros(outer, n, inner)
    return zeros.scatter(1, indices.reshape(outer, 1, inner), dy.reshape(outer, 1, inner)).view(sizes)


def _spread_again(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[torch.Tensor]:
    return (_spread_by_torch(*grads, *(saved[name] for name in ("indices", "sizes", "first", "last"))),)


def _expanded(dy: torch.Tensor, sizes: Sequence[int], first: int, last: int) -> torch.Tensor:
    """The gradient of a sum: dy seen again at every place."""
    return dy.reshape(*sizes[:first], *((1,) * (last + 1 - first)), *sizes[last + 1 :]).expand(sizes)


def _sizes(x: torch.Tensor, first: int, last: int, keepdim: bool) -> dict[str, Any]:
    return {"sizes": x.shape}


def _why_torch(x: torch.Tensor, first: int, last: int, keepdim: bool) -> str:
    return why_no_kernel(x) or ("" if x.numel() else "nothing to do for a tensor without elements")


def _fake(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return x.new_empty(left_of(x, first, last, keepdim))


def _fake_indices(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return x.new_empty(left_of(x, first, last, keepdim), dtype=torch.int64)


def _plan_sum(x: torch.Tensor, first: int, last: int, keepdim: bool) -> Plan:
    return plan_reduction(x, first, last, sums_of(x), left_of(x, first, last, keepdim), ("values",))


def _plan_max(x: torch.Tensor, first: int, last: int, keepdim: bool) -> Plan:
    return plan_reduction(x, first, last, "max", left_of(x, first, last, keepdim), ("values",))


def _plan_max_and_argmax(x: torch.Tensor, first: int, last: int, keepdim: bool) -> Plan:
    return plan_reduction(x, first, last, "argmax", left_of(x, first, last, keepdim), ("values", "indices"))


def _plan_argmax(x: torch.Tensor, first: int, last: int, keepdim: bool) -> Plan:
    return plan_reduction(x, first, last, "argmax", left_of(x, first, last, keepdim), ("indices",))


_reduce_sum = Registered(
    schema="reduce_sum(Tensor x, int first, int last, bool keepdim) -> Tensor values",
    plan=_plan_sum,
    fake=_fake,
    reference=_torch_sum,
    theirs="torch.sum",
    why_torch=_why_torch,
    gradient=gradient_by(_expanded, of="x", options=("sizes", "first", "last"), sizes=_sizes),
)
_reduce_max_backward = Registered(
    schema="reduce_max_backward(Tensor dy, Tensor indices, SymInt[] sizes, int first, int last) -> Tensor dx",
    plan=plan_spread,
    fake=lambda dy, indices, sizes, first, last: dy.new_empty(sizes),
    reference=_spread_by_torch,
)
_reduce_max = Registered(  # with the indices, for the gradient
    schema="reduce_max(Tensor x, int first, int last, bool keepdim) -> (Tensor values, Tensor indices)",
    plan=_plan_max_and_argmax,
    fake=lambda *args: (_fake(*args), _fake_indices(*args)),
    reference=lambda *args: _torch_max(*args)[0],
    theirs="torch.max",
    why_torch=_why_torch,
    results=1,
    gradient=SizedGradient(
        by=_reduce_max_backward,
        saves=("indices",),
        gives=("x",),
        options=("sizes", "first", "last"),
        sizes=_sizes,
        by_torch=_spread_again,
    ),
)
_reduce_max_alone = Registered(
    schema="reduce_max_alone(Tensor x, int first, int last, bool keepdim) -> Tensor values",
    plan=_plan_max,
    fake=_fake,
    reference=lambda *args: _torch_max(*args)[0],
    theirs="torch.max",
    why_torch=_why_torch,
)
_reduce_argmax = Registered(
    schema="reduce_argmax(Tensor x, int first, int last, bool keepdim) -> Tensor indices",
    plan=_plan_argmax,
    fake=_fake_indices,
    reference=_torch_argmax,
    theirs="torch.argmax",
    why_torch=_why_torch,
)


def reduce_sum(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """Sum over the last dimension, over `dim`, over neighbours (1, 2), or over everything (None), in a fixed order."""
    return _reduce_sum.call(x, *ends_of(x, dim), keepdim)  # type: ignore[no-any-return]


def reduce_max(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """Maximum, as `reduce_sum` sums; NaN where there is one. The gradient goes to the first of equals."""
    return _maximum(x).call(x, *ends_of(x, dim), keepdim)  # type: ignore[no-any-return]


def _maximum(x: torch.Tensor) -> Registered:
    """Indices take time: they are found where a gradient needs them."""
    return _reduce_max if torch.is_grad_enabled() and x.requires_grad else _reduce_max_alone


def reduce_argmax(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """The index of the maximum, the first of equals, or of the first NaN; neighbouring dimensions count as one."""
    return _reduce_argmax.call(_values(x), *ends_of(x, dim), keepdim)  # type: ignore[no-any-return]


def _values(x: torch.Tensor) -> torch.Tensor:
    """x without its gradient, which an index has not."""
    return x.detach() if x.requires_grad else x


def launch_sum(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """Our kernels, whether or not they win."""
    return _reduce_sum.by_kernels(x, *ends_of(x, dim), keepdim)  # type: ignore[no-any-return]


def launch_max(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _reduce_max_alone.by_kernels(x, *ends_of(x, dim), keepdim)  # type: ignore[no-any-return]


def launch_argmax(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _reduce_argmax.by_kernels(x, *ends_of(x, dim), keepdim)  # type: ignore[no-any-return]


def launch_sum_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    return (_expanded(dy, x.shape, x.dim() - 1, x.dim() - 1),)


def launch_max_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    last = x.dim() - 1
    _, indices = _reduce_max.by_kernels(x, last, last, False)
    return (_reduce_max_backward.by_kernels(dy, indices, x.shape, last, last),)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """(outer, n, inner) in memory, seen with n last: what is reduced then has the stride `inner`."""
    generator = generator_for(device, seed)
    size = (shape["outer"], shape["n"], shape["inner"])
    return (torch.randn(size, generator=generator, device=device, dtype=getattr(torch, dtype)).transpose(1, 2),)


def _shapes(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple({"outer": outer, "n": n, "inner": inner} for outer, n, inner in sizes)


SHAPES = _shapes(
    *((2**27 // cols, cols, 1) for cols in (768, 1600, 4096, 12288, 50257, 131072)),
    *((1, 2**27, 1), (16, 2**23, 1)),  # few rows
    *((1, 2**15, 4096), (8, 4096, 4096), (2**15, 64, 64), (1, 128, 2**20)),  # columns
    *((128, 4096, 1), (16, 4096, 1), (1, 4096, 1)),
)
TEST_SHAPES = _shapes(
    *((1, 1, 1), (3, 127, 1), (65, 128, 1), (5, 2049, 1), (2, 2064, 1), (1, 30_001, 1)),  # tile, rows, split
    *((3, 5, 129), (2, 700, 16), (70, 9, 3), (1, 3000, 5), (2, 33, 300)),
)

_SHARED: dict[str, Any] = {
    "inputs": inputs,
    "shapes": SHAPES,
    "test_shapes": TEST_SHAPES,
    "batch": "outer",
    "library_args": lambda x: (x, x.dim() - 1, x.dim() - 1, False),
}
REDUCE_SUM = Op(
    name="reduce_sum",
    summary="sum over any axis, in a fixed order",
    reference=sum_reference,
    call=reduce_sum,
    plan=lambda x, dim=-1, keepdim=False: _reduce_sum.decide(x, *ends_of(x, dim), keepdim),
    providers={"sublight": Provider(launch=launch_sum, backward=launch_sum_backward, kernels=KERNELS)},
    cost=sum_cost,
    **_SHARED,
)
REDUCE_MAX = Op(
    name="reduce_max",
    summary="maximum over any axis; its gradient goes to the first of equals",
    reference=max_reference,
    call=reduce_max,
    plan=lambda x, dim=-1, keepdim=False: _maximum(x).decide(x, *ends_of(x, dim), keepdim),
    providers={
        "sublight": Provider(
            launch=launch_max, backward=launch_max_backward, kernels=(*KERNELS, Kernel(jit=_spread_kernel))
        )
    },
    cost=max_cost,
    **_SHARED,
)
REDUCE_ARGMAX = Op(
    name="reduce_argmax",
    summary="where the maximum over any axis stands, the first of equals",
    reference=argmax_reference,
    call=reduce_argmax,
    plan=lambda x, dim=-1, keepdim=False: _reduce_argmax.decide(_values(x), *ends_of(x, dim), keepdim),
    providers={"sublight": Provider(launch=launch_argmax, kernels=KERNELS)},
    cost=argmax_cost,
    wrt=(),
    **_SHARED,
)
