"""Which tile a kernel takes: from a table that was measured, else by rule; never by trying at a user's first call.

`tuned.json` beside this file holds what `sublight bench --tune` found fastest, by kernel, block and item size, apart
for rows that fill their block and rows that do not. It was measured on an H200; other GPUs go by rule.
"""

from __future__ import annotations

import functools
import json
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sublight.ops.rows import block_for, is_interpreted

TABLE = Path(__file__).with_name("tuned.json")
TUNED_CAPABILITY = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A program's share, and what it gets to do it with."""

    block: int  # columns
    warps: int
    rows: int = 1
    registers: int | None = None  # per thread at most, so that enough programs share a multiprocessor
    packed: bool = False  # the row is kept in its 16-bit form (rows.forget)
    programs: int = 0  # on a multiprocessor, each taking many rows; 0: one program a tile
    stages: int = 1  # rows that are on their way at once

    def options(self) -> dict[str, Any]:
        """For the launch; the interpreter knows no registers."""
        if self.registers is None or is_interpreted():
            return {"num_warps": self.warps}
        return {"num_warps": self.warps, "maxnreg": self.registers}


TRIAL: ContextVar[tuple[str, Tile] | None] = ContextVar("TRIAL", default=None)  # a kernel and the tile it shall take


def tile_for(kernel: str, cols: int, itemsize: int, *, packable: bool, capability: int, rule: Tile) -> Tile:
    """The tile that was measured fastest for rows that can be packed, as those measured could; else `rule`."""
    trial = TRIAL.get()
    if trial is not None and trial[0] == kernel:
        return trial[1]
    if not packable or capability != TUNED_CAPABILITY:
        return rule
    return _table().get(key(kernel, cols, itemsize), rule)


def key(kernel: str, cols: int, itemsize: int) -> str:
    """
    >>> key("softmax", 5120, 2)
    'softmax 8192 part 2'
    """
    block = block_for(cols)
    return f"{kernel} {block} {'full' if cols == block else 'part'} {itemsize}"


@functools.cache
def _table() -> dict[str, Tile]:
    try:
        return {name: Tile(**tile) for name, tile in json.loads(TABLE.read_text()).items()}
    except FileNotFoundError:
        return {}


def to_json(tiles: dict[str, Tile]) -> dict[str, Any]:
    return {name: asdict(tile) for name, tile in sorted(tiles.items())}


def forward_tiles(block: int) -> list[Tile]:
    """What may be fast for one pass over rows that stay in registers."""
    tiles = []
    for warps in (1, 2, 4, 8, 16, 32):
        for rows in (1, 2, 4):
            each = rows * block // (32 * warps)
            if not 8 <= each <= 64 or (rows > 1 and block > 1024):
                continue
            tiles.append(Tile(block=block, warps=warps, rows=rows))
            if rows == 1 and block > 2048 and each >= 16:
                cap = {4: 128, 8: 64, 16: 64, 32: 32}.get(warps, 255) if each <= 32 else {8: 80, 16: 64}.get(warps, 255)
                tiles.append(Tile(block=block, warps=warps, packed=True, registers=cap))
    return tiles


def backward_tiles(block: int, itemsize: int) -> list[Tile]:
    """What may be fast for programs that take many rows and load some ahead: as many as registers and memory hold."""
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
    return tiles
