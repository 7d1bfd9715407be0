"""Vector addition: the smallest op, and the pattern for the others; read x and y, write their sum.

PyTorch's own kernel is at the limit, so a user's call goes there: an op is dispatched to us only where it wins.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import add as cost
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.rows import as_rows, generator_for
from sublight.ops.record.library import LIBRARY

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


def launch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Our kernel, whatever `choose` would say."""
    block = WARPS * 32 * THREAD_BYTES // x.element_size()
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.is_contiguous() and y.is_contiguous():
        n = x.numel()
        _add_kernel[(cdiv(n, block),)](x, y, z, n, BLOCK=block, num_warps=WARPS)
    else:
        x2, y2 = as_rows(x), as_rows(y)
        rows, cols = x2.shape
        _add_rows_kernel[(rows, cdiv(cols, block))](
            x2, y2, z, cols, x2.stride(0), y2.stride(0), BLOCK=block, num_warps=WARPS
        )
    return z


def choose(x: torch.Tensor, y: torch.Tensor) -> Choice:
    """What `add(x, y)` runs, and why."""
    reason = "PyTorch's add is at the limit itself: ours took 0.97 to 1.13 of its time on an H200"
    return Choice(provider="torch", kernel="torch.add", reason=reason)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, by PyTorch: there is nothing to win. `torch.ops.sublight.add` is ours, and `ADD.launch` its kernel."""
    return reference(x, y)


def _backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dz, dz


LIBRARY.op(
    "add(Tensor x, Tensor y) -> Tensor",
    cpu=lambda x, y: reference(x, y).contiguous(),
    cuda=launch,
    fake=lambda x, y: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=_backward,
)


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
    launch=launch,
    launch_backward=None,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=(Kernel(jit=_add_kernel), Kernel(jit=_add_rows_kernel)),
    shapes=tuple({"numel": n} for n in (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)),
    test_shapes=tuple({"numel": n} for n in (1, 511, 512, 513, 1023, 1025, 100_003)),
)
