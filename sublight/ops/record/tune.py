"""Find the fastest tile of every kernel that has a choice, and write the table that launches go by.

`sublight bench --tune` on an idle GPU; minutes. The table is kept in the repository: nobody's first call pays for
trying. `--json` keeps every trial, so that a choice can be looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sublight import timing
from sublight.ops.kernels.rows import ELEMENTS, block_for, random_columns, random_rows
from sublight.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from sublight.ops.record import tuning
from sublight.ops.record.library import Registered
from sublight.ops.softmax import plans as softmax_plans
from sublight.ops.softmax import softmax
from sublight.timing import Thunk

Progress = Callable[[str, int, int], None]
WIDE = tuning.WIDTHS
WIDTHS = WIDE[:-2]
ITEMSIZE = 2  # bf16 and fp16; fp32 goes by rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A kernel with something to choose: its candidates for a width, and its launch on that width."""

    kernel: str
    candidates: Callable[[int], list[tuning.Tile]]  # beside these, what the rule says is tried
    thunk: Callable[[int], Thunk]
    widths: tuple[int, ...] = WIDTHS
    itemsize: int = ITEMSIZE


def choices() -> tuple[Choice, ...]:
    forward = tuning.forward_tiles
    backward = partial(tuning.backward_tiles, itemsize=ITEMSIZE)
    wide = tuple(cols for cols in WIDE if cols > softmax_plans.TILE_COLS)
    return (
        Choice(kernel="layer_norm", candidates=forward, thunk=partial(_norm, center=True), widths=WIDE),
        Choice(kernel="rms_norm", candidates=forward, thunk=partial(_norm, center=False), widths=WIDE),
        Choice(kernel="softmax", candidates=forward, thunk=_softmax, widths=wide),
        Choice(
            kernel="softmax_backward",
            candidates=_one_block,
            thunk=_softmax_backward,
            widths=(8192, 16384, 32768),
            itemsize=2 * ITEMSIZE,
        ),
        Choice(
            kernel="layer_norm_backward",
            candidates=backward,
            thunk=partial(_norm_backward, center=True),
            widths=WIDE,
        ),
        Choice(
            kernel="rms_norm_backward",
            candidates=backward,
            thunk=partial(_norm_backward, center=False),
            widths=WIDE,
        ),
        Choice(
            kernel="add_layer_norm_backward",
            candidates=_add_norm_tiles,
            thunk=partial(_add_norm_backward, center=True),
            widths=WIDE[:-1],
        ),
        Choice(
            kernel="add_rms_norm_backward",
            candidates=_add_norm_tiles,
            thunk=partial(_add_norm_backward, center=False),
            widths=WIDE[:-1],
        ),
    )


def _one_block(cols: int) -> list[tuning.Tile]:
    return [tile for tile in tuning.forward_tiles(cols) if not tile.tail]


def _add_norm_tiles(cols: int) -> list[tuning.Tile]:
    block = block_for(cols)
    found = tuning.ring_tiles(cols, ITEMSIZE, streams=3)
    if block <= 4096:
        found.append(tuning.Tile(block=block, warps=block // 1024, registers=255, packed=True, programs=2, stages=4))
    return found


def trials(chosen: tuple[Choice, ...]) -> Iterator[tuple[Choice, int, tuning.Tile | None]]:
    for choice in chosen:
        for cols in choice.widths:
            for tile in (None, *choice.candidates(cols)):
                yield choice, cols, tile


def timed(choice: Choice, tile: tuning.Tile | None, thunk: Thunk) -> float | None:
    """Seconds, or None where the tile asks for more than the GPU has."""
    token = tuning.TRIAL.set((choice.kernel, tile))
    try:
        return timing.measure(thunk, time_limit_s=0.03, keep_outputs=False).median_s
    except Exception:  # Triton's errors for too much shared memory or too many registers have no common parent
        return None
    finally:
        tuning.TRIAL.reset(token)


def tune(progress: Progress | None = None) -> tuple[dict[str, tuning.Tile], list[dict[str, Any]]]:
    """The fastest tile by key where one beats the rule, and every trial."""
    best: dict[str, tuple[float, tuning.Tile | None]] = {}
    log: list[dict[str, Any]] = []
    last: tuple[str, int] | None = None
    todo = list(trials(choices()))
    for choice, cols, tile in todo:
        if progress:
            progress(f"{choice.kernel} {cols}", len(log), len(todo))
        if last != (choice.kernel, cols):
            last, thunk = (choice.kernel, cols), choice.thunk(cols)
        seconds = timed(choice, tile, thunk)
        log.append({"kernel": choice.kernel, "cols": cols, "seconds": seconds, **(asdict(tile) if tile else {})})
        key = tuning.key(choice.kernel, cols, choice.itemsize)
        if seconds is not None and (key not in best or seconds < best[key][0]):
            best[key] = (seconds, tile)
    return {key: tile for key, (_, tile) in best.items() if tile}, log


def _rows(cols: int) -> dict[str, int]:
    return {"rows": ELEMENTS // cols, "cols": cols}


def _softmax(cols: int) -> Thunk:
    return partial(softmax.launch, random_rows(_rows(cols), "bfloat16", "cuda", 0, scale=3.0))


def _softmax_backward(cols: int) -> Thunk:
    y = softmax.launch(random_rows(_rows(cols), "bfloat16", "cuda", 0, scale=3.0))
    return partial(softmax.SOFTMAX_BACKWARD.by_kernels, random_rows(_rows(cols), "bfloat16", "cuda", 1), y)


def _norm(cols: int, *, center: bool) -> Thunk:
    x = random_rows(_rows(cols), "bfloat16", "cuda", 0)
    weight, bias = random_columns(_rows(cols), "bfloat16", "cuda", 0, 2)
    return partial(layer_norm.launch, x, weight, bias) if center else partial(rms_norm.launch, x, weight)


def _backward(op: Registered) -> Any:
    assert op.gradient is not None
    return op.gradient.by


def _norm_backward(cols: int, *, center: bool) -> Thunk:
    x, dy = (random_rows(_rows(cols), "bfloat16", "cuda", seed) for seed in (0, 1))
    weight, bias = random_columns(_rows(cols), "bfloat16", "cuda", 0, 2)
    op, columns = (layer_norm.LAYER, (weight, bias)) if center else (rms_norm.RMS, (weight,))
    _, *stats = op.by_kernels(x, *columns, 1e-6)
    return partial(_backward(op).by_kernels, dy, x, weight, *stats)


def _add_norm_backward(cols: int, *, center: bool) -> Thunk:
    x, residual, dy, dsum = (random_rows(_rows(cols), "bfloat16", "cuda", seed) for seed in (0, 1, 2, 3))
    weight, bias = random_columns(_rows(cols), "bfloat16", "cuda", 0, 2)
    op, columns = (add_layer_norm.ADD_LAYER, (weight, bias)) if center else (add_rms_norm.ADD_RMS, (weight,))
    _, total, *stats = op.by_kernels(x, residual, *columns, 1e-6)
    return partial(_backward(op).by_kernels, dy, dsum, total, weight, *stats)
