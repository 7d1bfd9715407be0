"""Transposing a matrix: reads or writes are strided; through shared memory neither is, if the banks are not."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.extensions.ladder import Ladder, Rung, Runner, ceil_div

if TYPE_CHECKING:
    import torch

MOST_TILES = 65535  # of a grid's second dimension


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _tiles(
    runner: Runner, x: torch.Tensor, *, kernel: str, side: int = 32, threads: tuple[int, ...] = (32, 8)
) -> torch.Tensor:
    rows, cols = x.shape
    y = x.new_empty(cols, rows)
    runner.launch(kernel, (ceil_div(cols, side), ceil_div(rows, side)), threads, x, y, rows, cols)
    return y


def _too_tall(x: torch.Tensor) -> str:
    return f"takes at most {32 * MOST_TILES} rows" if x.shape[0] > 32 * MOST_TILES else ""


def _not_fours(x: torch.Tensor) -> str:
    return "takes rows and columns that 4 divides" if x.shape[0] % 4 or x.shape[1] % 4 else _too_tall(x)


def _inputs(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(shape["rows"], shape["cols"], device=device, generator=generator).to(getattr(torch, dtype)),)


def _cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("transpose")(shape, dtype, "fwd")


def _rung(name: str, change: str) -> Rung:
    kernel = f"transpose_{name}"
    return Rung(
        name=name,
        kernels=(kernel,),
        launch=functools.partial(_tiles, kernel=kernel),
        change=change,
        why_not=_too_tall,
    )


TRANSPOSE = Ladder(
    name="transpose",
    source="transpose.cu",
    summary="the transpose of a matrix",
    reference=reference,
    inputs=_inputs,
    cost=_cost,
    shapes={"float32": ({"rows": 8192, "cols": 8192}, {"rows": 16384, "cols": 4096})},
    test_shapes=(
        {"rows": 1, "cols": 1},
        {"rows": 31, "cols": 33},
        {"rows": 64, "cols": 96},
        {"rows": 68, "cols": 132},
    ),
    rungs=(
        _rung(
            "naive",
            "Neighbouring threads read neighbouring elements of a row and write them a whole column apart: each 4 "
            "bytes written touch a sector of 32 bytes of their own. The L2 gathers some of these before they leave for "
            "memory.",
        ),
        _rung(
            "conflicts",
            "A tile of 32 x 32 goes through shared memory: it is written by rows and read by columns there, so that "
            "both sides of global memory are read and written by rows. But a column of 32 words, 32 words apart, lies "
            "in one of the 32 banks: a warp's read takes 32 turns.",
        ),
        _rung(
            "padded",
            "Rows of the tile are 33 words apart instead of 32: the elements of a column lie in 32 different banks, "
            "and a read takes one turn. It costs 128 bytes of shared memory, and rows that no longer begin at 16 "
            "bytes.",
        ),
        _rung(
            "swizzled",
            "Column c of row r lies at c ^ r: again 32 banks for every row and every column, without the padding. An "
            "exclusive or costs an instruction; alignment and the size of the tile stay powers of two, which the "
            "asynchronous copies and tensor cores of later GPUs need.",
        ),
        Rung(
            name="vectorised",
            kernels=("transpose_vectorised",),
            launch=functools.partial(_tiles, kernel="transpose_vectorised", side=64, threads=(256,)),
            change="16 bytes an access on both sides of global memory and a tile of 64 x 64: a quarter of the load and "
            "store instructions, four in flight a thread. Chunks of four columns are swizzled as a whole, so that they "
            "are written at once; a column's four rows are read in two turns of the banks.",
            why_not=_not_fours,
        ),
        Rung(
            name="streamed",
            kernels=("transpose_streamed",),
            launch=functools.partial(_tiles, kernel="transpose_streamed", side=64, threads=(256,)),
            change="The same with __stcs: the result is not read again here, so its lines are the first to leave the "
            "L2, in longer runs, instead of pushing out one another piece by piece. Taking blocks in squares, tiles of "
            "64 x 128 and the same hint for loads gained nothing beside it.",
            why_not=_not_fours,
        ),
    ),
)
