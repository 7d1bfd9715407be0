"""Every allocation of one device, and the events that made and freed it: all questions about memory are sums of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sublight.trace.intervals import distinct
from sublight.trace.memory.stacks import Site
from sublight.trace.record import Ints, Mask

Floats = npt.NDArray[np.float64]
CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "unknown")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Moments 0 … n: 0 is before the first event, moment k after the k-th."""

    source: str
    device: str
    times_s: Floats  # of each moment, never falling
    reserved_bytes: Ints | None  # at each moment
    # one row an allocation
    first: Ints  # the moment from which it is live; 0: before the recording
    last: Ints  # the moment from which it is free; n + 1: never
    bytes: Ints
    site: Ints  # into sites
    sites: tuple[Site, ...]
    # of the reserved bytes that nothing uses at the peak
    stuck_bytes: int | None = None  # in segments that are used in part: only a tensor that fits can have them
    stuck_page_bytes: int = 0  # whole pages of that, which expandable segments would give back
    cached_bytes: int = 0  # in segments that nothing uses: torch.cuda.empty_cache() gives them back
    expandable: bool = False
    oom: tuple[tuple[float, int], ...] = ()  # when an allocation failed, and what it asked for
    notes: tuple[str, ...] = ()

    @property
    def moments(self) -> int:
        return len(self.times_s)

    @functools.cached_property
    def live_bytes(self) -> Ints:
        """At each moment."""
        return self.curve(np.ones(len(self.bytes), dtype=bool))

    @functools.cached_property
    def peak(self) -> int:
        """The first moment with the most live bytes."""
        return int(self.live_bytes.argmax())

    def curve(self, chosen: Mask) -> Ints:
        """Live bytes of these allocations at each moment."""
        change = np.zeros(self.moments + 1, dtype=np.int64)
        np.add.at(change, self.first[chosen], self.bytes[chosen])
        np.subtract.at(change, self.last[chosen], self.bytes[chosen])
        return np.cumsum(change[:-1])

    def live_at(self, moment: int) -> Mask:
        return (self.first <= moment) & (self.last > moment)

    def at_phase(self, *phases: str) -> Mask:
        """The allocations made in these parts of a step."""
        wanted = np.fromiter((site.phase in phases for site in self.sites), dtype=bool, count=len(self.sites))
        found: Mask = wanted[self.site] if len(self.sites) else np.zeros(0, dtype=bool)
        return found

    @functools.cached_property
    def phase_moments(self) -> Mapping[str, Ints]:
        """For each part of a step the moments at which something was allocated in it."""
        names = ("forward", "backward", "optimizer")
        return {name: distinct(self.first[self.at_phase(name) & (self.first > 0)]) for name in names}

    def category_mask(self, name: str) -> Mask:
        found: Mask = self.category == CATEGORIES.index(name)
        return found

    @functools.cached_property
    def category(self) -> npt.NDArray[np.int8]:
        """By allocation, into CATEGORIES: from the part of the step that made it, and from how long it lived.

        What is made in a forward pass and freed before its last allocation is a temporary, and the rest are
        activations; the same parts gradients from temporaries in a backward pass. What an optimizer makes and keeps
        beyond its step is its state.
        """
        found = np.full(len(self.bytes), CATEGORIES.index("unknown"), dtype=np.int8)
        found[self.at_phase("build")] = CATEGORIES.index("parameters")
        kept = {
            "forward": ("activations", self._outlives("forward", ("backward", "optimizer"))),
            "backward": ("gradients", self._outlives("backward", ("forward", "optimizer"))),
            "optimizer": ("optimizer state", self._outlives("optimizer", ("forward", "backward"))),
        }
        for phase, (name, long) in kept.items():
            made = self.at_phase(phase)
            found[made & long] = CATEGORIES.index(name)
            found[made & ~long] = CATEGORIES.index("temporaries")
        return found

    def _outlives(self, phase: str, others: Collection[str]) -> Mask:
        """Which allocations are still live when the run of this phase that they would belong to is over."""
        inside, over = self.phase_moments[phase], _next(self._moments_of(others), self.first, self.moments)
        if phase != "optimizer" and len(inside):  # an optimizer's state is what the next step finds
            over = inside[np.maximum(np.searchsorted(inside, over) - 1, 0)]
        found: Mask = (self.first == 0) | (self.last > over) | (self.last == self.moments)
        return found

    def _moments_of(self, phases: Collection[str]) -> Ints:
        return distinct(np.concatenate([self.phase_moments[name] for name in phases]))

    @functools.cached_property
    def steps(self) -> Ints:
        """The moments at which a step begins: the first allocation of a forward pass after a backward or an update."""
        forward, others = self.phase_moments["forward"], self._moments_of(("backward", "optimizer"))
        if not len(forward) or not len(others):
            return np.empty(0, dtype=np.int64)
        begins = np.searchsorted(others, forward)
        new = np.concatenate(([True], begins[1:] != begins[:-1]))
        return forward[new]

    def phase_at(self, moment: int) -> str:
        """The part of a step that allocated last up to a moment, or ""."""
        latest = ("", -1)
        for name, moments in self.phase_moments.items():
            at = int(np.searchsorted(moments, moment, side="right")) - 1
            if at >= 0 and moments[at] > latest[1]:
                latest = (name, int(moments[at]))
        return latest[0]

    def saving(self, removed_bytes: Ints) -> int:
        """By how much the peak falls if so many bytes were not live at each moment: the new peak may be elsewhere."""
        return max(0, int(self.live_bytes.max(initial=0) - (self.live_bytes - removed_bytes).max(initial=0)))

    def grouped(self, chosen: Mask, key: Callable[[Site], object]) -> list[tuple[object, Ints]]:
        """These allocations by what `key` says of their site: (key, rows), by bytes, most first."""
        rows = np.flatnonzero(chosen)
        keys: dict[object, int] = {}
        codes = np.array([keys.setdefault(key(site), len(keys)) for site in self.sites], dtype=np.int64)
        of_row = codes[self.site[rows]] if len(rows) else np.empty(0, dtype=np.int64)
        order = np.argsort(of_row, kind="stable")
        parts = np.split(rows[order], np.flatnonzero(np.diff(of_row[order])) + 1) if len(rows) else []
        names = list(keys)
        groups = [(names[codes[self.site[part[0]]]], part) for part in parts]
        return sorted(groups, key=lambda group: (-int(self.bytes[group[1]].sum()), str(group[0])))


def _next(moments: Ints, after: Ints, none: int) -> Ints:
    """For each of `after` the first of `moments` beyond it, else `none`.

    >>> _next(np.array([3, 7]), np.array([1, 3, 8]), 99).tolist()
    [3, 7, 99]
    """
    padded = np.append(moments, none)
    return padded[np.searchsorted(moments, after, side="right")]


def decimate(values: Ints, most: int = 2000) -> Ints:
    """Indices of at most so many points that keep the first, the least, the greatest and the last of every stretch.

    >>> decimate(np.array([1, 5, 2]), 4).tolist()
    [0, 1, 2]
    >>> values = np.arange(10_000) % 97; values[5003] = 10**6
    >>> kept = decimate(values, 400); (len(kept) <= 400, 5003 in kept, int(kept[-1]))
    (True, True, 9999)
    """
    if len(values) <= most:
        return np.arange(len(values), dtype=np.int64)
    kept: set[int] = set()
    edges = np.linspace(0, len(values), most // 4 + 1).astype(np.int64)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[begin:end]
        kept |= {begin, end - 1, begin + int(part.argmin()), begin + int(part.argmax())}
    return np.array(sorted(kept), dtype=np.int64)
