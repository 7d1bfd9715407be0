"""From a trace to an Explanation: steps, model, correction, breakdown, findings, verdict."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sublight.diagnose import breakdown, fusion, idle, jax_advice, known, replay, tables, trainer, words
from sublight.diagnose import model as models
from sublight.diagnose import source as sources
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.items import cpu_items, gpu_items
from sublight.diagnose.model import Model
from sublight.diagnose.record import BUSY, Explanation, Finding, Place
from sublight.diagnose.rules import RULES
from sublight.diagnose.unprofiled import corrected, measured_s, unprofiled_times_s
from sublight.diagnose.work import Item, device_rows
from sublight.errors import BadInput
from sublight.results import TOO_GOOD, Limits
from sublight.trace import cut as cuts
from sublight.trace import steps
from sublight.trace.attribute import Attribution, attribute
from sublight.trace.record import XLA_CPU, Trace
from sublight.trace.steps import Steps

SHOWN = 0.01  # of the step: a finding below it is not worth a reader's time
NAMED = 0.05  # of the step: a fix that saves less names no verdict
CACHE_BYTES = 64 << 20  # of an op's bytes, what may come from a cache rather than from memory
PLACES = 40  # of a finding, in the timeline


def explain(
    traces: Sequence[Trace], *, gpu: str = "", limits_file: str = "", source: str = "", rules: Sequence[Rule] = RULES
) -> Explanation:
    """What the first trace's steps are made of; the others are its fellow ranks."""
    trace, *others = _by_rank(traces)
    found = steps.find(trace)
    limits, limits_from = known.limits_for(trace, gpu=gpu, file=limits_file)
    others = [
        other for other in others if other.on_gpu == trace.on_gpu and (other.rank is not None or not trace.on_gpu)
    ]
    chosen = cuts.typical(trace, found)
    part = trace if chosen is found else cuts.cut(trace, chosen.spans_ns[0][0], chosen.spans_ns[-1][1])
    case = _case(part, chosen, limits, tuple(others))
    step_s = measured_s(trace, case.profiled_step_s) or case.step_s
    parts = _adding_up_to(step_s, case.split.parts)
    floor_s = parts["floor"] + parts["unknown"]
    judged = _judged(case, rules, step_s)
    first = judged.findings[0] if judged.findings else None
    spread_s = _spread(trace, found, timed=step_s != case.profiled_step_s)
    caveats, unsure = words.caveats(case, limits_from, step_s=step_s, spread_s=spread_s)
    explanation = Explanation(
        source=source or trace.source,
        device=known.device_of(trace, limits),
        kind="cuda" if trace.on_gpu and known.device_name(trace) != XLA_CPU else "cpu",
        limits=limits,
        limits_from=limits_from,
        steps=chosen.count,
        steps_from=str(trace.meta.get("steps_from") or found.found_by),
        step_s=step_s,
        step_spread_s=spread_s,
        op_floor_s=floor_s + parts["fusable"],
        floor_s=floor_s,
        fixed_floor_s=min(judged.floor_s, floor_s),
        traced_step_s=case.profiled_step_s,
        verdict=first.id if first and first.saving_s > NAMED * step_s else "healthy",
        sentence="",
        combined_saving_s=judged.combined_s,
        breakdown=parts,
        findings=tuple(judged.findings),
        ops=tables.ops(case),
        ranges=tables.ranges(case),
        caveats=caveats,
        unsure=unsure,
        notes=words.notes(case, limits_from, recorded=found.count, left_out=len(traces) - 1 - len(others)),
        trace=trace,
        meta={"steps_s": [(start * 1e-9, end * 1e-9) for start, end in found.spans_ns]},
        window_s=(chosen.spans_ns[-1][0] * 1e-9, _window_end(case)),
    )
    explanation = words.with_sentence(explanation)
    if os.environ.get("SUBLIGHT_CHECK"):  # the tests set it: no report of theirs contradicts itself
        wrong = contradictions(explanation)
        assert not wrong, wrong
    return explanation


