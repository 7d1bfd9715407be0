"""Vector addition: the smallest op, and the pattern for the others; read x and y, write their sum.

PyTorch's own kernel is at the limit, so a user's call goes there: an op is dispatched to us only where it wins.
"""

from __future__ import annotations

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import add as cost
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.pointwise import Through, check_alike, like
from sublight.ops.kernels.rows import copies_of, generator_for, rows_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

THREAD_BYTES = 16  # one load of each input a thread: more in flight only crowds the memory's queues
WARPS = 4


def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@triton.jit
def _add_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # n may pass 2**31
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask)
    y = tl.load(y_ptr + place, mask=mask)
    tl.store(z_ptr + place, x + y, mask=mask)


@triton.jit
def _add_rows_kernel(x_ptr, y_ptr, z_ptr, cols, x_stride, y_stride, BLOCK: tl.constexpr):
    """For rows that do not follow one another in memory."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols)
    y = tl.load(y_ptr + row * y_stride + col, mask=col < cols)
    tl.store(z_ptr + row * cols + col, x + y, mask=col < cols)


def plan_kernels(x: torch.Tensor, y: torch.Tensor) -> Plan:
    """The launch that adds x and y: as one long row where both lie in one piece, else row by row."""
    check_alike(x=x, y=y)
    block = WARPS * 32 * THREAD_BYTES // x.element_size()
    one, other = rows_of(x), rows_of(y)
    if x.is_contiguous() and y.is_contiguous():
        reason, n = "in one piece: one long row", x.numel()
        step = Step(_add_kernel, (cdiv(n, block),), n, on="x y z", BLOCK=block, num_warps=WARPS)
    else:
        reason, grid = "rows apart in memory", (one.rows, cdiv(one.cols, block))
        strides = (one.apart, other.apart)
        step = Step(_add_rows_kernel, grid, one.cols, *strides, on="x y z", BLOCK=block, num_warps=WARPS)
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(x=one.is_copy, y=other.is_copy),
        buffers={"z": Buffer(shape=tuple(x.shape), dtype=x.dtype)},
        steps=(step,),
        outputs=("z",),
    )


_add = Registered(
    schema="add(Tensor x, Tensor y) -> Tensor z",
    reference=reference,
    theirs="torch.add",
    why_torch=lambda x, y: "PyTorch's add is at the limit itself: ours took 0.97 to 1.13 of its time on an H200",
    plan=plan_kernels,
    fake=lambda x, y: like(x),
    gradient=Gradient(  # of both it is dz itself
        by=Through(lambda dz: dz), saves=(), gives=(("x", "y"),), by_torch=lambda saved, grads: grads
    ),
)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, by PyTorch: there is nothing to win. `torch.ops.sublight.add` is ours, and `ADD.launch` its kernel."""
    return reference(x, y)


def plan(x: torch.Tensor, y: torch.Tensor) -> Plan:
    """What `add(x, y)` runs, and why."""
    return _add.decide(x, y)


def launch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Our kernel, whether or not it wins."""
    return _add.by_kernels(x, y)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator = generator_for(device, seed)
    size, kind = shape["numel"], getattr(torch, dtype)
    x, y = (torch.randn(size, generator=generator, device=device, dtype=kind) for _ in range(2))
    return x, y


ADD = Op(
    name="add",
    summary="x + y, element by element",
    reference=reference,
    call=add,
    plan=plan,
    providers={"sublight": Provider(launch=launch, kernels=(Kernel(jit=_add_kernel), Kernel(jit=_add_rows_kernel)))},
    inputs=inputs,
    cost=cost,
    shapes=tuple({"numel": n} for n in (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)),
    test_shapes=tuple({"numel": n} for n in (1, 511, 512, 513, 1023, 1025, 100_003)),
    batch="numel",
)
