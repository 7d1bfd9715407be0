"""Does a patch pay? A step before and after, timed and with its peak of memory; what does not pay is undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sublight import units
from sublight.fix.patch.step import as_it_was, call, loss_of
from sublight.results import Samples
from sublight.timing import collect

TIME_LIMIT_S = 2.0  # for one timing; half of it warms up at most
NOISE = 2.0  # spreads: a rule that changes less than this is taken not to matter, and stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A step of the model: forward, and backward where it trains."""

    samples: Samples
    peak_bytes: int | None  # None: there is no GPU

    @property
    def sentence(self) -> str:
        spread = units.text(self.samples.spread_s, "s")
        memory = f", {units.text(self.peak_bytes, 'B')} at the peak" if self.peak_bytes is not None else ""
        return f"{units.text(self.samples.median_s, 's')} ± {spread}{memory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """What a patch brought."""

    before: Timed
    after: Timed
    undone: tuple[tuple[str, float], ...] = ()  # rule, seconds that it cost

    @property
    def speedup(self) -> float:
        return self.before.samples.median_s / self.after.samples.median_s

    @property
    def sentence(self) -> str:
        return f"{self.before.sentence} before, {self.after.sentence} after: {self.speedup:.2f} times as fast"


def timed(model: torch.nn.Module, batch: Any, *, time_limit_s: float = TIME_LIMIT_S) -> Timed:
    """Wall time of steps, the device waited for, as a training loop sees it; the model is left as it was."""
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)

    def one() -> float:
        begin = time.perf_counter()
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(model.training):
            output = call(model, batch)
        if model.training and (loss := loss_of(output)).requires_grad:
            loss.backward()
        if device is not None:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    with as_it_was(model):
        for _ in range(3):
            one()
        if device is not None:
            torch.cuda.reset_peak_memory_stats(device)
        samples = Samples(times_s=tuple(collect(one, time_limit_s)), method="wall")
        peak = torch.cuda.max_memory_allocated(device) if device is not None else None
    return Timed(samples=samples, peak_bytes=peak)


def keep_what_pays(
    model: torch.nn.Module, batch: Any, rules: Sequence[str], apply: Callable[[Sequence[str]], None]
) -> Paid:
    """Time the model plain, patched, and without each rule; a rule without which it is faster is undone."""
    apply([])
    before = timed(model, batch)
    apply(rules)
    after = timed(model, batch)
    undone: list[tuple[str, float]] = []
    kept = list(rules)
    for rule in rules if len(rules) > 1 else ():
        rest = [other for other in kept if other != rule]
        apply(rest)
        without = timed(model, batch)
        cost_s = after.samples.median_s - without.samples.median_s
        if cost_s > NOISE * max(after.samples.spread_s, without.samples.spread_s):
            undone.append((rule, cost_s))
            kept, after = rest, without
    apply(kept)
    if after.samples.median_s - before.samples.median_s > NOISE * max(after.samples.spread_s, before.samples.spread_s):
        undone += [(rule, after.samples.median_s - before.samples.median_s) for rule in kept]
        apply([])
        after = before
    return Paid(before=before, after=after, undone=tuple(undone))
