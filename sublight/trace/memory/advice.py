"""What would lower the peak, one rule a function: (Ledger) -> Advice | None.

A saving is the peak minus the peak of the same curve with those bytes taken out, so it never promises what a second,
nearly equal peak would take back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight import units
from sublight.trace.memory.ledger import Ledger
from sublight.trace.record import Ints, Mask

WORTH = 0.01  # of the peak: less is not said
ACTIVATIONS_SHARE = 0.40
OPTIMIZER_SHARE = 0.15
FRAGMENTED = 0.15  # of the reserved bytes
CACHED = 0.25
BIG_BLOCK = 0.10  # of the peak
CHUNKS = 8  # of a chunked loss
SPIKE = 1.3  # the peak over what is held nearly always
SPIKE_BLOCKS = 3  # so many allocations make most of a spike that can be named
NEARLY_ALWAYS = 0.95
LEAK_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that lowers the peak, or what is reserved beyond it."""

    id: str
    title: str
    saving_bytes: int
    evidence: tuple[str, ...]  # what was seen, and how the saving was computed
    fix: str

    def to_json(self) -> dict[str, Any]:
        names = ("id", "title", "saving_bytes", "fix")
        return {**{name: getattr(self, name) for name in names}, "evidence": list(self.evidence)}


def advise(ledger: Ledger) -> tuple[Advice, ...]:
    """The advice, the largest saving first."""
    found = [advice for rule in RULES if (advice := rule(ledger)) is not None]
    least = WORTH * int(ledger.live_bytes.max(initial=0))
    return tuple(sorted((each for each in found if each.saving_bytes > least), key=lambda each: -each.saving_bytes))


