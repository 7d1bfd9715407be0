"""Running sums, and keeping what a mask marks: what stands before an element decides where or what it is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.extensions.ladder import Ladder, Rung, Runner, ceil_div

if TYPE_CHECKING:
    import torch

THREADS = 256  # as in scan.cu and compact.cu
ITEMS = 16  # elements of a thread


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0, dtype=x.dtype)


def _in_tiles(runner: Runner, x: torch.Tensor, *, kernel: str, tile: int) -> torch.Tensor:
    """Scan tiles, scan their sums the same way, add to each tile what stands before it."""
    y = x.new_empty(x.shape)
    tiles = ceil_div(x.numel(), tile)
    sums = x.new_zeros(4 * ceil_div(tiles, 4))  # a multiple of 4 floats, for accesses of 16 bytes
    runner.launch(kernel, (tiles,), (THREADS,), x, y, sums, x.numel())
    if tiles > 1:
        scanned = _in_tiles(runner, sums, kernel=kernel, tile=tile)
        blocks = min(ceil_div(x.numel(), THREADS), 8 * runner.multiprocessors)
        runner.launch("scan_add", (blocks,), (THREADS,), y, scanned, tile, x.numel())
    return y


def _lookback(runner: Runner, x: torch.Tensor) -> torch.Tensor:
    import torch

    y = x.new_empty(x.shape)
    tiles = ceil_div(x.numel(), THREADS * ITEMS)
    words = x.new_zeros(tiles + 1, dtype=torch.int64)
    runner.launch("scan_lookback", (tiles,), (THREADS,), x, y, words, words[tiles:], x.numel())
    return y


def _not_fours(x: torch.Tensor) -> str:
    return "takes a length that 4 divides" if x.numel() % 4 else ""


def _inputs(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randint(-100, 100, (shape["numel"],), dtype=torch.int32, device=device, generator=generator),)


def _cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("cumsum")({"rows": 1, "cols": shape["numel"]}, dtype, "fwd")


SCAN = Ladder(
    name="scan",
    source="scan.cu",
    summary="running sums of whole numbers",
    reference=reference,
    inputs=_inputs,
    cost=_cost,
    shapes={"int32": ({"numel": 2**27},)},
    test_shapes=tuple({"numel": numel} for numel in (1, 255, 260, 4096, 4100, 66000)),
    rungs=(
        Rung(
            name="hillis_steele",
            kernels=("scan_hillis_steele", "scan_add"),
            launch=functools.partial(_in_tiles, kernel="scan_hillis_steele", tile=THREADS),
            dtypes=("int32",),
            change="Each tile of 256 is scanned in shared memory in eight rounds; a second launch scans the tiles' "
            "sums, a third adds to each tile what stands before it. The input is read once, the output written, read "
            "and written again: 4 n words instead of 2 n.",
        ),
        Rung(
            name="shuffle",
            kernels=("scan_shuffle", "scan_add"),
            launch=functools.partial(_in_tiles, kernel="scan_shuffle", tile=THREADS * ITEMS),
            dtypes=("int32",),
            change="16 neighbours a thread, read as four accesses of 16 bytes and scanned in registers; warps scan "
            "their threads' sums by shuffles. Tiles are 16 times larger and the barriers two instead of eight, but "
            "there are still three launches.",
            why_not=_not_fours,
        ),
        Rung(
            name="lookback",
            kernels=("scan_lookback",),
            launch=_lookback,
            dtypes=("int32",),
            change="One launch: a tile shows its sum as soon as it has it, then looks back over the tiles before it, "
            "32 at a time, until it meets one that knows the sum of all up to itself. Only 2 n words move. Tiles are "
            "numbered as their blocks begin, so that none waits for a block that has not; flag and sum are one word, "
            "so that none sees one without the other.",
            why_not=_not_fours,
        ),
    ),
)


def compact_reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.masked_select(x, mask)


def _an_element_a_thread(
    runner: Runner, x: torch.Tensor, mask: torch.Tensor, *, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    y, count = x.new_empty(x.shape), x.new_zeros(1, dtype=torch.int64)
    runner.launch(kernel, (ceil_div(x.numel(), THREADS),), (THREADS,), x, mask, y, count, x.numel())
    return y, count


def _compact_lookback(runner: Runner, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    y, count = x.new_empty(x.shape), x.new_empty(1, dtype=torch.int64)
    tiles = ceil_div(x.numel(), THREADS * ITEMS)
    words = x.new_zeros(tiles + 1, dtype=torch.int64)
    runner.launch("compact_lookback", (tiles,), (THREADS,), x, mask, y, count, words, words[tiles:], x.numel())
    return y, count


def _not_a_mask(x: torch.Tensor, mask: torch.Tensor) -> str:
    import torch

    return "takes a mask of booleans, as long as x" if mask.dtype != torch.bool or mask.shape != x.shape else ""


def _not_sixteens(x: torch.Tensor, mask: torch.Tensor) -> str:
    if x.numel() >= 2**32:
        return "counts up to 2**32 elements"
    return "takes a length that 16 divides" if x.numel() % 16 else _not_a_mask(x, mask)


def _masked(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor, ...]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(shape["numel"], device=device, generator=generator)
    return x, torch.rand(shape["numel"], device=device, generator=generator) < 0.5


def _compact_cost(shape: Shape, dtype: str) -> Cost:
    """Half of the elements are kept: read x and the mask, write half of x and the count."""
    numel = shape["numel"]
    return Cost(read_bytes=4 * numel + numel, write_bytes=4 * (numel // 2) + 8)


def kept_in_order(outputs: tuple[torch.Tensor, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """What was kept, in ascending order: the steps that lose the input's order are judged without it."""
    return kept(outputs).sort().values


def kept(outputs: tuple[torch.Tensor, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    return outputs[0][: int(outputs[1])] if isinstance(outputs, tuple) else outputs


COMPACT = Ladder(
    name="compact",
    source="compact.cu",
    summary="the elements whose mask is true, and how many they are",
    reference=compact_reference,
    inputs=_masked,
    cost=_compact_cost,
    shapes={"float32": ({"numel": 2**27},)},
    test_shapes=tuple({"numel": numel} for numel in (1, 255, 256, 4112, 139264)),
    rungs=(
        Rung(
            name="atomics",
            kernels=("compact_atomics",),
            launch=functools.partial(_an_element_a_thread, kernel="compact_atomics"),
            judged=kept_in_order,
            change="Each kept element takes its place from one counter. The additions follow one another in the L2, "
            "though compilers turn a warp's into one; the input's order is lost.",
            why_not=_not_a_mask,
        ),
        Rung(
            name="ballot",
            kernels=("compact_ballot",),
            launch=functools.partial(_an_element_a_thread, kernel="compact_ballot"),
            judged=kept_in_order,
            change="A ballot shows every lane which lanes keep theirs: one atomic addition a warp, and the bits below "
            "a lane's own count its place. Order is kept within a warp only.",
            why_not=_not_a_mask,
        ),
        Rung(
            name="lookback",
            kernels=("compact_lookback",),
            launch=_compact_lookback,
            judged=kept,
            change="The scan's look-back over the number kept gives each element its place in the input's order, with "
            "no atomic addition to wait for. A tile gathers its kept elements in shared memory first and writes them "
            "side by side.",
            why_not=_not_sixteens,
        ),
    ),
)
