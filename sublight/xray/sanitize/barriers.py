"""Stores that a program reads back: between the threads of one program nothing is ordered without a barrier.

Lanes stand for threads: the same lane of tensors of the same size is taken to be the same thread. Reductions, scans and
products count as barriers, for they exchange data between warps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sublight.xray.sanitize.memory import Array, Storage


@dataclass(slots=True)
class Barriers:
    """One launch's barriers: when the present program last had one, and how many lanes its stores had."""

    since: int = 0  # event
    sizes: dict[int, int] = field(default_factory=dict)  # of a storing event

    def stored(self, storage: Storage, granules: Array, lanes: Array, each: int, event: int, size: int) -> None:
        if storage.writer_lane is None:
            storage.writer_lane = np.zeros(storage.granules(), np.int32)
        storage.writer_lane[granules] = lanes if each == 1 else np.repeat(lanes, each)
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
