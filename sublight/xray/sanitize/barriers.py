"""Between the threads of one program nothing is ordered without a barrier: stores that it reads back, what it read and
stores to, and what it stored before it tells other programs so.

Lanes stand for threads: the same lane of tensors of the same size is taken to be the same thread, and 32 neighbours to
be a warp, which loads for all of its lanes before it stores. Reductions, scans and products count as barriers, for they
exchange data between warps; so do transpositions for what was read before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sublight.xray.sanitize.memory import Array, Storage

WARP = 32
SEVERAL = -1  # warps have read a granule


@dataclass(slots=True)
class Barriers:
    """One launch's barriers: when the present program last had one, and how many lanes its loads and stores had."""

    since: int = 0  # event
    read_since: int = 0  # event: as `since`, or a transposition after it
    sizes: dict[int, int] = field(default_factory=dict)  # by event
    open_stores: list[int] = field(default_factory=list)  # events since the barrier, by several warps

    def reached(self, event: int) -> None:
        """The present program is at a barrier."""
        self.since = self.read_since = event
        self.open_stores.clear()

    def stored(self, storage: Storage, granules: Array, lanes: Array, each: int, event: int, size: int) -> None:
        if storage.writer_lane is None:
            storage.writer_lane = np.zeros(storage.granules(), np.int32)
        storage.writer_lane[granules] = lanes if each == 1 else np.repeat(lanes, each)
        self.sizes[event] = size
        if size > WARP:
            self.open_stores.append(event)

    def loaded(self, storage: Storage, granules: Array, lanes: Array, each: int, event: int, size: int) -> None:
        """Before this load becomes the last one of its granules."""
        if storage.reader_warp is None:
            storage.reader_warp = np.zeros(storage.granules(), np.int16)  # a block has 2**20 lanes at most
        _, _, last_read = storage.marks()
        mine = (lanes if each == 1 else np.repeat(lanes, each)) // WARP
        readers = last_read[granules]
        others: Array = readers > self.read_since
        if others.any():
            everybody, same = self._of_size(readers[others], size)
            is_other = storage.reader_warp[granules] != mine
            others &= np.isin(readers, everybody) | (np.isin(readers, same) & is_other)
        storage.reader_warp[granules] = mine
        others |= storage.reader_warp[granules] != mine  # two lanes of this load, one granule
        storage.reader_warp[granules[others]] = SEVERAL
        self.sizes[event] = size

    def unseen(self, storage: Storage, granules: Array, writers: Array, lanes: Array, each: int, size: int) -> Array:
        """Which granules another lane has written since the last barrier; `writers` are their last writing events."""
        recent: Array = writers > self.since
        if storage.writer_lane is None or not recent.any():
            return np.zeros(len(granules), bool)
        mine = lanes if each == 1 else np.repeat(lanes, each)
        is_other = storage.writer_lane[granules] != mine
        sizes = {int(event): self.sizes.get(int(event), size) for event in np.unique(writers[recent])}
        if any(count != size for count in sizes.values()):
            is_other |= np.array([sizes.get(int(event), size) != size for event in writers])
        unseen: Array = recent & is_other
        return unseen

    def unread(self, storage: Storage, granules: Array, readers: Array, lanes: Array, each: int, size: int) -> Array:
        """Which granules another warp may not have read yet; `readers` are their last reading events."""
        recent: Array = readers > self.read_since
        if storage.reader_warp is None or size <= WARP or not recent.any():
            return np.zeros(len(granules), bool)
        is_other = storage.reader_warp[granules] != (lanes if each == 1 else np.repeat(lanes, each)) // WARP
        everybody, same = self._of_size(readers[recent], size)
        unread: Array = recent & (np.isin(readers, everybody) | (np.isin(readers, same) & is_other))
        return unread

    def _of_size(self, loads: Array, size: int) -> tuple[list[int], list[int]]:
        """Of these events, loads of a single number, which every warp makes, and loads of tensors of this size. Which
        threads hold what of two tensors of other sizes nobody knows."""
        sizes = {int(event): self.sizes.get(int(event), 0) for event in np.unique(loads)}
        single = [event for event, count in sizes.items() if count == 1 != size]
        return single, [event for event, count in sizes.items() if count == size]
