"""Sum, maximum and its index over one dimension or several that are neighbours: read x once, write what is left.

The gradient of a sum is dy seen again at every place, a view that moves nothing. That of a maximum goes to the first
place that holds it, as with `torch.max(x, dim)` (`torch.amax` would spread it over equals, and read x again for that).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.reduce import reduce_argmax as argmax_cost
from sublight.cost.reduce import reduce_max as max_cost
from sublight.cost.reduce import reduce_sum as sum_cost
from sublight.errors import BadInput
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.plane import plane_of
from sublight.ops.kernels.rows import block_for, generator_for, sums_of, why_no_kernel
from sublight.ops.record.library import LIBRARY
from sublight.ops.reduce.reduction import KERNELS, reduce

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
    given = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if not given or any(not -x.dim() <= each < x.dim() for each in given):
        raise BadInput(f"dim {dim!r} of a tensor with {x.dim()} dimensions: use {-x.dim()} to {x.dim() - 1}")
    dims = sorted(each % x.dim() for each in given)
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise BadInput(f"dim {dim!r} must name neighbours, each once: permute the tensor, or reduce twice")
    return dims[0], dims[-1]


def left_of(x: torch.Tensor, first: int, last: int, keepdim: bool) -> tuple[int, ...]:
    """The shape of the result."""
    return (*x.shape[:first], *((1,) * (last + 1 - first) if keepdim else ()), *x.shape[last + 1 :])


def _torch_sum(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return x.sum(tuple(range(first, last + 1)), keepdim)


def _torch_max(x: torch.Tensor, first: int, last: int, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = x.flatten(first, last).max(first)
    return values.reshape(left_of(x, first, last, keepdim)), indices.flatten()


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


def launch_sum(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _sum(x, *ends_of(x, dim), keepdim)


def launch_max(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _max_alone(x, *ends_of(x, dim), keepdim)


def launch_argmax(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    return _argmax(x, *ends_of(x, dim), keepdim)


def _sum(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return reduce(x, first, last, sums_of(x))[0].view(left_of(x, first, last, keepdim))


def _max(x: torch.Tensor, first: int, last: int, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """With the indices, for the gradient."""
    values, indices = reduce(x, first, last, "argmax")
    return values.view(left_of(x, first, last, keepdim)), indices


def _max_alone(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return reduce(x, first, last, "max")[0].view(left_of(x, first, last, keepdim))


def _argmax(x: torch.Tensor, first: int, last: int, keepdim: bool) -> torch.Tensor:
    return reduce(x, first, last, "argmax")[1].view(left_of(x, first, last, keepdim))


def spread(dy: torch.Tensor, indices: torch.Tensor, outer: int, n: int, inner: int) -> torch.Tensor:
    """The gradient of a maximum, (outer, n, inner): zero but where the maximum stood."""
    dx = torch.empty(outer, n, inner, dtype=dy.dtype, device=dy.device)
    elements = 4 * 32 * 16 // dx.element_size()
    width, height = (n, outer) if inner == 1 else (inner, n)
    cols = min(elements, block_for(width))
    rows = max(1, elements // cols)
    col_blocks, blocks = cdiv(width, cols), cdiv(height, rows)
    _spread_kernel[(col_blocks * blocks * (1 if inner == 1 else outer),)](
        dy.contiguous(), indices, dx, n, outer if inner == 1 else inner, blocks, col_blocks,
        ROWS=rows, COLS=cols, ALONG=inner == 1, num_warps=4,
    )  # fmt: skip
    return dx


def launch_sum_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    return (dy.unsqueeze(-1).expand(x.shape),)


def launch_max_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    indices = reduce(x, x.dim() - 1, x.dim() - 1, "argmax")[1]
    return (spread(dy, indices, dy.numel(), x.shape[-1], 1).view(x.shape),)


def _why_torch(x: torch.Tensor) -> str:
    return why_no_kernel(x) or ("" if x.numel() else "nothing to do for a tensor without elements")


def _choose(x: torch.Tensor, dim: Dims, name: str) -> Choice:
    first, last = ends_of(x, dim)
    if reason := _why_torch(x):
        return Choice(provider="torch", kernel=f"torch.{name}", reason=reason)
    plane = plane_of(x, first, last)
    kernel = "_rows_kernel" if plane.is_rows else "_columns_kernel"
    return Choice(
        provider="sublight", kernel=kernel, reason=f"{plane.outer} x {plane.n} x {plane.inner}: each value read once"
    )


def reduce_sum(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """Sum over the last dimension, over `dim`, over neighbours (1, 2), or over everything (None), in a fixed order."""
    first, last = ends_of(x, dim)
    if _why_torch(x):
        return _torch_sum(x, first, last, keepdim)
    return _reduce_sum(x, first, last, keepdim)  # type: ignore[no-any-return]


def reduce_max(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """Maximum, as `reduce_sum` sums; NaN where there is one. The gradient goes to the first of equals."""
    first, last = ends_of(x, dim)
    if _why_torch(x):
        return _torch_max(x, first, last, keepdim)[0]
    if torch.is_grad_enabled() and x.requires_grad:
        return _reduce_max(x, first, last, keepdim)[0]  # type: ignore[no-any-return]
    return _reduce_max_alone(x, first, last, keepdim)  # type: ignore[no-any-return]


def reduce_argmax(x: torch.Tensor, dim: Dims = -1, keepdim: bool = False) -> torch.Tensor:
    """Where the maximum stands, the first of equals, or the first NaN; over neighbours, as if they were one."""
    first, last = ends_of(x, dim)
    if _why_torch(x):
        return _torch_argmax(x, first, last, keepdim)
    return _reduce_argmax(x, first, last, keepdim)  # type: ignore[no-any-return]


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.first, ctx.last, _ = inputs
    ctx.shape = x.shape


def _sum_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ones = (1,) * (ctx.last + 1 - ctx.first)
    wide = dy.reshape(*ctx.shape[: ctx.first], *ones, *ctx.shape[ctx.last + 1 :])
    return wide.expand(ctx.shape), None, None, None


def _setup_max(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, ctx.first, ctx.last, _ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _max_backward(ctx: Any, dy: torch.Tensor, _indices: Any) -> tuple[torch.Tensor | None, ...]:
    outer, n, inner = (
        math.prod(sizes)
        for sizes in (ctx.shape[: ctx.first], ctx.shape[ctx.first : ctx.last + 1], ctx.shape[ctx.last + 1 :])
    )
    dx = _reduce_max_backward(dy, ctx.saved_tensors[0], outer, n, inner)
    return dx.view(ctx.shape), None, None, None


def _torch_spread(dy: torch.Tensor, indices: torch.Tensor, outer: int, n: int, inner: int) -> torch.Tensor:
    dx = dy.new_zeros(outer, n, inner)
    return dx.scatter_(1, indices.view(outer, 1, inner), dy.reshape(outer, 1, inner))


def _fake(x: torch.Tensor, first: int, last: int, keepdim: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.new_empty(left_of(x, first, last, keepdim), dtype=dtype)


def _fake_max(x: torch.Tensor, first: int, last: int, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = _fake(x, first, last, keepdim)
    return values, x.new_empty(values.numel(), dtype=torch.int64)


_reduce_sum = LIBRARY.op(
    "reduce_sum(Tensor x, int first, int last, bool keepdim) -> Tensor",
    cpu=lambda *args: _torch_sum(*args).contiguous(),
    cuda=_sum,
    fake=_fake,
    backward=_sum_backward,
    setup_context=_setup_sum,
)
_reduce_max = LIBRARY.op(
    "reduce_max(Tensor x, int first, int last, bool keepdim) -> (Tensor, Tensor)",
    cpu=lambda *args: tuple(y.contiguous() for y in _torch_max(*args)),
    cuda=_max,
    fake=_fake_max,
    backward=_max_backward,
    setup_context=_setup_max,
)
_reduce_max_alone = LIBRARY.op(
    "reduce_max_alone(Tensor x, int first, int last, bool keepdim) -> Tensor",
    cpu=lambda *args: _torch_max(*args)[0].contiguous(),
    cuda=_max_alone,
    fake=_fake,
)
_reduce_max_backward = LIBRARY.op(
    "reduce_max_backward(Tensor dy, Tensor indices, SymInt outer, SymInt n, SymInt inner) -> Tensor",
    cpu=_torch_spread,
    cuda=spread,
    fake=lambda dy, indices, outer, n, inner: dy.new_empty(outer, n, inner),
)
_reduce_argmax = LIBRARY.op(
    "reduce_argmax(Tensor x, int first, int last, bool keepdim) -> Tensor",
    cpu=lambda *args: _torch_argmax(*args).contiguous(),
    cuda=_argmax,
    fake=lambda x, first, last, keepdim: _fake(x, first, last, keepdim, torch.int64),
)


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
    "library_args": lambda x: (x, x.dim() - 1, x.dim() - 1, False),
}
REDUCE_SUM = Op(
    name="reduce_sum",
    summary="sum over any axis, in a fixed order",
    reference=sum_reference,
    call=reduce_sum,
    launch=launch_sum,
    launch_backward=launch_sum_backward,
    choose=lambda x, dim=-1, keepdim=False: _choose(x, dim, "sum"),
    cost=sum_cost,
    kernels=KERNELS,
    **_SHARED,
)
REDUCE_MAX = Op(
    name="reduce_max",
    summary="maximum over any axis; its gradient goes to the first of equals",
    reference=max_reference,
    call=reduce_max,
    launch=launch_max,
    launch_backward=launch_max_backward,
    choose=lambda x, dim=-1, keepdim=False: _choose(x, dim, "max"),
    cost=max_cost,
    kernels=(*KERNELS, Kernel(jit=_spread_kernel)),
    **_SHARED,
)
REDUCE_ARGMAX = Op(
    name="reduce_argmax",
    summary="where the maximum over any axis stands, the first of equals",
    reference=argmax_reference,
    call=reduce_argmax,
    launch=launch_argmax,
    launch_backward=None,
    choose=lambda x, dim=-1, keepdim=False: _choose(x, dim, "argmax"),
    cost=argmax_cost,
    kernels=KERNELS,
    wrt=(),
    **_SHARED,
)
