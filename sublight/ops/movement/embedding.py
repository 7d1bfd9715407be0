"""Rows of a table by number: a copy by vectors of 16 bytes, whichever row they lie in.

The table's gradient, which is the same bits every time, is in `embedding_gradient.py`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.movement import embedding as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import copies_of, generator_for, rows_of, why_no_kernel
from sublight.ops.movement import embedding_gradient
from sublight.ops.movement.embedding_gradient import NO_PADDING, embedding_backward, launch_backward, trial
from sublight.ops.record.library import Registered
from sublight.ops.record.sized_gradient import SizedGradient
from sublight.ops.record.tuning import Tile

BLOCK = 256  # vectors of a program
STREAMED_BYTES = 2**26  # a result larger than this leaves the cache to the table's rows
ID_DTYPES = (torch.int64, torch.int32)


def reference(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    return F.embedding(ids, weight, padding_idx)


@triton.jit
def _gather_kernel(
    ids_ptr, w_ptr, y_ptr, rows, vocab, vectors, w_stride,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, ONE_ROW: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """BLOCK vectors of the output, which has `vectors` in a row and w_stride from row to row of the table.

    Output elements may pass 2**31 and so take 64 bits, but those are multiplied only: dividing them would take longer
    than the copy. Where BLOCK divides a row, a program needs one id.
    """
    program = tl.program_id(0)
    if ONE_ROW:
        parts = vectors // BLOCK
        row = program // parts
        vector = program % parts * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside = vector < vectors  # all of them
        token = tl.load(ids_ptr + row).to(tl.int64) + tl.zeros([BLOCK, 1], tl.int64)
    else:  # `vectors` programs have BLOCK rows between them
        vector = program % vectors * BLOCK + tl.arange(0, BLOCK)[:, None]
        row = program // vectors * BLOCK + vector // vectors
        vector = vector % vectors
        inside = row < rows
        token = tl.load(ids_ptr + row, mask=inside, other=0).to(tl.int64)
    known = inside & (token >= 0) & (token < vocab)
    lane = tl.arange(0, VECTOR)[None, :]
    # never read out of bounds: a token that the table has not gets a row of NaN
    x = tl.load(w_ptr + token * w_stride * VECTOR + (vector * VECTOR + lane), mask=known, other=float("nan"))
    y_ptr += program.to(tl.int64) * (BLOCK * VECTOR)
    tl.store(
        y_ptr + tl.arange(0, BLOCK)[:, None] * VECTOR + lane, x, mask=inside, cache_modifier=".cs" if STREAM else ""
    )


def plan_gather(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> Plan:
    """How the output's vectors are shared out; padding matters to the gradient alone."""
    table, rows = rows_of(weight), ids.numel()
    vector = vector_of(weight)
    vectors = table.cols // vector
    tile = trial("embedding") or tile_of(vectors)
    step = Step(
        _gather_kernel, (cdiv(rows * vectors, tile.block),), rows, table.rows, vectors, table.apart // vector,
        on="ids weight y", tile=tile, BLOCK=tile.block, VECTOR=vector, ONE_ROW=vectors % tile.block == 0,
        STREAM=rows * table.cols * table.itemsize > STREAMED_BYTES, **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="a copy by vectors; a gradient that repeats",
        copies=copies_of(ids=not ids.is_contiguous(), weight=table.is_copy),
        buffers={"y": Buffer(shape=(*ids.shape, table.cols), dtype=weight.dtype)},
        steps=(step,) if rows * table.cols else (),
        outputs=("y",),
    )


