"""From a trace to an Explanation: steps, model, correction, breakdown, findings, verdict."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from sublight import units
from sublight.diagnose import breakdown, fusion, known, replay, tables
from sublight.diagnose import model as models
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.model import Model
from sublight.diagnose.record import Explanation, Finding, Place
from sublight.diagnose.rules import RULES
from sublight.diagnose.unprofiled import corrected, unprofiled_s, unprofiled_times_s
from sublight.diagnose.work import Item, cpu_items, device_rows, devices_of, gpu_items
from sublight.errors import BadInput
from sublight.results import TOO_GOOD, Limits
from sublight.trace import steps
from sublight.trace.attribute import Attribution, attribute
from sublight.trace.record import Trace
from sublight.trace.steps import Steps

SHOWN = 0.01  # of the step: a finding below it is not worth a reader's time
NAMED = 0.05  # of the step: a fix that saves less names no verdict
CACHE_BYTES = 64 << 20  # of an op's bytes, what may come from a cache rather than from memory
CROWDED = 1.5  # processes that want to run, a core
MODEL_OFF = 0.1  # of the measured step: said in a note
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
    left_out = len(traces) - 1 - len(others)
    case = _case(trace, found, limits, tuple(others))
    measured = unprofiled_s(trace)
    step_s = measured or case.profiled_step_s
    scale = step_s / case.step_s if measured else 1.0  # what the model of the step does not explain
    findings, combined = _findings(case, rules, scale)
    parts = _adding_up_to(step_s, case.split.parts if measured else case.traced.parts)
    op_floor_s, floor_s = (min(floor, step_s) for floor in _floors(case))
    verdict = findings[0].id if findings and findings[0].saving_s > NAMED * step_s else "healthy"
    return Explanation(
        source=source or trace.source,
        device=_device(trace, limits),
        kind="cuda" if trace.on_gpu else "cpu",
        limits=limits,
        limits_from=limits_from,
        steps=found.count,
        steps_from=str(trace.meta.get("steps_from") or found.found_by),
        step_s=step_s,
        step_spread_s=_spread(trace, found),
        op_floor_s=op_floor_s,
        floor_s=floor_s,
        verdict=verdict,
        sentence=_sentence(verdict, findings, step_s, floor_s, combined, limits),
        combined_saving_s=combined,
        breakdown=parts,
        findings=tuple(findings),
        ops=tables.ops(case),
        ranges=tables.ranges(case),
        notes=(*_notes(case, found, limits_from, others), *_left_out(left_out)),
        trace=trace,
        meta={"steps_s": [(start * 1e-9, end * 1e-9) for start, end in found.spans_ns]},
        window_s=(found.spans_ns[-1][0] * 1e-9, _window_end(case)),
    )


def _adding_up_to(step_s: float, parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of the step as it was measured: time that the model lacks is "other"; time too much is off the rest."""
    missing = step_s - sum(parts.values())
    if missing >= 0:
        return {**parts, "other": parts["other"] + missing}
    floors = parts["floor"] + parts["fusable"]
    rest = sum(parts.values()) - floors
    if rest + missing > 0:
        return {name: s if name in ("floor", "fusable") else s * (1 + missing / rest) for name, s in parts.items()}
    return {name: s * step_s / sum(parts.values()) for name, s in parts.items()}


def _by_rank(traces: Sequence[Trace]) -> list[Trace]:
    """The ranks in order: the first one's step is explained, and held against the others."""
    if not traces:
        raise BadInput("there is no trace to explain")
    return sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0))


def _case(trace: Trace, found: Steps, limits: Limits, others: tuple[Trace, ...]) -> Case:
    attribution = attribute(trace)
    model, items = _model(attribution, found, limits)
    profiled = replay.run(model)
    too_good = _settle_floors(trace, items)
    groups = fusion.groups(attribution, items, _order(model), limits)
    saved = fusion.saved(items, groups)
    traced = breakdown.split(model, profiled, items, saved)
    model = corrected(model, trace)
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
        split=breakdown.split(model, base, items, saved),
        profiled_step_s=profiled.step_s,
        traced=traced,
        others=others,
        too_good=too_good,
    )


def _settle_floors(trace: Trace, items: list[Item]) -> tuple[str, ...]:
    """An op that beat its floor read from the cache: its floor is what it took. One too large for that is named."""
    wrong: list[str] = []
    for item in items:
        took = item.took_s(trace)
        if item.floor_s is None or item.floor_s <= took:
            continue
        uncached = 1 - CACHE_BYTES / max(item.cost.bytes, 1) if item.cost is not None else 0.0
        if item.floor_s * uncached > TOO_GOOD * took:
            wrong.append(item.name)
        item.floor_s = took
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


def _findings(case: Case, rules: Sequence[Rule], scale: float = 1.0) -> tuple[list[Finding], float]:
    """The findings worth showing, largest first, and what all of them save together; `scale`: step over model."""
    found: list[tuple[Finding, Change]] = []
    for rule in rules:
        change = rule.check(case)
        if change is None:
            continue
        saving = case.saving_s(change.edit, given=change.given) if change.saving_s is None else change.saving_s
        saving = min(scale * min(saving, case.step_s), change.most_s)
        if saving > SHOWN * scale * case.step_s:
            found.append((_finding(case, rule.id, change, saving), change))
    found.sort(key=lambda pair: -pair[0].saving_s)
    model = case.model
    apart = 0.0
    for finding, change in found:
        if change.saving_s is None:
            model = change.edit(change.given(model) if change.given else model)
        else:
            apart += finding.saving_s
    combined = scale * max(case.step_s - case.replayed_s(model), 0.0) + apart
    largest = found[0][0].saving_s if found else 0.0
    total = sum(finding.saving_s for finding, _ in found)
    whole = max(scale * case.step_s, case.profiled_step_s)
    return [finding for finding, _ in found], min(max(combined, largest), total, whole)


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
        title=change.title,
        saving_s=saving_s,
        evidence=change.evidence,
        fix=change.fix,
        cure=change.cure,
        places=places,
        ops=change.ops,
    )


