"""Bytes by tensor: reads once a block, writes as they are made, and whose address depends on data."""

from __future__ import annotations

import numpy as np

from sublight.xray.ptx.memory import GlobalMemory
from sublight.xray.ptx.moved import ELSEWHERE, Mover
from sublight.xray.ptx.numbers import Array
from sublight.xray.ptx.patterns import Request, from_bases, shape_of
from sublight.xray.record import AccessKind

BLOCK = 64  # lanes: two blocks of two warps
LANES = np.arange(2 * BLOCK)
ALL = np.ones(2 * BLOCK, np.bool_)


def memory() -> tuple[GlobalMemory, int, int]:
    found = GlobalMemory()
    return found, found.add("x", None, 0).base, found.add("y", None, 0).base


def note(mover: Mover, index: int, kind: AccessKind, addresses: Array, active: Array, width: int) -> None:
    bases, places = from_bases(addresses)
    mover.note(index, kind, Request(shape=shape_of(places, active, width), bases=bases), addresses, active)


def test_a_block_reads_a_sector_once_and_two_blocks_twice() -> None:
    where, x, _ = memory()
    mover = Mover(BLOCK)
    for _ in range(3):
        note(mover, 0, "load", x + 4 * (LANES % BLOCK), ALL, 4)  # both blocks the same 256 bytes, three times
    assert mover.moved(where).read_bytes == {"x": 2 * 256}


def test_rows_of_their_own_add_up_and_lanes_that_are_off_read_nothing() -> None:
    where, x, y = memory()
    mover = Mover(BLOCK)
    note(mover, 0, "load", x + 4 * LANES, ALL, 4)
    note(mover, 1, "async copy", y + 16 * LANES, LANES < 2, 16)
    assert mover.moved(where).read_bytes == {"x": 512, "y": 32}


def test_writes_count_each_time() -> None:
    where, _, y = memory()
    mover = Mover(BLOCK)
    for _ in range(2):
        note(mover, 0, "store", y + 4 * LANES, ALL, 4)
    note(mover, 1, "atomic", y + 0 * LANES, ALL, 4)
    found = mover.moved(where)
    assert found.written_bytes == {"y": 2 * 512 + 4 * 32} and found.read_bytes == {}, "four warps, a sector each"


def test_one_instruction_may_reach_two_tensors_and_memory_of_none() -> None:
    where, x, y = memory()
    mover = Mover(BLOCK)
    note(mover, 0, "store", np.where(LANES < BLOCK, x, y) + 4 * LANES, ALL, 4)
    note(mover, 1, "load", (120 << 40) + 4 * LANES, ALL, 4)
    found = mover.moved(where)
    assert found.written_bytes == {"x": 256, "y": 256} and found.read_bytes == {ELSEWHERE: 512}


def test_what_data_point_to_is_told() -> None:
    where, x, y = memory()
    mover = Mover(BLOCK, indirect={7})
    note(mover, 3, "load", x + 4 * LANES, ALL, 4)
    note(mover, 7, "load", y + 4 * LANES, ALL, 4)
    note(mover, 7, "load", x + 8 * LANES, ALL, 4)  # half of it was read directly
    found = mover.moved(where)
    assert found.indirect_bytes == {"y": 512, "x": 768} and found.read_bytes == {"y": 512, "x": 512 + 768}
