"""Memory as a followed block sees it: made-up addresses, real bytes behind them where there are any.

Each argument's storage lies at an address of its own, far from the others, at the offset into the storage that the
tensor has. What was never written, or has no data, is *unknown*: beside every byte lies the number of the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sublight.xray.ptx.numbers import BITS, Array

REGION_SHIFT = 40  # a region has 2**40 addresses: which one an address is in, its upper bits say
SHARED_REGION = 200  # generic addresses of shared and local memory, as cvta makes them
LOCAL_REGION = 201
SHARED_BYTES = 256 * 1024  # above every GPU's
SHARED_START = 1024  # the driver's own
MOST_COPIED_BYTES = 2**28


@dataclass(slots=True)
class Memory:
    """Bytes and, where any is unknown, the reason's number for each."""

    data: Array | None  # None: nothing is known of any
    why: Array | None = None  # None: all is known
    reason: int = 0  # of all of it, where there is no data
    is_ours: bool = False  # else a view of the user's tensor, copied before it is written

    def load(self, at: Array, width: int) -> tuple[Array, Array | None]:
        """Elements of `width` bytes at byte offsets `at`, which the caller has checked."""
        if self.data is None:
            return np.zeros(at.shape, BITS[width]), np.full(at.shape, self.reason, np.uint8)
        place = at >> (width.bit_length() - 1)
        values = self.data[: len(self.data) // width * width].view(BITS[width])[place]
        if self.why is None:
            return values, None
        whys = self.why[: len(self.why) // width * width].reshape(-1, width)[place].max(1)
        return values, whys if whys.any() else None

    def store(self, at: Array, values: Array, whys: Array | None) -> None:
        width = values.dtype.itemsize
        if self.data is None:
            return
        if not self.is_ours:
            if len(self.data) > MOST_COPIED_BYTES:
                return
            self.data, self.is_ours = self.data.copy(), True
        place = at >> (width.bit_length() - 1)
        self.data[: len(self.data) // width * width].view(BITS[width])[place] = values
        if whys is not None and self.why is None:
            self.why = np.zeros(len(self.data), np.uint8)
        if self.why is not None:
            known = np.zeros(len(at), np.uint8) if whys is None else whys
            self.why[: len(self.why) // width * width].reshape(-1, width)[place] = known[:, None]


@dataclass(slots=True, kw_only=True)
class Region:
    """A storage in global memory."""

    name: str
    base: int
    memory: Memory

    @property
    def bytes(self) -> int:
        return 0 if self.memory.data is None else len(self.memory.data)


@dataclass(slots=True)
class GlobalMemory:
    """The regions; `place` finds the region of each lane's address."""

    regions: list[Region] = field(default_factory=list)

    def add(self, name: str, data: Array | None, reason: int) -> Region:
        region = Region(name=name, base=(len(self.regions) + 1) << REGION_SHIFT, memory=Memory(data, reason=reason))
        if len(self.regions) + 2 >= SHARED_REGION:
            raise ValueError("too many tensors")
        self.regions.append(region)
        return region

    def region_of(self, index: int) -> Region | None:
        return self.regions[index - 1] if 1 <= index <= len(self.regions) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A tensor's bytes: what tells storages apart, all of them, and where the tensor begins."""

    key: Any
    data: Array | None
    offset_bytes: int


def storage_of(value: Any) -> Storage | None:
    """The storage of a torch tensor (meta, fake and GPU ones have no data) or a numpy array; None for anything else."""
    while hasattr(value, "base") and not isinstance(value, np.ndarray) and not hasattr(value, "untyped_storage"):
        value = value.base  # triton.reinterpret's view
    if isinstance(value, np.ndarray):
        whole = value
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        offset = value.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        return Storage(key=id(whole), data=whole.reshape(-1).view(np.uint8), offset_bytes=offset)
    if not hasattr(value, "untyped_storage"):
        return None
    offset = value.storage_offset() * value.element_size()
    if value.device.type != "cpu":
        return Storage(key=value.untyped_storage()._cdata, data=None, offset_bytes=offset)
    import torch

    storage = value.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return Storage(key=storage._cdata, data=whole, offset_bytes=offset)
