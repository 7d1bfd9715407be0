"""What a warp's addresses cost: sectors of global memory, wavefronts of shared memory.

Global: a request fetches each distinct 32-byte sector that an active lane touches, once; a warp whose lanes are all off
makes no request. That is what ncu counts (l1tex__t_sectors over l1tex__t_requests).

Shared: 32 banks of 4 bytes. A pass (wavefront) serves every lane whose words lie in different banks; lanes that want
the same word share it, halves of one word too. A pass carries 128 bytes, so 8 bytes a lane go by half-warps and 16 by
quarter-warps, and a load needs half as many where lanes n and n^1, or n and n^2, ask for the same address throughout
(NVIDIA's engineers in forums.developer.nvidia.com/t/unexpected-shared-memory-bank-conflict/77228). ldmatrix and
stmatrix take eight rows of 16 bytes a pass. Passes that the conflict-free access needs anyway are the ideal. What an
asynchronous copy brings comes line by line (128 bytes): a pass writes what the lanes took of one line. Zeros that it
writes instead come from nowhere, and go as a store's. So ncu counted it on an H200: the same 32 places in shared memory
took 4 passes from 4 lines and 8 from 8, whatever their banks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.numbers import Array, distinct

SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4
PASS_BYTES = BANKS * BANK_BYTES
LINE_BYTES = 128  # of a cache
_LINE_SHIFT = LINE_BYTES.bit_length() - 1
_WARP_SHIFT = 42  # above every line's number
_NONE = np.int64(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sectors:
    """The sectors of one execution of an instruction by all warps."""

    requests: int
    sectors: int
    ideal: int  # sectors that the distinct bytes would fill
    shifted: int  # sectors above the ideal of requests that are one piece of memory: only their start is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Wavefronts:
    requests: int
    wavefronts: int
    ideal: int
    split: int = 0  # more wavefronts, not of banks: those that more lines of global memory cause


def sectors_of(addresses: Array, active: Array, width: int) -> Sectors:
    """Lanes in order, 32 a warp; `width` bytes a lane, aligned to it as the hardware demands.

    >>> lanes = np.arange(32)
    >>> on = np.ones(32, bool)
    >>> [sectors_of(4 * lanes * stride, on, 4).sectors for stride in (0, 1, 2, 32)]
    [1, 4, 8, 32]
    """
    starts = np.where(active, addresses.astype(np.int64), _NONE).reshape(-1, WARP)
    is_request = active.reshape(-1, WARP).any(1)
    starts = np.sort(starts[is_request], axis=1)
    if not len(starts):
        return Sectors(requests=0, sectors=0, ideal=0, shifted=0)
    requested_bytes = width * _distinct(starts)
    sectors = _distinct(np.where(starts == _NONE, _NONE, starts >> 5))
    if width > SECTOR_BYTES:
        sectors = sectors * (width // SECTOR_BYTES)
    ideal = -(-requested_bytes // SECTOR_BYTES)
    first = np.where(starts == _NONE, starts[:, -1:], starts).min(1)
    is_one_piece = starts[:, -1] + width - first == requested_bytes
    return Sectors(
        requests=len(starts),
        sectors=int(sectors.sum()),
        ideal=int(ideal.sum()),
        shifted=int((sectors - ideal)[is_one_piece].sum()),
    )


def wavefronts_of(addresses: Array, active: Array, width: int, *, is_load: bool) -> Wavefronts:
    """
    >>> lanes = np.arange(32)
    >>> on = np.ones(32, bool)
    >>> [wavefronts_of(4 * lanes * stride, on, 4, is_load=True).wavefronts for stride in (0, 1, 2, 32, 33)]
    [1, 1, 2, 32, 1]
    >>> wavefronts_of(16 * lanes, on, 16, is_load=True)
    Wavefronts(requests=1, wavefronts=4, ideal=4, split=0)
    """
    active = active.reshape(-1, WARP)
    is_request = active.any(1)
    active = active[is_request]
    starts = addresses.astype(np.int64).reshape(-1, WARP)[is_request]
    if not len(starts):
        return Wavefronts(requests=0, wavefronts=0, ideal=0)
    phases = max(1, width // BANK_BYTES)  # a warp's lanes are served in as many parts
    if phases == 1:
        passes, ideal = _passes(starts, active, width)
        return Wavefronts(requests=len(starts), wavefronts=passes, ideal=ideal)
    merged = _is_paired(starts, active) if is_load else np.zeros(len(starts), np.bool_)
    passes = ideal = 0
    for rows, parts in ((merged, phases // 2), (~merged, phases)):
        if rows.any():
            some, least = _passes(
                starts[rows].reshape(-1, WARP // parts), active[rows].reshape(-1, WARP // parts), width
            )
            passes, ideal = passes + some, ideal + least
    return Wavefronts(requests=len(starts), wavefronts=passes, ideal=ideal)


def copy_wavefronts_of(addresses: Array, active: Array, width: int, *, sources: Array, fetching: Array) -> Wavefronts:
    """cp.async: `sources` are where the lanes that fetch take theirs from; the other active lanes write zeros.

    >>> lanes = np.arange(32)
    >>> on = np.ones(32, bool)
    >>> [copy_wavefronts_of(16 * lanes, on, 16, sources=1024 * (lanes // row) + 16 * (lanes % row), fetching=on)
    ...  for row in (8, 4)]  # lanes that take from one row: whole lines, and halves of twice as many
    [Wavefronts(requests=1, wavefronts=4, ideal=4, split=0), Wavefronts(requests=1, wavefronts=4, ideal=4, split=4)]
    """
    fetching = fetching & active
    by_bank = wavefronts_of(addresses, active, width, is_load=False)
    zeros = wavefronts_of(addresses, active & ~fetching, width, is_load=False)
    lanes = np.flatnonzero(fetching)
    if not len(lanes):
        return by_bank
    lines = ((lanes // WARP).astype(np.int64) << _WARP_SHIFT) + (sources.astype(np.int64)[lanes] >> _LINE_SHIFT)
    known, line_of = np.unique(lines, return_inverse=True)
    words = addresses.astype(np.int64)[lanes, None] // BANK_BYTES + np.arange(max(1, width // BANK_BYTES))
    written = distinct(((line_of.reshape(-1, 1) << _WARP_SHIFT) + words).reshape(-1))
    banks = (written >> _WARP_SHIFT) * BANKS + written % BANKS
    counts = np.bincount(banks, minlength=len(known) * BANKS).reshape(-1, BANKS)
    passes = int(counts.max(1).sum()) + zeros.wavefronts
    return replace(by_bank, split=max(0, passes - by_bank.wavefronts))


def matrix_wavefronts_of(addresses: Array, active: Array, matrices: int) -> Wavefronts:
    """ldmatrix, stmatrix: lanes 8 i … 8 i + 7 hold the rows of matrix i, 16 bytes each."""
    requests = int(active.reshape(-1, WARP).any(1).sum())
    rows = addresses.astype(np.int64).reshape(-1, WARP)[:, : 8 * matrices].reshape(-1, 8)
    on = active.reshape(-1, WARP)[:, : 8 * matrices].reshape(-1, 8)
    passes, ideal = _passes(rows, on, 16)
    return Wavefronts(requests=requests, wavefronts=passes, ideal=ideal)


def _distinct(rows: Array) -> Array:
    """Distinct values of each sorted row, those that are none apart."""
    fresh = np.ones(rows.shape, np.bool_)
    fresh[:, 1:] = rows[:, 1:] != rows[:, :-1]
    count: Array = (fresh & (rows != _NONE)).sum(1)
    return count


def _passes(starts: Array, active: Array, width: int) -> tuple[int, int]:
    """Each row is served together: as many passes as its fullest bank has distinct words; and the rows that ask."""
    words = starts[:, :, None] // BANK_BYTES + np.arange(max(1, width // BANK_BYTES))
    words = np.where(active[:, :, None], words, _NONE).reshape(len(starts), -1)
    words.sort(axis=1)
    fresh = np.ones(words.shape, np.bool_)
    fresh[:, 1:] = words[:, 1:] != words[:, :-1]
    row, column = np.nonzero(fresh & (words != _NONE))
    banks = row * BANKS + words[row, column] % BANKS
    counts = np.bincount(banks, minlength=len(starts) * BANKS).reshape(-1, BANKS)
    fullest = counts.max(1)
    return int(fullest.sum()), int((fullest > 0).sum())


def _is_paired(starts: Array, active: Array) -> Array:
    """Do lanes n and n^1, or n and n^2, ask for the same address wherever both are on?"""
    lanes = np.arange(WARP)
    is_paired = np.zeros(len(starts), np.bool_)
    for step in (1, 2):
        other = lanes ^ step
        same = (starts == starts[:, other]) | ~active | ~active[:, other]
        is_paired |= same.all(1)
    return is_paired & active.all(1)  # what lanes that are off do to it is not documented: none is assumed