def _floors(case: Case) -> tuple[float, float]:
    """The ops as written at their floors, and after fusion; an op of unknown cost counts as it was measured."""
    busy = case.split.busy_s
    unknown = sum(float(spent) for item, spent in zip(case.items, busy, strict=True) if item.floor_s is None)
    compute = [item for item, spent in zip(case.items, busy, strict=True) if item.floor_s is not None and spent > 0]
    floors = sum(item.floor_s or 0.0 for item in compute) / case.model.steps
    saved = float(fusion.saved(case.items, case.groups).sum()) / case.model.steps
    op_floor = min(floors + unknown, case.step_s)
    return op_floor, max(min(floors - saved + unknown, op_floor), 0.0)


def _left_out(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    return (
        f"{count} other trace{'s' if count > 1 else ''} without a rank or a device were left out: name each alone.",
    )


def _device(trace: Trace, limits: Limits) -> str:
    if trace.on_gpu:
        return known.device_name(trace) or limits.device
    return str(trace.meta.get("cpu") or limits.device)


def _spread(trace: Trace, found: Steps) -> float:
    times = unprofiled_times_s(trace)
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


def _sentence(
    verdict: str, findings: list[Finding], step_s: float, floor_s: float, combined: float, limits: Limits
) -> str:
    step = units.text(step_s, "s")
    known_floor = f", {units.percent(floor_s / step_s)} of it at the floor" if limits.limits and floor_s else ""
    if verdict == "healthy":
        best = (
            f"the largest would save {units.percent(findings[0].saving_s / step_s)}" if findings else "none was found"
        )
        return f"healthy: no fix that has a name saves more than 5 % of the {step} step ({best}){known_floor}"
    first = findings[0]
    together = f"; everything found together {units.text(combined, 's')}" if len(findings) > 1 else ""
    share = units.percent(first.saving_s / step_s)
    return f"{first.id}: {first.title}. Fixing it saves {units.text(first.saving_s, 's')} of {step} ({share}){together}"


def _notes(case: Case, found: Steps, limits_from: str, others: Sequence[Trace]) -> tuple[str, ...]:
    said = list(case.trace.lost)
    if not case.trace.on_gpu and any(device.name for device in case.trace.devices):
        said.append("The trace names a GPU but holds nothing that ran on it: only the host's side can be explained.")
    if found.skipped:
        said.append(f"{found.skipped} step at the front was left out as warm-up.")
    unknown: dict[str, float] = defaultdict(float)
    for item, spent in zip(case.items, case.split.busy_s.tolist(), strict=True):
        if item.floor_s is None:
            unknown[item.name] += spent
    total = sum(unknown.values())
    if total > 0.005 * case.step_s:
        worst = sorted(unknown, key=lambda name: -unknown[name])[:4]
        names = ", ".join(f"{name[:60]} ({units.percent(unknown[name] / case.step_s)})" for name in worst)
        more = f" and {len(unknown) - len(worst)} more" if len(unknown) > len(worst) else ""
        said.append(
            f"The cost of {units.percent(total / case.step_s)} of the step is not known, and counts in the floor as it "
            f"was measured: {names}{more}."
        )
    if case.too_good:
        names = ", ".join(case.too_good[:3])
        why = "the known figures are too low" if limits_from.startswith("known") else "measure without --quick"
        said.append(f"Faster than the floor, so a limit is too low: {names} ({why}).")
    if limits_from.startswith("none"):
        said.append(f"Limits: {limits_from}.")
    measured = unprofiled_s(case.trace)
    if not measured and case.profiled_step_s > (1 + MODEL_OFF) * case.step_s:
        said.append(
            f"Recording cost about {units.text(case.profiled_step_s - case.step_s, 's')} of the traced step, an "
            "estimate: the bar shows the traced step, the findings are counted without that."
        )
    if measured and case.profiled_step_s > (1 + MODEL_OFF) * measured:
        profiled = units.text(case.profiled_step_s, "s")
        said.append(
            f"Under the profiler a step took {profiled}: the timeline shows that one, the figures the real one."
        )
    if measured and abs(measured - case.step_s) > MODEL_OFF * measured:
        said.append(f"The model of the step is {units.percent(abs(case.step_s / measured - 1))} off the measured time.")
    used = set(devices_of(case.trace)[case.trace.lane[case.trace.device_rows]].tolist())
    if len(used) > 1:
        mine = int(devices_of(case.trace)[case.trace.lane[case.model.event_row[0]]]) if len(case.model.event_row) else 0
        said.append(f"The process uses {len(used)} GPUs; the figures are those of GPU {mine}, the busiest.")
    if others:
        whose = f"rank {case.trace.rank}'s" if case.trace.rank is not None else f"those of {case.trace.source}"
        said.append(f"{len(others) + 1} ranks were read; the figures are {whose}.")
    load, cores = case.trace.meta.get("load"), case.trace.meta.get("cores")
    if isinstance(load, int | float) and isinstance(cores, int) and cores > 0 and load > CROWDED * cores:
        said.append(f"The machine was busy: a load of {load:.1f} on {cores} cores. The host's times are too long.")
    if not case.trace.on_gpu and not len(case.items):
        said.append("The trace has no device events and no op with a cost: only the host's time is split.")
    return tuple(said)
