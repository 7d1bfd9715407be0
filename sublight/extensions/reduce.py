"""The sum of all elements: from one atomic an element to one pass at the speed of memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sublight.correct import Call
from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.extensions.ladder import Ladder, Rung, Runner, ceil_div

if TYPE_CHECKING:
    import torch

THREADS = 256  # as in reduce.cu
WIDE = 512
BLOCKS = 4  # blocks of 512 threads that fill a multiprocessor
C_TYPES = {"float32": "float", "float64": "double"}


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.sum().view(1)


def exact(x: torch.Tensor) -> torch.Tensor:
    """The sum without any rounding, rounded once."""
    import math

    return x.new_tensor([math.fsum(x.tolist())])


def one_by_one(x: torch.Tensor, *, group: int = 1) -> torch.Tensor:
    """PyTorch's own sum of each group, and its own sum of these into one address, one after the other."""
    import torch

    x = torch.nn.functional.pad(x, (0, -x.numel() % group)).view(-1, group).sum(1)
    return torch.zeros(1, dtype=x.dtype, device=x.device).index_add_(0, x.new_zeros(x.numel(), dtype=torch.int64), x)


def by_blocks(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own sum of each block's share, and of these one after the other, as the blocks' atomics come."""
    return one_by_one(x, group=ceil_div(x.numel(), BLOCKS * REDUCE.runner(x).multiprocessors))


def _kernel(step: str, x: torch.Tensor) -> str:
    return f"reduce_{step}_{C_TYPES[str(x.dtype).removeprefix('torch.')]}"


def _an_element_a_thread(runner: Runner, x: torch.Tensor, *, step: str) -> torch.Tensor:
    out = x.new_zeros(1)
    runner.launch(_kernel(step, x), (ceil_div(x.numel(), THREADS),), (THREADS,), x, out, x.numel())
    return out


def _vectorised(runner: Runner, x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(1)
    runner.launch(_kernel("vectorised", x), (BLOCKS * runner.multiprocessors,), (WIDE,), x, out, x.numel())
    return out


def _cooperative(runner: Runner, x: torch.Tensor) -> torch.Tensor:
    kernel = _kernel("cooperative", x)
    blocks = runner.resident(kernel, WIDE)
    out, partial = x.new_empty(1), x.new_empty(blocks)
    runner.launch(kernel, (blocks,), (WIDE,), x, out, partial, x.numel(), cooperative=True)
    return out


def _inputs(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(shape["numel"], dtype=getattr(torch, dtype), device=device, generator=generator),)


def _cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("reduce_sum")({"outer": 1, "n": shape["numel"], "inner": 1}, dtype, "fwd")


def _rung(step: str, change: str, *, launch: Call | None = None, group: int = 0, yardstick: Call | None = None) -> Rung:
    """`group`: its elements are added first, and such sums one after the other."""
    return Rung(
        name=step,
        kernels=tuple(f"reduce_{step}_{kind}" for kind in C_TYPES.values()),
        launch=launch or functools.partial(_an_element_a_thread, step=step),
        change=change,
        dtypes=tuple(C_TYPES),
        yardstick=functools.partial(one_by_one, group=group) if group else yardstick,
    )


REDUCE = Ladder(
    name="reduce",
    source="reduce.cu",
    summary="the sum of all elements",
    reference=reference,
    inputs=_inputs,
    cost=_cost,
    shapes={"float32": ({"numel": 2**28},), "float64": ({"numel": 2**27},)},
    test_shapes=tuple({"numel": numel} for numel in (1, 257, 26003)),
    truth=exact,
    draws=8,
    rungs=(
        _rung(
            "atomics",
            "Each thread adds its element to one address in global memory. The hardware makes these additions one "
            "after the other in the L2, so that the time is the number of elements, not of bytes: fp64 takes as long "
            "as fp32. The sum also rounds after every element; PyTorch's index_add_ into one address, which does the "
            "same, is its yardstick (and, of groups' sums, that of the next four).",
            group=1,
        ),
        _rung(
            "shared",
            "A block of 256 threads first adds up its elements in shared memory, halving the number of adders each "
            "round, and makes one atomic addition: 256 times fewer. Eight rounds cost a barrier and two accesses to "
            "shared memory each, which in fp64 are twice as many bytes.",
            group=THREADS,
        ),
        _rung(
            "shuffle",
            "Lanes of a warp read one another's registers: five shuffles make a warp's sum, with no shared memory and "
            "no barrier. But each warp makes its own atomic addition: 8 times as many as before.",
            group=32,
        ),
        _rung(
            "two_level",
            "Both: shuffles within each warp, 32 words of shared memory across warps, shuffles again. Two barriers "
            "instead of eight rounds, one atomic addition a block. What is left is that a thread lives for one "
            "element.",
            group=THREADS,
        ),
        _rung(
            "vectorised",
            "The grid is as large as the GPU holds, and threads walk over the input: 16 bytes an access, four accesses "
            "in flight before the first is used. Memory takes hundreds of cycles to answer; bytes in flight are what "
            "fills it. Atomic additions: one for each of a few hundred blocks.",
            launch=_vectorised,
            yardstick=by_blocks,
        ),
        _rung(
            "cooperative",
            "A cooperative launch promises that all blocks run at the same time, so they may wait for one another: "
            "each leaves its sum, all meet at a barrier of the grid, the first block adds up the sums. No atomic "
            "addition, so the same bits every time, and nothing to clear before the launch.",
            launch=_cooperative,
        ),
    ),
)
