"""Which tile a kernel takes: from a table that was measured, else by rule; never by trying at a user's first call.

`tuned.json` beside this file holds what `sublight bench --tune` found fastest, by kernel, by the blocks that a row is
split into, and by item size. It was measured on an H200; other GPUs go by rule.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sublight.backend.device import is_interpreted
from sublight.backend.jit import cdiv
from sublight.ops.kernels.rows import block_for, split

TABLE = Path(__file__).with_name("tuned.json")
TUNED_CAPABILITY = 90
WIDTHS = (768, 1024, 1600, 2048, 2560, 4096, 5120, 8192, 12288, 16384, 32768, 65536)  # that were tried: `--tune`'s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A program's share, and what it gets to do it with."""

    block: int  # columns
    warps: int
    rows: int = 1
    tail: int = 0  # columns of a second block, where one power of two would leave many threads idle
    registers: int | None = None  # per thread at most, so that enough programs share a multiprocessor
    packed: bool = False  # the row is kept in its 16-bit form (rows.forget)
    programs: int = 0  # on a multiprocessor, each taking many rows; 0: one program a tile
    stages: int = 1  # rows that are on their way at once
    parts: int = 0  # programs that share a row of a ring in shared memory; 0: the plain kernel

    @property
    def rows_text(self) -> str:
        """
        >>> Tile(block=256, warps=4, rows=8).rows_text, Tile(block=1024, warps=1).rows_text
        ('8 rows a program', 'one row a program')
        """
        return "one row a program" if self.rows == 1 else f"{self.rows} rows a program"

    def options(self) -> dict[str, Any]:
        """The tile's options for the launch; the interpreter knows no registers."""
        if self.registers is None or is_interpreted():
            return {"num_warps": self.warps}
        return {"num_warps": self.warps, "maxnreg": self.registers}


# a kernel and the tile that it shall take; None: what the rule says
TRIAL: ContextVar[tuple[str, Tile | None] | None] = ContextVar("TRIAL", default=None)


Rule = TypeVar("Rule", bound=Tile | None)


Plan = TypeVar("Plan", bound=Callable[..., Any])


def planned(plan: Plan) -> Plan:
    """Remembers what it was asked: a launch asks each time, and only where tiles are tried does the answer change."""
    remembered = functools.cache(plan)

    @functools.wraps(plan)
    def call(*args: Any, **kwargs: Any) -> Any:
        asked_anew = TRIAL.get() is not None or is_interpreted()
        return plan(*args, **kwargs) if asked_anew else remembered(*args, **kwargs)

    return call  # type: ignore[return-value]


def tile_for(
    kernel: str, cols: int, itemsize: int, *, packable: bool, capability: int, rule: Rule, near: bool = False
) -> Tile | Rule:
    """The tile that was measured fastest for rows that can be packed, as those measured could; else `rule`.

    With `near`, a width that was not tried goes by the nearest one that was, of the same power of two."""
    trial = TRIAL.get()
    if trial is not None and trial[0] == kernel:
        return trial[1] or rule
    if not packable or capability != TUNED_CAPABILITY:
        return rule
    tile = _table().get(key(kernel, cols, itemsize))
    return tile or (near and _nearest(kernel, cols, itemsize)) or rule


def key(kernel: str, cols: int, itemsize: int) -> str:
    """
    >>> key("softmax", 5120, 2), key("softmax", 8192, 2)
    ('softmax 4096+1024 2', 'softmax 8192 2')
    """
    block, tail = split(cols)
    return f"{kernel} {block}+{tail} {itemsize}" if tail else f"{kernel} {block} {itemsize}"


@functools.cache
def _nearest(kernel: str, cols: int, itemsize: int) -> Tile | None:
    """The tile of the nearest width that was tried; None where the rule's tile was fastest there."""
    table = _table()
    tried = {key(kernel, width, itemsize): (width, table.get(key(kernel, width, itemsize))) for width in WIDTHS}
    for name, tile in table.items():
        kind, blocks, item = name.split()
        if (kind, item) == (kernel, str(itemsize)) and name not in tried:
            block, tail = (*map(int, blocks.split("+")), 0)[:2]
            tried[name] = (block + 3 * tail // 4, tile)  # the middle of the widths that it stands for
    same = [entry for entry in tried.values() if block_for(entry[0]) == block_for(cols)]
    return min(same, key=lambda entry: abs(math.log(entry[0] / cols)))[1] if same else None


@functools.cache
def _table() -> dict[str, Tile]:
    try:
        return {name: Tile(**tile) for name, tile in json.loads(TABLE.read_text()).items()}
    except FileNotFoundError:
        return {}


def to_json(tiles: dict[str, Tile]) -> dict[str, Any]:
    return {name: asdict(tile) for name, tile in sorted(tiles.items())}


def forward_tiles(cols: int) -> list[Tile]:
    """What may be fast for one pass over rows that stay in registers, in one block or two."""
    block, tail = split(cols)
    tiles = []
    for first, rest in {(block, tail), (block, tail) if tail or cols < 16384 else (block // 2, block // 2)}:
        for warps in (1, 2, 4, 8, 16, 32):
            each = (first + rest) // (32 * warps)
            if not 8 <= each <= 64:
                continue
            if each <= 32:
                tiles.append(Tile(block=first, tail=rest, warps=warps))
            if cols > 1024 and each >= 16:
                fewer = {16: (128, 64, 48), 32: (64, 32)}.get(warps, (None, 128, 80, 64))
                tiles += [Tile(block=first, tail=rest, warps=warps, packed=True, registers=cap) for cap in fewer]
    return tiles


def backward_tiles(cols: int, itemsize: int) -> list[Tile]:
    """What may be fast for programs that take many rows and load some ahead: as many as registers and memory hold."""
    block = block_for(cols)
    tiles = []
    for each, registers in ((8, 64), (8, 80), (16, 80), (16, 128), (32, 128), (32, 168), (32, 255)):
        warps = block // (32 * each)
        programs = min(8, 65536 // (registers * 32 * warps)) if 1 <= warps <= 32 else 0
        for stages in (4, 3, 2):
            if programs and programs * (stages - 1) * 2 * block * itemsize <= 190 * 1024:
                tiles.append(
                    Tile(block=block, warps=warps, registers=registers, packed=True, programs=programs, stages=stages)
                )
                break
    return tiles + ring_tiles(cols, itemsize)


def ring_tiles(cols: int, itemsize: int, streams: int = 2) -> list[Tile]:
    """The same with rows in shared memory: for each number of programs and warps, as many rows as fit."""
    tiles = []
    for parts in (1, 2, 4, 8):
        each = block_for(cdiv(cols, parts))
        for programs, warps in ((12, 1), (8, 1), (8, 2), (6, 2), (4, 4), (3, 4), (3, 8), (2, 8), (2, 16), (1, 16)):
            held = each // (32 * warps)  # columns of a thread
            stages = min(6, (224 * 1024 // programs // (each * itemsize) - 1) // streams)  # and the weight
            if 16 <= held <= 32 and stages >= 2 + (parts > 1) and programs * warps <= 32:
                registers = min(255, 65536 // (programs * 32 * warps) // 8 * 8)
                tiles.append(
                    Tile(block=each, warps=warps, registers=registers, programs=programs, stages=stages, parts=parts)
                )
    return tiles