def _adding_up_to(step_s: float, parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of the step as it was measured: time that the model lacks is "other"; time too much is off the idle
    time, and off everything only where that is not enough.
    """
    missing = step_s - sum(parts.values())
    if missing >= 0:
        return {**parts, "other": parts["other"] + missing}
    idle_s = sum(seconds for name, seconds in parts.items() if name not in BUSY)
    if idle_s + missing > 0:
        return {name: s if name in BUSY else s * (1 + missing / idle_s) for name, s in parts.items()}
    return {name: s * step_s / sum(parts.values()) for name, s in parts.items()}


def _by_rank(traces: Sequence[Trace]) -> list[Trace]:
    """The ranks in order: the first one's step is explained, and held against the others."""
    if not traces:
        raise BadInput("there is no trace to explain")
    return sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0))


def _case(trace: Trace, found: Steps, limits: Limits, others: tuple[Trace, ...]) -> Case:
    attribution = attribute(trace)
    model, items = _model(attribution, found, limits)
    profiled_step_s = replay.step_s(model)
    too_good = _settle_floors(items)
    groups = fusion.groups(attribution, items, _order(model), limits)
    model, model_off = corrected(model, trace)
    base = replay.run(model)
    return Case(
        trace=trace,
        attribution=attribution,
        steps=found,
        limits=limits,
        model=model,
        base=base,
        items=items,
        groups=groups,
        split=breakdown.split(model, base, items, fusion.saved(items, groups)),
        profiled_step_s=profiled_step_s,
        model_off=model_off,
        others=others,
        too_good=too_good,
    )


def _settle_floors(items: list[Item]) -> tuple[str, ...]:
    """An op that beat its floor may have read from a cache: what it took is its floor then. One too large for that
    keeps its floor, which shows in its row as an error, and is named: its cost or a limit is wrong.
    """
    wrong: list[str] = []
    for item in items:
        took = item.took_s
        if item.floor_s is None or item.floor_s <= took:
            continue
        uncached = 1 - CACHE_BYTES / max(item.cost.bytes, 1) if item.cost is not None else 0.0
        if item.floor_s * uncached > TOO_GOOD * took:
            item.too_good = True
            wrong.append(item.name)
        else:
            item.floor_s, item.cached = took, item.bound == "memory"
    return tuple(dict.fromkeys(wrong))


def _model(attribution: Attribution, found: Steps, limits: Limits) -> tuple[Model, list[Item]]:
    trace = attribution.trace
    if not trace.on_gpu:
        items = cpu_items(attribution, found.spans_ns, limits)
        return models.build_cpu(trace, found, items), items
    rows = device_rows(attribution, found)
    items, item_of = gpu_items(attribution, rows, limits)
    return models.build(attribution, found, rows, items, item_of), items


