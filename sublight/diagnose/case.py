"""What a rule looks at: a trace's steps as a model, its items with their floors, and the replay to try a change on."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from sublight import units
from sublight.diagnose import replay
from sublight.diagnose.breakdown import Split
from sublight.diagnose.fusion import Group
from sublight.diagnose.model import Model
from sublight.diagnose.replay import Replay
from sublight.diagnose.work import Item
from sublight.results import Limits
from sublight.trace import intervals
from sublight.trace.attribute import ENGINE, Attribution
from sublight.trace.intervals import Floats, distinct
from sublight.trace.record import NONE, Ints, Kind, Trace
from sublight.trace.steps import Steps

Edit = Callable[[Model], Model]
PRODUCTS = ("matmul", "conv", "attention")
# a GPU at its power limit lowers its clock: large products alone, back to back, run 18 % slower on an H200 than with as
# much copying between them
POWER = 0.35


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything known of the steps; rules ask, and propose."""

    trace: Trace
    attribution: Attribution
    steps: Steps
    limits: Limits
    model: Model
    base: Replay
    items: list[Item]
    groups: list[Group]  # what could be one kernel
    split: Split
    profiled_step_s: float
    model_off: float = 0.0  # how far the model was off the measured step, of that, before it was fitted to it
    others: tuple[Trace, ...] = ()  # the other ranks
    too_good: tuple[str, ...] = ()  # ops that beat their floor, though no cache holds their bytes

    @property
    def on_gpu(self) -> bool:
        return self.trace.on_gpu

    @property
    def step_s(self) -> float:
        return self.base.step_s

    @functools.cached_property
    def sms(self) -> int | None:
        """The SMs of the GPU that ran the events; None where the trace does not tell."""
        rows = self.model.event_row[:1]
        index = self.trace.lanes[self.trace.lane[rows[0]]].device if len(rows) else NONE
        known = {device.index: device.sms for device in self.trace.devices}
        return known.get(index) or next((sms for sms in known.values() if sms), None)

    @functools.cached_property
    def events_of(self) -> Mapping[int, Ints]:
        """The model's events by item."""
        order = np.argsort(self.model.item, kind="stable")
        cuts = np.searchsorted(self.model.item[order], np.arange(len(self.items) + 1))
        return {item: order[cuts[item] : cuts[item + 1]] for item in range(len(self.items))}

    @functools.cached_property
    def in_optimizer(self) -> frozenset[int]:
        """The items whose op is an optimizer's own: inside its step, after what a closure does there."""
        trace = self.trace
        ranges = trace.rows_named(lambda name: name.startswith("Optimizer.step"))
        inside = intervals.union(self._after_closure(ranges), trace.end_ns[ranges])
        rows = np.array([item.row for item in self.items], dtype=np.int64)
        if not len(rows) or not len(inside):
            return frozenset()
        launch = self.attribution.launch[rows]
        rows = np.where((trace.kind[rows] == Kind.OP) | (launch == NONE), rows, launch)
        found = intervals.contain(inside, trace.start_ns[rows])
        return frozenset(np.flatnonzero(found).tolist())

    def _after_closure(self, ranges: Ints) -> Ints:
        """Where the optimizer's own work begins in each of its steps: a closure's forward and backward come before."""
        trace, starts = self.trace, self.trace.start_ns[ranges].copy()
        nodes = trace.rows_named(lambda name: name.startswith(ENGINE))
        ends = trace.end_ns[nodes]
        first = np.searchsorted(trace.start_ns[nodes], starts)
        last = np.searchsorted(trace.start_ns[nodes], trace.end_ns[ranges])
        for at in np.flatnonzero(last > first).tolist():
            starts[at] = max(int(starts[at]), int(ends[first[at] : last[at]].max()))
        return np.minimum(starts, trace.end_ns[ranges])

    def events(self, items: Iterable[int]) -> Ints:
        found = [self.events_of[item] for item in items]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def device_s(self, events: Ints) -> float:
        """Device time of these events per step; on several streams at once, no more than the step has."""
        return min(float(self.model.duration_s[events].sum()) / self.model.steps, self.step_s)

    def per_step(self, count: float) -> float:
        return count / self.model.steps

    def often(self, count: float) -> str:
        """How many that are a step, in words."""
        return units.count(self.per_step(count))

    def saving_s(self, edit: Edit, *, given: Edit | None = None) -> float:
        """What the step loses by a change, on top of another one where that is given."""
        before = self.replayed_s(given(self.model)) if given else self.base.step_s
        after = self.replayed_s(edit(given(self.model) if given else self.model))
        return max(before - after, 0.0)

    def replayed_s(self, model: Model) -> float:
        """The changed step; products that fill more of it than before draw more power, and run slower for it."""
        step_s = replay.step_s(model)
        more = self._share(model, step_s) - self._share(self.model, self.base.step_s)
        if more <= 0 or not self.on_gpu:
            return step_s
        duration = np.where(self._products, model.duration_s * (1 + POWER * more), model.duration_s)
        return replay.step_s(model.replace(duration_s=duration))

    @functools.cached_property
    def _products(self) -> np.ndarray:
        """Which events are work of the tensor cores."""
        heavy = np.array([item.family in PRODUCTS for item in self.items], dtype=bool)
        return heavy[self.model.item] if len(self.items) else np.zeros(0, dtype=bool)

    def floor_after_s(self, model: Model) -> float:
        """The step's floor after a change: an item that takes less than its floor has lost work to do."""
        spent = np.bincount(model.item, weights=model.duration_s, minlength=len(self.items)) / model.steps
        number = np.arange(len(self.items))
        for group in self.groups:
            number[list(group.items)] = group.items[0]  # one kernel of them has the work of all
        floor, left = (
            np.bincount(number, weights=column, minlength=len(self.items)) for column in (self.split.floor_s, spent)
        )
        return float(np.minimum(floor, left).sum())

    def _share(self, model: Model, step_s: float) -> float:
        return float(model.duration_s[self._products].sum()) / model.steps / max(step_s, 1e-12)

    def inside(self, rows: Ints) -> Ints:
        """The rows that start inside the steps."""
        start = self.trace.start_ns[rows]
        kept: Ints = rows[(start >= self.steps.spans_ns[0][0]) & (start < self.steps.spans_ns[-1][1])]
        return kept

    def lines(self, rows: Iterable[int], most: int = 3) -> str:
        """Where in the source these rows come from, the most frequent first; empty where the trace does not tell."""
        counts: dict[str, int] = defaultdict(int)
        for row in rows:
            source, module = self.attribution.place(int(row))
            if source or module:
                counts[source or module] += 1
        best = sorted(counts, key=lambda name: -counts[name])[:most]
        more = len(counts) - len(best)
        return ", ".join(best) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a rule proposes: the words of a finding, and the edit that its saving is replayed from."""

    title: str
    evidence: tuple[str, ...]
    fix: str
    edit: Edit
    cure: str = ""  # the line that has us do it
    cures: tuple[tuple[str, Edit], ...] = ()  # by its name, what a cure does that does less than the fix
    given: Edit | None = None  # another change that is assumed made: this one's saving comes on top
    rows: Ints | tuple[int, ...] = ()  # where it shows, as rows of the trace
    at: tuple[tuple[str, str], ...] = ()  # lines that are known otherwise than by rows, and what each takes in words
    ops: tuple[str, ...] = ()
    saving_s: float | None = None  # where the replay cannot tell, with the reason in the evidence
    floor_saving_s: float = 0.0  # of that, what lowers the floor, too: work that others get
    most_s: float = math.inf  # what it may claim: time that is not this cause's own is another finding's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cause of headroom: how to see it."""

    id: str
    check: Callable[[Case], Change | None]


