"""Softmax and layer norm: a row by one block that reads it thrice, or once; a long row by several blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.extensions.ladder import Ladder, Rung, Runner, ceil_div

if TYPE_CHECKING:
    import torch

PACKS = (1, 2, 4, 8)  # how many packs of 16 bytes a thread holds: there is a kernel for each
MOST_THREADS = 1024
MOST_COLS = 4 * max(PACKS) * MOST_THREADS
MOST_PARTS = 128  # the most parts of a row: every block reads the results of all of them
EPS = 1e-5
COOPERATIVE_THREADS = 512


def _threads(work: int) -> int:
    """Whole warps, as many as there is work for, 1024 at most.

    >>> _threads(1), _threads(100), _threads(9999)
    (32, 128, 1024)
    """
    return min(MOST_THREADS, 32 * ceil_div(work, 32))


def held(cols: int) -> tuple[int, int]:
    """How many packs a thread holds, and how many threads hold the row: few packs where 512 threads suffice.

    >>> held(64), held(4096), held(16384), held(32768)
    ((1, 32), (2, 512), (8, 512), (8, 1024))
    """
    packs = ceil_div(cols, 4)
    each = next((count for count in PACKS if count * 512 >= packs), max(PACKS))
    return each, _threads(ceil_div(packs, each))


def _parts(runner: Runner, kernel: str, rows: int, cols: int) -> tuple[int, int]:
    """Into how many parts a row is cut, and how many blocks there are: a multiple of that, all resident."""
    resident = runner.resident(kernel, COOPERATIVE_THREADS)
    parts = max(1, min(resident // rows, MOST_PARTS, ceil_div(cols, 4 * COOPERATIVE_THREADS)))
    return parts, min(resident // parts, rows) * parts


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.softmax(x, -1)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def _softmax(kernel: str) -> Rung:
    def launch(runner: Runner, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape)
        rows, cols = x.shape
        runner.launch(f"softmax_{kernel}", (rows,), (_threads(cols),), x, y, cols)
        return y

    return Rung(name=kernel, kernels=(f"softmax_{kernel}",), launch=launch, change=CHANGES[kernel])


def _softmax_registers(runner: Runner, x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    rows, cols = x.shape
    packs, threads = held(cols)
    runner.launch(f"softmax_registers_{packs}", (rows,), (threads,), x, y, cols)
    return y


def _softmax_cooperative(runner: Runner, x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    rows, cols = x.shape
    parts, blocks = _parts(runner, "softmax_cooperative", rows, cols)
    partials = x.new_empty(rows * parts, 2)
    runner.launch(
        *("softmax_cooperative", (blocks,), (COOPERATIVE_THREADS,)),
        *(x, y, partials, rows, cols, parts),
        cooperative=True,
    )
    return y


def _norm_three_reads(runner: Runner, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    rows, cols = x.shape
    runner.launch("layer_norm_three_reads", (rows,), (_threads(cols),), x, weight, bias, y, cols, EPS)
    return y


def _norm_registers(runner: Runner, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    rows, cols = x.shape
    packs, threads = held(cols)
    runner.launch(f"layer_norm_registers_{packs}", (rows,), (threads,), x, weight, bias, y, cols, EPS)
    return y


def _norm_cooperative(runner: Runner, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    rows, cols = x.shape
    parts, blocks = _parts(runner, "layer_norm_cooperative", rows, cols)
    partials = x.new_empty(rows * parts, 3)
    runner.launch(
        *("layer_norm_cooperative", (blocks,), (COOPERATIVE_THREADS,)),
        *(x, weight, bias, y, partials, rows, cols, parts, EPS),
        cooperative=True,
    )
    return y


def _not_fours(x: torch.Tensor, *parameters: torch.Tensor) -> str:
    return "takes rows whose length 4 divides" if x.shape[-1] % 4 else ""


def _not_held(x: torch.Tensor, *parameters: torch.Tensor) -> str:
    if x.shape[-1] > MOST_COLS:
        return f"holds rows of {MOST_COLS} at most: use cooperative"
    return _not_fours(x)


def _inputs(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return (2 * torch.randn(shape["rows"], shape["cols"], device=device, generator=generator),)


def _norm_inputs(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor, ...]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    x, weight, bias = (
        torch.randn(*sizes, device=device, generator=generator)
        for sizes in ((shape["rows"], shape["cols"]), (shape["cols"],), (shape["cols"],))
    )
    return 2 * x + 1, weight, bias


def _softmax_cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("softmax")(shape, dtype, "fwd")


def _norm_cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("layer_norm")(shape, dtype, "fwd")


CHANGES = {
    "three_reads": "One block takes a row: a pass for the maximum, one for the sum of exponentials, one that writes. "
    "Each pass reads the row again; a row of some KB comes back from the L1 or L2, at a price in instructions.",
    "online": "Maximum and sum in one pass: when a larger maximum comes, the sum so far is scaled by the exponential "
    "of the difference. The row is read twice instead of three times, for one more exponential an element.",
}
SHAPES = ({"rows": 16384, "cols": 4096}, {"rows": 8192, "cols": 16384}, {"rows": 16, "cols": 2**22})
TEST_SHAPES = (
    {"rows": 3, "cols": 1},
    {"rows": 2, "cols": 36},
    {"rows": 3, "cols": 1030},
    {"rows": 2, "cols": 2052},
    {"rows": 7, "cols": 4100},
    {"rows": 1, "cols": 9000},
)

SOFTMAX = Ladder(
    name="softmax",
    source="softmax.cu",
    summary="softmax of each row",
    reference=softmax_reference,
    inputs=_inputs,
    cost=_softmax_cost,
    shapes={"float32": SHAPES},
    test_shapes=TEST_SHAPES,
    rungs=(
        _softmax("three_reads"),
        _softmax("online"),
        Rung(
            name="registers",
            kernels=tuple(f"softmax_registers_{packs}" for packs in PACKS),
            launch=_softmax_registers,
            change="The block's registers hold the whole row, up to 32 numbers a thread: it is read once, by accesses "
            "of 16 bytes that are all in flight at the same time, and each exponential is computed once. The number "
            "held is a constant of the kernel, since registers cannot be indexed: one kernel for each of 1, 2, 4 and 8 "
            "packs.",
            why_not=_not_held,
        ),
        Rung(
            name="cooperative",
            kernels=("softmax_cooperative",),
            launch=_softmax_cooperative,
            change="For few, long rows: one block a row would leave most of the GPU idle. Several blocks share a row, "
            "leave their parts' maximum and sum, wait for one another at a barrier of the grid, and write. The row is "
            "read twice; between the two readings it may have left the L2.",
            why_not=_not_fours,
        ),
    ),
)

LAYER_NORM = Ladder(
    name="layer_norm",
    source="layer_norm.cu",
    summary="layer norm of each row, with weight and bias",
    reference=layer_norm_reference,
    inputs=_norm_inputs,
    cost=_norm_cost,
    shapes={"float32": SHAPES},
    test_shapes=TEST_SHAPES,
    rungs=(
        Rung(
            name="three_reads",
            kernels=("layer_norm_three_reads",),
            launch=_norm_three_reads,
            change="One block takes a row: a pass for the mean, one for the squared distances from it, one that "
            "writes.",
        ),
        Rung(
            name="registers",
            kernels=tuple(f"layer_norm_registers_{packs}" for packs in PACKS),
            launch=_norm_registers,
            change="The row is read once, into registers, by accesses of 16 bytes; mean and variance are still two "
            "sums over it, since mean(x²) - mean² in one would cancel where the mean is large against the spread.",
            why_not=_not_held,
        ),
        Rung(
            name="cooperative",
            kernels=("layer_norm_cooperative",),
            launch=_norm_cooperative,
            change="Several blocks share a long row. Each leaves its part's count, mean and squared distances from its "
            "own mean; past the barrier of the grid parts are merged by Chan's formula, which needs no second barrier "
            "for the variance.",
            why_not=_not_fours,
        ),
    ),
)