def _order(model: Model) -> list[list[int]]:
    """The items of each stream and step in the order they ran."""
    lines: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stream, call, item in zip(model.stream.tolist(), model.call.tolist(), model.item.tolist(), strict=True):
        line = lines[stream, int(model.step[call])]
        if not line or line[-1] != item:
            line.append(item)
    return list(lines.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The findings worth showing, largest first; what all of them save together; the floor after all of them."""

    findings: list[Finding]
    combined_s: float
    floor_s: float


def _judged(case: Case, rules: Sequence[Rule], step_s: float) -> Judged:
    found: list[tuple[Finding, Change]] = []
    for rule in rules:
        change = rule.check(case)
        if change is not None and (saving := _saving_s(case, change, step_s)) > SHOWN * step_s:
            by_cure = {
                name: min(_saving_s(case, replace(change, edit=edit), step_s), saving) for name, edit in change.cures
            }
            found.append((replace(_finding(case, rule.id, change, saving), cure_savings_s=by_cure), change))
    model = _changed(case, [change for _, change in _largest_first(found)])
    named = [finding.id for finding, _ in found if finding.saving_s > NAMED * step_s]
    if rules is RULES and (change := idle.unexplained(case, model, named, step_s)):
        found.append((_finding(case, idle.ID, change, _saving_s(case, change, step_s)), change))
    found = _largest_first(found)
    apart_s = sum(finding.saving_s for finding, change in found if change.saving_s is not None)
    floor_s = max(case.floor_after_s(model) - sum(change.floor_saving_s for _, change in found), 0.0)
    savings = [finding.saving_s for finding, _ in found]
    combined = max(case.step_s - case.replayed_s(model), 0.0) + apart_s
    combined = min(max([combined, *savings]), sum(savings), max([step_s - floor_s, *savings]))
    return Judged(findings=[finding for finding, _ in found], combined_s=combined, floor_s=floor_s)


def _largest_first(found: list[tuple[Finding, Change]]) -> list[tuple[Finding, Change]]:
    return sorted(found, key=lambda pair: -pair[0].saving_s)


def _saving_s(case: Case, change: Change, step_s: float) -> float:
    """A change's saving, by the replay or as the rule counts it; no more than the step's time above the new floor."""
    if change.saving_s is not None:
        most_s = step_s - case.floor_after_s(case.model) + change.floor_saving_s
        return max(min(change.saving_s, change.most_s, most_s, step_s), 0.0)
    least_s = case.floor_after_s(_changed(case, [change]))
    saving = case.saving_s(change.edit, given=change.given)
    return max(min(saving, change.most_s, case.step_s - least_s), 0.0)


def _changed(case: Case, changes: Sequence[Change]) -> Model:
    """The model with all of these changes that can be replayed."""
    model = case.model
    for change in changes:
        if change.saving_s is None:
            model = change.edit(change.given(model) if change.given else model)
    return model


def _finding(case: Case, name: str, change: Change, saving_s: float) -> Finding:
    rows = np.asarray(change.rows, dtype=np.int64)
    low = case.steps.spans_ns[-1][0]
    here = rows[case.trace.start_ns[rows] >= low] if len(rows) else rows
    shown = here if len(here) else rows
    longest = shown[np.argsort(case.trace.start_ns[shown] - case.trace.end_ns[shown], kind="stable")][:PLACES]
    places = tuple(
        Place(
            start_s=float(case.trace.start_ns[row]) * 1e-9,
            end_s=float(case.trace.end_ns[row]) * 1e-9,
            label=case.trace.name_of(row),
        )
        for row in np.sort(longest).tolist()
    )
    return Finding(
        id=name,
        title=_sentence_case(change.title),
        saving_s=saving_s,
        evidence=change.evidence,
        fix=_fix(case.trace, name, change.fix),
        cure=change.cure if case.trace.tool != "jax" else "",
        places=places,
        ops=change.ops,
        sources=sources.named(case.trace, change.at) or sources.lines(case.attribution, rows, case.model.steps, name),
    )


def _fix(trace: Trace, finding: str, plain: str) -> str:
    """The rule's, in the words of what runs the steps."""
    if trace.tool == "jax":
        return jax_advice.fix(finding, plain)
    return trainer.fix(finding, plain) if trainer.runs(trace) else plain


def _sentence_case(title: str) -> str:
    """A sentence with a capital, unless it begins with a name.

    >>> _sentence_case("the host waits"), _sentence_case("aten::mm reaches 2 %"), _sentence_case("torch.compile loses")
    ('The host waits', 'aten::mm reaches 2 %', 'torch.compile loses')
    """
    first = title.partition(" ")[0]
    return title if any(sign in first for sign in ":._`(") else title[:1].upper() + title[1:]


def _spread(trace: Trace, found: Steps, *, timed: bool) -> float:
    times = unprofiled_times_s(trace) if timed else []
    lengths = times if len(times) > 1 else [(end - start) * 1e-9 for start, end in found.spans_ns]
    if len(lengths) < 2:
        return 0.0
    low, _, high = statistics.quantiles(lengths, n=4)
    return (high - low) / 2


def _window_end(case: Case) -> float:
    """The end of the last step on the host, or of its work on the device if that is later."""
    events = case.model.event_row
    end = case.steps.spans_ns[-1][1]
    if case.trace.on_gpu and len(events):
        end = max(end, int(case.trace.end_ns[events].max()))
    return end * 1e-9