def edit_durations(events: Ints, seconds: Floats) -> Edit:
    """Events that take this long, or what they took if that is less."""

    def edit(model: Model) -> Model:
        duration = model.duration_s.copy()
        duration[events] = np.minimum(duration[events], seconds)
        return model.replace(duration_s=duration)

    return edit


def drop(model: Model, events: Ints) -> Model:
    """Without these events; the host's time for calls that started nothing else goes with them."""
    duration, delay = model.duration_s.copy(), model.delay_s.copy()
    duration[events] = 0.0
    delay[events] = 0.0
    gone = np.zeros(len(model.event_row), dtype=bool)
    gone[events] = True
    kept_calls = distinct(model.call[~gone])
    calls = np.setdiff1d(distinct(model.call[events]), kept_calls, assume_unique=True)
    launch, cost = model.before_s["launch"].copy(), model.cost_s.copy()
    launch[calls] = 0.0
    cost[calls] = 0.0
    return model.replace(duration_s=duration, delay_s=delay, cost_s=cost, before_s={**model.before_s, "launch": launch})


def fuse(parts: list[tuple[Ints, float]]) -> Edit:
    """Each set of events becomes its first one, which takes so many seconds, or what they took if that is less."""

    def edit(model: Model) -> Model:
        firsts = np.array([events[0] for events, _ in parts], dtype=np.int64)
        times = np.array([min(seconds, float(model.duration_s[events].sum())) for events, seconds in parts])
        rest = [events[1:] for events, _ in parts if len(events) > 1]
        model = drop(model, np.concatenate(rest)) if rest else model
        duration = model.duration_s.copy()
        duration[firsts] = times
        return model.replace(duration_s=duration)

    return edit


def no_wait(model: Model, calls: Ints) -> Model:
    """These calls return at once."""
    waits_for, tail, cost = model.waits_for.copy(), model.tail_s.copy(), model.cost_s.copy()
    waits_for[calls] = NONE
    tail[calls] = 0.0
    cost[calls] = np.minimum(cost[calls], 2e-6)
    return model.replace(waits_for=waits_for, tail_s=tail, cost_s=cost)