def activations(ledger: Ledger) -> Advice | None:
    """Activations grow with the micro-batch, so half of it holds half of them."""
    chosen = ledger.category_mask("activations")
    held, share = _at_peak(ledger, chosen)
    if share < ACTIVATIONS_SHARE:
        return None
    return Advice(
        id="activations",
        title=f"activations are {units.percent(share)} of the peak: {units.text(held, 'B')}",
        saving_bytes=ledger.saving(ledger.curve(chosen) // 2),
        evidence=(
            *_largest(ledger, chosen),
            "saving: the peak with half of the activations, which half the micro-batch holds; checkpointing a deep "
            "model saves more",
        ),
        fix=(
            "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # keeps a block's input alone\n"
            "# or halve the micro-batch, and step after two: (loss / 2).backward()"
        ),
    )


def optimizer_state(ledger: Ledger) -> Advice | None:
    """State in eight bits is at most half of what any state of 16 or 32 bits takes."""
    chosen = ledger.category_mask("optimizer state")
    held, share = _at_peak(ledger, chosen)
    if share < OPTIMIZER_SHARE:
        return None
    parameters, _ = _at_peak(ledger, ledger.category_mask("parameters"))
    times = f"{held / parameters:.1f} times the parameters" if parameters else "the parameters were not recorded"
    return Advice(
        id="optimizer-state",
        title=f"the optimizer's state is {units.percent(share)} of the peak: {units.text(held, 'B')}",
        saving_bytes=ledger.saving(ledger.curve(chosen) // 2),
        evidence=(
            f"state: {units.text(held, 'B')}, {times}",
            "saving: the peak with half of it; 8-bit state takes a quarter of fp32, half of bf16",
        ),
        fix="optimizer = torchao.optim.AdamW8bit(model.parameters())  # or shard it over ranks: fully_shard(model)",
    )


def kept_gradients(ledger: Ledger) -> Advice | None:
    """Gradients that are live while the next forward pass runs."""
    chosen = ledger.category_mask("gradients")
    if ledger.phase_at(ledger.peak) != "forward":
        return None
    held, share = _at_peak(ledger, chosen)
    if not held:
        return None
    gone = np.where(_in_forward(ledger), ledger.curve(chosen), 0)
    return Advice(
        id="kept-gradients",
        title=f"gradients of the step before are live in the forward pass: {units.text(held, 'B')}",
        saving_bytes=ledger.saving(gone),
        evidence=(
            f"at the peak, in a forward pass, gradients hold {units.percent(share)}",
            "saving: the peak without them while forward passes run; none if gradients are accumulated on purpose",
        ),
        fix="optimizer.zero_grad(set_to_none=True)  # before the forward pass, not after it",
    )


def fragmentation(ledger: Ledger) -> Advice | None:
    """Holes between live blocks, which expandable segments give back page by page."""
    if ledger.stuck_bytes is None or ledger.reserved_bytes is None:
        return None
    reserved = int(ledger.reserved_bytes[ledger.peak])
    if not reserved or ledger.stuck_bytes / reserved <= FRAGMENTED:
        return None
    return Advice(
        id="fragmentation",
        title=f"{units.percent(ledger.stuck_bytes / reserved)} of the reserved memory is holes at the peak",
        saving_bytes=ledger.stuck_page_bytes,
        evidence=(
            f"reserved {units.text(reserved, 'B')}, of it {units.text(ledger.stuck_bytes, 'B')} lie unused in segments "
            "that live blocks keep",
            "saving, of reserved memory: the pages that lie wholly in a hole",
        ),
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def cached(ledger: Ledger) -> Advice | None:
    """Segments that nothing uses even at the peak."""
    if ledger.reserved_bytes is None or not ledger.cached_bytes:
        return None
    reserved = int(ledger.reserved_bytes[ledger.peak])
    if ledger.cached_bytes / max(1, reserved) <= CACHED:
        return None
    return Advice(
        id="unused-cache",
        title=f"{units.text(ledger.cached_bytes, 'B')} are reserved and not used even at the peak",
        saving_bytes=ledger.cached_bytes,
        evidence=("saving, of reserved memory: the segments that hold no live block at the peak",),
        fix=(
            "torch.cuda.empty_cache()  # once, after what needed them (loading, warm-up)\n"
            "# or PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8"
        ),
    )


def big_logits(ledger: Ledger) -> Advice | None:
    """Single blocks of a loss or its logits that a chunked loss would hold an eighth of at a time."""
    least = BIG_BLOCK * int(ledger.live_bytes.max(initial=0))
    marked = np.array([site.loss for site in ledger.sites])[ledger.site]
    chosen = marked & (ledger.bytes > least)
    now = chosen & ledger.live_at(ledger.peak)
    if not now.any():
        return None
    held = int(ledger.bytes[now].sum())
    removed = ledger.curve(chosen) * (CHUNKS - 1) // CHUNKS
    return Advice(
        id="big-logits",
        title=f"a loss and its logits hold {units.text(held, 'B')} at the peak, in {_count(int(now.sum()), 'block')}",
        saving_bytes=ledger.saving(removed),
        evidence=(
            *_largest(ledger, chosen),
            f"saving: the peak with one of {CHUNKS} chunks of these live at a time",
        ),
        fix=(
            f"for part, wanted in zip(hidden.chunk({CHUNKS}), target.chunk({CHUNKS})):  # a part's logits at a time\n"
            "    loss = torch.utils.checkpoint.checkpoint(part_loss, part, wanted, use_reentrant=False)  # sum them\n"
            "# or a fused linear cross entropy, such as Liger's"
        ),
    )


def spike(ledger: Ledger) -> Advice | None:
    """A short rise that a few allocations make."""
    peak = int(ledger.live_bytes.max(initial=0))
    plateau = _held_for(ledger, NEARLY_ALWAYS)
    falls = bool((ledger.live_bytes[ledger.peak :] <= plateau).any())
    if plateau <= 0 or peak < SPIKE * plateau or not falls:
        return None
    below = np.flatnonzero(ledger.live_bytes[: ledger.peak] <= plateau)
    begin = int(below[-1]) if len(below) else 0
    made = np.flatnonzero(ledger.live_at(ledger.peak) & (ledger.first > begin))
    few = made[np.argsort(-ledger.bytes[made], kind="stable")][:SPIKE_BLOCKS]
    if ledger.bytes[few].sum() < 0.8 * (peak - plateau):
        return None
    mask = np.zeros(len(ledger.bytes), dtype=bool)
    mask[few] = True
    return Advice(
        id="spike",
        title=f"a spike: {units.text(peak, 'B')} at the peak, {units.text(plateau, 'B')} or less "
        f"{units.percent(NEARLY_ALWAYS)} of the time",
        saving_bytes=min(peak - plateau, ledger.saving(ledger.curve(mask))),
        evidence=(
            *_largest(ledger, mask),
            f"saving: the peak without the {_count(len(few), 'allocation')} that make it, down to the plateau at most",
        ),
        fix="# at the lines above: work in chunks, write in place (out=, *_()), or del what is not needed before them",
    )


def leak(ledger: Ledger) -> Advice | None:
    """Live bytes at the start of each step that grow by about the same every time."""
    steps = ledger.steps[1:]  # the first step makes the optimizer's state, and that stays
    if len(steps) < LEAK_STEPS:
        return None
    level = ledger.live_bytes[steps - 1]
    growth = np.diff(level)
    usual = float(np.median(growth))
    if usual <= 0 or growth.min() < 0.5 * usual or growth.max() > 2 * usual:
        return None
    grown = (ledger.first >= steps[0]) & (ledger.first < steps[-1]) & (ledger.last >= steps[-1])
    mask = grown & (ledger.last == ledger.moments)
    if not mask.any():
        return None
    return Advice(
        id="leak",
        title=f"live memory grows by {units.text(usual, 'B')} a step: {units.text(float(level[-1] - level[0]), 'B')} "
        f"over {len(steps) - 1} steps",
        saving_bytes=ledger.saving(ledger.curve(mask)),
        evidence=(
            *_largest(ledger, mask),
            "saving: the peak without what these steps made and nothing freed; it grows with every step",
        ),
        fix="losses.append(loss.item())  # or loss.detach(): a kept tensor keeps its whole graph",
    )


RULES = (activations, optimizer_state, kept_gradients, fragmentation, cached, big_logits, spike, leak)


def _at_peak(ledger: Ledger, chosen: Mask) -> tuple[int, float]:
    """Bytes of these at the peak, and their share of it."""
    held = int(ledger.bytes[chosen & ledger.live_at(ledger.peak)].sum())
    return held, held / max(1, int(ledger.live_bytes.max(initial=0)))


def _largest(ledger: Ledger, chosen: Mask, most: int = 3) -> Iterator[str]:
    """The lines that hold the most of these at the peak."""
    groups = ledger.grouped(chosen & ledger.live_at(ledger.peak), lambda site: (site.name, site.source))
    for place, rows in groups[:most]:
        assert isinstance(place, tuple)
        name, source = place
        where = f"{source} {name}" if source else name
        yield f"{where}: {units.text(int(ledger.bytes[rows].sum()), 'B')} in {_count(len(rows), 'block')}"


def _in_forward(ledger: Ledger) -> Mask:
    """By moment: whether the last allocation of any part of a step was a forward pass's."""
    latest = np.full(ledger.moments, -1, dtype=np.int64)
    forward = np.zeros(ledger.moments, dtype=bool)
    for name, moments in ledger.phase_moments.items():
        at = np.searchsorted(moments, np.arange(ledger.moments), side="right") - 1
        when: Ints = np.where(at >= 0, np.append(moments, 0)[np.maximum(at, 0)], -1)
        later = when > latest
        latest[later] = when[later]
        forward[later] = name == "forward"
    return forward


def _held_for(ledger: Ledger, share: float) -> int:
    """The level that live memory does not pass for this share of the time."""
    spans = np.diff(ledger.times_s)
    levels = ledger.live_bytes[:-1]
    if not len(spans) or spans.sum() <= 0:
        return 0
    order = np.argsort(levels, kind="stable")
    passed = np.cumsum(spans[order]) / spans.sum()
    return int(levels[order][min(int(np.searchsorted(passed, share)), len(order) - 1)])


def _count(number: int, noun: str) -> str:
    """
    >>> _count(1, "block"), _count(1200, "block")
    ('1 block', '1,200 blocks')
    """
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