def tile_of(vectors: int) -> Tile:
    """Two vectors a thread, and if that leaves two warps a program, all of one row."""
    block = BLOCK // 2 if vectors % BLOCK and vectors % (BLOCK // 2) == 0 else BLOCK
    return Tile(block=block, warps=block // 64)


def vector_of(weight: torch.Tensor) -> int:
    """Elements that one load takes: 16 bytes, or what divides the rows, their distance and where they begin."""
    table = rows_of(weight)
    begin = 0 if table.is_copy else weight.data_ptr() // table.itemsize
    return math.gcd(16 // table.itemsize, table.cols, table.apart, begin)


def _why_torch(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> str:
    if reason := why_no_kernel(weight):
        return reason
    if ids.dtype not in ID_DTYPES or ids.device != weight.device or weight.dim() != 2:
        return "ids must be int32 or int64 on the weight's GPU, the weight a matrix: PyTorch says what is wrong"
    if weight.numel() == 0 or ids.numel() == 0:
        return "nothing to look up"
    if ids.numel() >= 2**31 or weight.shape[0] >= 2**31 - 1:
        return "more than 2**31 ids or rows"
    return ""


_embedding = Registered(
    schema="embedding(Tensor ids, Tensor weight, SymInt padding_idx) -> Tensor y",
    plan=plan_gather,
    fake=lambda ids, weight, padding_idx: weight.new_empty((*ids.shape, weight.shape[1])),
    reference=lambda ids, weight, padding_idx: F.embedding(
        ids, weight, None if padding_idx == NO_PADDING else padding_idx
    ),
    theirs="torch.nn.functional.embedding",
    why_torch=_why_torch,
    gradient=SizedGradient(
        by=embedding_backward,
        saves=("ids",),
        gives=("weight",),
        options=("vocab", "padding_idx"),
        sizes=lambda ids, weight, padding_idx: {"vocab": weight.shape[0]},
        by_torch=embedding_gradient.by_torch,
    ),
)


def padding_of(weight: torch.Tensor, padding_idx: int | None) -> int:
    """A row's number that is not negative; `NO_PADDING` for None."""
    if padding_idx is None:
        return NO_PADDING
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise BadInput(f"padding_idx {padding_idx} is no row of a table of {weight.shape[0]}: use one that is, or None")
    return padding_idx % weight.shape[0]


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """weight[ids], with a gradient that is the same bits every time; the row `padding_idx` gets none.

    On a GPU an id that the table has not gives a row of NaN and no gradient (PyTorch stops the process's CUDA context);
    elsewhere PyTorch raises its own error.
    """
    return _embedding.call(ids, weight, padding_of(weight, padding_idx))  # type: ignore[no-any-return]


def plan(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> Plan:
    """What `embedding(ids, weight, padding_idx)` runs, and why."""
    return _embedding.decide(ids, weight, padding_of(weight, padding_idx))


def launch(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Our forward kernel, whether or not it wins."""
    return _embedding.by_kernels(ids, weight, NO_PADDING)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Ids as frequent as words are: the n-th about 1/n times as often as the first."""
    generator = generator_for(device, seed)
    vocab, kind = shape["vocab"], getattr(torch, dtype)
    drawn = torch.rand(shape["rows"], generator=generator, device=device, dtype=torch.float64)
    ids = ((vocab + 1.0) ** drawn - 1).long().clamp_(0, vocab - 1)
    return ids, torch.randn(vocab, shape["cols"], generator=generator, device=device, dtype=kind)


def _shapes(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple({"rows": rows, "cols": cols, "vocab": vocab} for rows, cols, vocab in sizes)


EMBEDDING = Op(
    name="embedding",
    summary="rows of a table by number, with a gradient that repeats bit for bit",
    reference=reference,
    call=embedding,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=launch,
            backward=lambda dy, ids, weight: (launch_backward(dy, ids, weight.shape[0]),),
            kernels=(Kernel(jit=_gather_kernel), *embedding_gradient.KERNELS),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        *((65536, 4096, 32000), (32768, 4096, 128256), (65536, 768, 50257), (65536, 1600, 50257)),
        *((65536, 2560, 51200), (32768, 5120, 151936), (16384, 8192, 128256)),
        *((1, 4096, 128256), (16, 4096, 128256), (128, 4096, 128256)),
    ),
    test_shapes=_shapes((1, 1, 1), (3, 127, 5), (65, 128, 40), (257, 24, 3), (300, 129, 7), (200, 33, 700)),
    batch="",  # rows of ids do not depend on one another, but the table has rows, too
    library_args=lambda ids, weight: (ids, weight, NO_PADDING),
)
