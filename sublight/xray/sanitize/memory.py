"""The shadow of the tensors: what was made by `torch.empty`, what has been written since, and what has been read.

Memory is told apart by storage, in granules: the smallest element it was ever accessed as. A view claims the elements
it reaches, no more: in `x[:, :10]` of a wider tensor, column 10 lies outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sublight.xray.record import Place
from sublight.xray.sanitize.notes import Notes

Array = npt.NDArray[Any]
PIECE = 1 << 24  # granules that are judged at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A kernel's store, remembered to blame it for what it left out."""

    kernel: str
    place: Place
    name: str  # of the argument
    text: str  # a float32 [100, 7]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int  # of the view in its storage, in bytes
    itemsize: int

    def spot(self, byte: int) -> str:
        """The element that lies at a byte of the storage."""
        return index_text(self.shape, self.strides, (byte - self.start) // self.itemsize)


@dataclass(slots=True, eq=False)
class Storage:
    """One allocation. A granule is `granule` bytes; arrays over granules exist only where they are needed."""

    address: int
    byte_count: int
    weak: Any  # StorageWeakRef: whether it still lives
    granule: int
    written: Array | None = None  # bool; None: all of it has a value
    consumed: Array | None = None  # bool: read by somebody, where `written` is kept
    claimed: Array | None = None  # bool: a kernel that stores here was given these granules
    stored: Stored | None = None
    last_write: Array | None = None  # event of this launch, 0: none
    first_read: Array | None = None
    last_read: Array | None = None
    writer_lane: Array | None = None  # of the last plain store in this launch
    reader_warp: Array | None = None  # of the last plain load in this launch
    is_passed_by: bool = False  # some programs ended before they came to store here

    def granules(self) -> int:
        return -(-self.byte_count // self.granule)

    def refine(self, granule: int) -> None:
        """Smaller granules, because somebody reads or writes smaller elements."""
        if granule >= self.granule:
            return
        times = self.granule // granule
        self.granule = granule
        for name in (
            "written",
            "consumed",
            "claimed",
            "last_write",
            "first_read",
            "last_read",
            "writer_lane",
            "reader_warp",
        ):
            if (array := getattr(self, name)) is not None:
                setattr(self, name, np.repeat(array, times)[: self.granules()])

    def marks(self) -> tuple[Array, Array, Array]:
        """The launch's last writer, first reader and last reader of each granule."""
        if self.last_write is None or self.first_read is None or self.last_read is None:
            self.last_write, self.first_read, self.last_read = (np.zeros(self.granules(), np.int32) for _ in range(3))
        return self.last_write, self.first_read, self.last_read

    def forget_marks(self) -> None:
        self.last_write = self.first_read = self.last_read = self.writer_lane = self.reader_warp = None

    def track(self) -> None:
        """Nothing in it has a value yet."""
        self.written = np.zeros(self.granules(), bool)
        self.consumed = np.zeros(self.granules(), bool)
        self.claimed = np.zeros(self.granules(), bool)

    def settle(self) -> None:
        if self.written is not None and self.written.all():
            self.written = self.consumed = self.claimed = None

    def part(self, array: Array, tensor: Any) -> Array:
        """Those granules that a tensor reaches, as a view that can be written."""
        size = tensor.element_size()
        start = tensor.data_ptr() - self.address
        each = size // self.granule
        shape = (*tensor.shape, each)
        strides = (*(stride * each for stride in tensor.stride()), 1)
        return np.lib.stride_tricks.as_strided(array[start // self.granule :], shape, strides)

    def fit(self, tensor: Any) -> None:
        """Granules that the tensor's elements are made of."""
        size = tensor.element_size()
        start = tensor.data_ptr() - self.address
        if size % self.granule or start % self.granule:
            self.refine(int(np.gcd.reduce([size, start, self.granule])))


@dataclass(slots=True, kw_only=True, eq=False)
class Argument:
    """A tensor as one launch got it: a name, and the window of addresses that belongs to it alone."""

    name: str
    storage: Storage
    start: int  # of the view in its storage, in bytes
    span: int  # bytes from its first element to the end of its last
    itemsize: int
    text: str  # a float32 [100, 7]
    tensor: Any
    virtual: int  # the address that the kernel sees
    inside: Array | None  # bool over the span's elements; None: the view reaches all of them
    is_stored_to: bool = False  # in this launch
    last_program: int = -1  # that came to a store to it
    storing_programs: int = 0
    stored_at: Place | None = None  # the first such line

    def spot(self, byte: int) -> str:
        """The element that lies at a byte of the storage: y[3, 0]."""
        element = (byte - self.start) // self.itemsize
        return self.name + index_text(tuple(self.tensor.shape), self.tensor.stride(), element)

    def holds(self, offsets: Array, size: int) -> Array:
        """Whether `size` bytes at each offset belong to the view."""
        good: Array = (offsets >= 0) & (offsets + size <= self.span)
        if self.inside is not None:
            clipped = np.where(good, offsets, 0)
            good &= self.inside[clipped // self.itemsize] & self.inside[(clipped + size - 1) // self.itemsize]
        return good


def span_of(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last.

    >>> import torch
    >>> span_of(torch.zeros(4, 16)[:, :10]), span_of(torch.zeros(1, 3).expand(5, 3)), span_of(torch.zeros(0, 3))
    (232, 12, 0)
    """
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def reach_of(tensor: Any) -> Array | None:
    """Which elements of its span a tensor reaches; None where it reaches all.

    >>> import torch
    >>> reach_of(torch.zeros(2, 4)[:, :3]).astype(int).tolist()
    [1, 1, 1, 0, 1, 1, 1]
    """
    elements = span_of(tensor) // tensor.element_size()
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    if elements == 0 or tensor.is_contiguous() or (int(np.prod(sizes)) == elements and _is_dense(tensor)):
        return None
    reached = np.zeros(elements, bool)
    np.lib.stride_tricks.as_strided(reached, tuple(tensor.shape), tuple(tensor.stride()))[...] = True
    return None if reached.all() else reached


def _is_dense(tensor: Any) -> bool:
    """Whether the strides are those of a permuted contiguous tensor."""
    wanted = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s):
        if stride != wanted:
            return False
        wanted *= size
    return True


def index_text(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> str:
    """The index of the element that lies so many elements behind the first.

    >>> index_text((4, 10), (16, 1), 35), index_text((3, 5), (1, 3), 5), index_text((), (), 0)
    ('[2, 3]', '[2, 1]', '[0]')
    """
    index = [0] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim]):
        if shape[dim] > 1 and strides[dim] > 0:
            index[dim] = min(element // strides[dim], shape[dim] - 1)
            element -= index[dim] * strides[dim]
    return str(index or [0])


def describe(tensor: Any) -> str:
    """A tensor in words, with an article.

    >>> import torch
    >>> describe(torch.zeros(2, 3)), describe(torch.zeros(1, dtype=torch.int8))
    ('a float32 [2, 3]', 'an int8 [1]')
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind} {list(tensor.shape)}"


@dataclass(slots=True)
class Memory:
    """Every storage that is watched, by address. Storages that torch has freed are judged and dropped."""

    notes: Notes
    storages: dict[int, Storage] = field(default_factory=dict)

    def of(self, tensor: Any) -> Storage:
        """The shadow of a tensor's storage, made where there is none."""
        from torch.multiprocessing.reductions import StorageWeakRef

        raw = tensor.untyped_storage()
        known = self.known(tensor)
        if known is not None:
            return known
        made = Storage(raw.data_ptr(), raw.nbytes(), StorageWeakRef(raw), tensor.element_size())
        self.storages[made.address] = made
        return made

    def known(self, tensor: Any) -> Storage | None:
        raw = tensor.untyped_storage()
        storage = self.storages.get(raw.data_ptr())
        if storage is None:
            return None
        if storage.weak.expired() or storage.byte_count != raw.nbytes():  # another tensor took its place
            self.judge(self.storages.pop(storage.address))
            return None
        return storage

    def at(self, address: int) -> Storage | None:
        for storage in self.storages.values():
            if storage.address <= address < storage.address + storage.byte_count and not storage.weak.expired():
                return storage
        return None

    def created_empty(self, tensor: Any) -> None:
        if tensor.device.type == "cpu" and tensor.numel():
            storage = self.of(tensor)
            storage.refine(tensor.element_size())
            storage.track()

    def torch_writes(self, tensor: Any) -> None:
        storage = self.known(tensor)
        if storage is not None and storage.written is not None and tensor.numel():
            storage.fit(tensor)
            storage.part(storage.written, tensor)[...] = True
            storage.settle()

    def torch_reads(self, tensor: Any) -> None:
        storage = self.known(tensor)
        if storage is None or storage.written is None or storage.stored is None or not tensor.numel():
            return
        storage.fit(tensor)
        assert storage.consumed is not None
        lit = storage.part(storage.written, tensor)
        storage.part(storage.consumed, tensor)[...] = True
        missing = ~lit[..., 0]
        if count := int(np.count_nonzero(missing)):
            index = np.unravel_index(int(missing.argmax()), missing.shape)
            where = ", ".join(str(int(i)) for i in index)
            self._blame(storage, count, tensor.numel(), f"and torch reads it, at [{where}] to begin with")

    def judge(self, storage: Storage) -> None:
        """At the end of a tensor's life: was all that the kernel was given written?

        A buffer that is larger than what it holds is fine where the part that was written has been read, and no more;
        and where programs return early, as behind the end of a short row, and nobody reads what they left out.
        """
        if storage.written is None or storage.stored is None or storage.claimed is None or storage.consumed is None:
            return
        missing = claimed = first = 0
        has_reader, has_written, is_all_read = False, False, True
        for at in range(0, len(storage.written), PIECE):  # a large tensor has no room for arrays of its size
            piece = slice(at, at + PIECE)
            mine, written, consumed = storage.claimed[piece], storage.written[piece], storage.consumed[piece]
            lacking = mine & ~written
            count = int(np.count_nonzero(lacking))
            if count and not missing:
                first = at + int(lacking.argmax())
            missing += count
            claimed += int(np.count_nonzero(mine))
            has_reader = has_reader or bool((lacking & consumed).any())
            has_written = has_written or bool((mine & written).any())
            is_all_read = is_all_read and not bool((mine & written & ~consumed).any())
        if not missing or (has_written and not has_reader and (is_all_read or storage.is_passed_by)):
            return
        each = max(1, storage.stored.itemsize // storage.granule)
        spot = storage.stored.spot(first * storage.granule)
        self._blame(storage, -(-missing // each), -(-claimed // each), f"the first is {spot}")

    def _blame(self, storage: Storage, missing: int, total: int, where: str) -> None:
        assert storage.stored is not None
        stored = storage.stored
        detail = (
            f"{missing} of {total} elements of {stored.name}, {stored.text} that torch.empty made, are never stored "
            f"({where}): store all of them, or begin with torch.zeros"
        )
        self.notes.add("unwritten-output", stored.kernel, stored.place, detail)
        storage.written = None  # said once

    def sweep(self) -> None:
        """Judge and drop what torch has freed."""
        for address in [address for address, storage in self.storages.items() if storage.weak.expired()]:
            self.judge(self.storages.pop(address))

    def finish(self) -> None:
        for storage in list(self.storages.values()):
            self.judge(storage)
        self.storages.clear()
