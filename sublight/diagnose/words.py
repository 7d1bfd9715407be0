"""The words of an Explanation: its one sentence, what limits trust in it, and what else a reader must know."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from sublight import units
from sublight.diagnose import memory_growth
from sublight.diagnose.case import Case
from sublight.diagnose.record import NOT_JUDGED, Explanation
from sublight.diagnose.unprofiled import crowded, has_stacks, unprofiled_s
from sublight.diagnose.work import backlog, devices_of
from sublight.results import TOO_GOOD
from sublight.trace.record import NONE, Kind, Trace

WHOLE_RUN = "the whole run"  # how a capture calls what it recorded where it saw no step,
COLD = "no step after the warm-up could be profiled"  # and what it notes of the first ones
NO_OPTIMIZER_STEP = "an optimizer exists, and did not step"
FIRST_STEPS = "The steps are the script's first ones, before it was warm: a longer run gives better figures."
MODEL_OFF = 0.1  # of the measured step
FEW = 0.01  # of the events: so many more or fewer turn no verdict
UNEVEN = 0.25  # of the step: steps that differ by more have no typical one
LITTLE = 10  # ops or kernels: fewer, where no step repeats them, are no ground for a verdict
FAR = 0.3  # of the limit: a step that reaches less is not called healthy, though no rule says why
UNTOLD = 0.5  # of the step: with no cost known for more of it, nothing shows that it is healthy
DISTORTED = 0.2  # of the traced step: the profiler's own cost, where it is only estimated

APART_NS = 2_000_000  # between a launch and its kernel on an idle device: more than a driver takes

_LITTLE = "All that was recorded is"
_HOST_SIDE = f"{_LITTLE} the host's side of the steps"


def of_run(words: str) -> str:
    """A rule's words about steps, where there are none to speak of.

    >>> of_run("61 checks a step take 3 ms of each step"), of_run("the step waits; 2 ms of a step of 9 ms")
    ('61 checks in the run take 3 ms of the run', 'the run waits; 2 ms of a run of 9 ms')
    """
    words = re.sub(r"\bof a step\b", "of a run", words)
    words = re.sub(r"\b(each|the|The) step\b", lambda found: "The run" if found[1] == "The" else "the run", words)
    return re.sub(r"\ba step\b", "in the run", words)


def with_sentence(found: Explanation) -> Explanation:
    """The same with its headline: what is wrong, and what it costs."""
    if found.span == "run":
        findings = (
            replace(each, title=of_run(each.title), evidence=tuple(map(of_run, each.evidence)))
            for each in found.findings
        )
        found = replace(found, findings=tuple(findings))
    if little := next((caveat for caveat in found.caveats if caveat.startswith(_LITTLE)), None):
        sentence = f"No step to judge: {little[0].lower()}{little[1:].partition(':')[0]}"
        is_cause = found.verdict != "healthy" and not little.startswith(_HOST_SIDE)
        return replace(found, verdict=found.verdict if is_cause else NOT_JUDGED, sentence=sentence)
    return replace(found, sentence=_healthy(found) if found.verdict == "healthy" else _cause(found))


def _cause(found: Explanation) -> str:
    first = found.findings[0]
    saved, share = units.part_of(first.saving_s, found.step_s, "s"), units.percent(first.saving_s / found.step_s)
    if found.steps_from == WHOLE_RUN:
        return f"No step to judge, only a whole run. Most of it: {first.title} ({saved}, {share})"
    if FIRST_STEPS in found.caveats:
        return f"No step to judge, only the script's first ones. Most of them: {first.title} ({saved}, {share})"
    if found.unsure:
        return f"Probably: {first.title}: fixing it would save about {saved} ({share})"
    return f"{first.title}: fixing it saves {saved} ({share})"


def _healthy(found: Explanation) -> str:
    busy, step = units.percent(1 - found.idle_s / found.step_s), units.text(found.step_s, "s")
    what = "the device works" if found.kind == "cuda" else "ops run"
    words = f"{'Probably healthy' if found.unsure else 'Healthy'}: {what} for {busy} of the {step} {found.span}"
    if found.fraction is not None and found.fraction < FAR and found.ops:
        most = found.ops[0]
        return (
            f"No cause was found: {what} for {busy} of the {step} {found.span}, at {units.percent(found.fraction)} of "
            f"the limit, most of it in {most.name} ({units.percent(most.device_s / found.step_s)})"
        )
    if found.fraction is not None:
        return f"{words}, at {units.percent(found.fraction)} of the limit"
    if found.unknown_s > UNTOLD * found.step_s:
        words = f"No cause was found: {what} for {busy} of the {step} {found.span}"
    unknown = units.percent(found.unknown_s / found.step_s)
    return f"{words}; how near it is to the limit is not known (no cost is known for {unknown} of it)"


def caveats(case: Case, limits_from: str, *, step_s: float, spread_s: float) -> tuple[tuple[str, ...], bool]:
    """What limits trust, the worst first; and whether one of them may turn the verdict."""
    doubts: list[str] = []
    recorded = case.trace.meta.get("steps_from")
    if case.steps.count < 2 and len(case.items) < LITTLE:
        ops = len(case.items)
        count = "no op" if not ops else "one op" if ops == 1 else f"{ops} ops"
        doubts.append(f"{_LITTLE} {count}: a recording of several steps can be judged.")
    elif case.on_gpu and not len(case.items):
        doubts.append(f"{_HOST_SIDE}: the file holds nothing that they ran on the device.")
    if recorded == WHOLE_RUN:
        doubts.append(
            "No step was found: the figures are of the whole run, with its first calls and the weights' "
            "initialisation. More steps, or sublight.step() at the end of each, give a step's."
        )
    elif _noted(case.trace, COLD):
        doubts.append(FIRST_STEPS)
    if _noted(case.trace, NO_OPTIMIZER_STEP):
        doubts.append(
            "A step here is one call of the outermost module: no optimizer had stepped after many of them. "
            "sublight.step() at the end of each step marks them."
        )
    if crowded(case.trace):
        load, cores = case.trace.meta["load"], case.trace.meta["cores"]
        doubts.append(f"The machine was busy: a load of {load:.1f} on {cores} cores. The host's times are too long.")
        if (timed_s := unprofiled_s(case.trace)) > (1 + MODEL_OFF) * case.profiled_step_s:
            doubts.append(
                f"Steps took {units.text(timed_s, 's')} while they were timed, and "
                f"{units.text(case.profiled_step_s, 's')} under the profiler: the figures are of the recorded ones."
            )
    if abs(case.model_off) > MODEL_OFF:
        way = "longer" if case.model_off > 0 else "shorter"
        doubts.append(
            f"The recorded steps are {units.percent(abs(case.model_off))} {way} than those that were timed without the "
            "profiler: the figures are fitted to the timed ones."
        )
    if spread_s > UNEVEN * step_s:
        doubts.append(
            f"The steps differ: half of them lie within {units.text(spread_s, 's')} of {units.text(step_s, 's')}."
        )
    extra_s = case.profiled_step_s - case.step_s
    if not unprofiled_s(case.trace) and extra_s > DISTORTED * case.profiled_step_s:
        record = ": record it without stacks" if has_stacks(case.trace) else ""
        doubts.append(
            f"The profiler cost about {units.text(extra_s, 's')} of the recorded step of "
            f"{units.text(case.profiled_step_s, 's')}, an estimate; the figures are without it{record}."
        )
    if len(programs := _programs(case.trace)) > 1:
        names = f"{', '.join(programs[:3])}{_more(len(programs) - 3)}"
        doubts.append(
            f"The file holds ops of {len(programs)} processes ({names}): the figures mix them. Record each in a file "
            "of its own."
        )
    doubts += [words for words in (_without_kernels(case), _clocks_apart(case)) if words]
    doubts += [lost for lost in case.trace.lost if _turns(lost, len(case.trace))]
    milder = [lost for lost in case.trace.lost if lost not in doubts]
    if case.too_good:
        milder.append(
            f"Faster than their floor by more than {units.percent(TOO_GOOD - 1)}, so a cost or a limit is wrong: "
            f"{', '.join(case.too_good[:3])}{_more(len(case.too_good) - 3)}."
        )
    if "which was busy" in limits_from:
        milder.append(
            "The limits were measured while others used this machine, so floors are too high; on a quiet one "
            "they are measured again by themselves."
        )
    if "another number of threads" in limits_from:
        milder.append(f"Floors are by limits that were measured with {limits_from.partition(', by ')[2]}.")
    if limits_from.startswith("known"):
        milder.append(f"Floors are not by limits measured on this device: {limits_from}.")
    return (*doubts, *milder), bool(doubts)


def _without_kernels(case: Case) -> str:
    """A sentence where most launches in the steps have no kernel in the file, or the file's ids do not tell which."""
    trace = case.trace
    launches = case.inside(trace.rows_named(lambda name: "LaunchKernel" in name, Kind.RUNTIME))
    missing = int(np.count_nonzero(~np.isin(launches, case.attribution.launch)))
    if not trace.on_gpu or missing <= len(launches) / 2:
        return ""
    return (
        f"Of {len(launches):,} launches in the steps, {missing:,} have no kernel in the file that belongs to them: "
        "what the device did in these steps is not known."
    )


def _clocks_apart(case: Case) -> str:
    """A sentence where kernels start before their launch, or leave the device idle long after it: that cannot be."""
    trace, rows = case.trace, np.sort(case.model.event_row)
    rows = rows[case.attribution.launch[rows] != NONE]
    launch, start_ns = case.attribution.launch[rows], trace.start_ns[rows]
    early_ns = trace.start_ns[launch] - start_ns
    idle_ns = start_ns - np.maximum.accumulate(np.concatenate((start_ns[:1], trace.end_ns[rows][:-1])))
    late_ns = (start_ns - trace.end_ns[launch])[idle_ns > APART_NS]
    apart_ns = 0.0
    if len(rows) and np.count_nonzero(early_ns > APART_NS) > len(rows) / 2:
        apart_ns = float(np.median(early_ns))
    elif len(late_ns) > max(case.model.steps / 2, 2) and np.median(late_ns) > APART_NS:
        apart_ns = float(np.median(late_ns))
    if not apart_ns:
        return ""
    return (
        f"The device's clock seems to be {units.text(apart_ns * 1e-9, 's')} off the host's: kernels start "
        f"{'before' if early_ns.max() > APART_NS else 'long after'} their launch, with the device idle in between."
    )


def _programs(trace: Trace) -> list[str]:
    """The processes that ran torch's ops, but for those with hardly any."""
    counts = np.bincount(trace.lane[trace.of_kind(Kind.OP)], minlength=len(trace.lanes))
    ops = defaultdict[str, int](int)
    for lane, count in zip(trace.lanes, counts.tolist(), strict=True):
        ops[lane.process] += count
    return [name for name, count in ops.items() if count > FEW * counts.sum()]


def _turns(lost: str, used: int) -> bool:
    """Whether so much of the file is lost that the verdict may be another: its rest, or more than a few events.

    >>> [_turns(f"{lost} events had no time.", 990) for lost in (5, 10, "1,000")]
    [False, True, True]
    """
    if "was not read" in lost or "in the middle of" in lost or "data is damaged" in lost:
        return True
    count = re.match(r"([\d,]+) events? (?!could be read only in part)", lost)
    return count is not None and int(count[1].replace(",", "")) >= FEW * used


def notes(case: Case, limits_from: str, *, recorded: int, left_out: int) -> tuple[str, ...]:
    """What a reader should know, and need not doubt."""
    trace = case.trace
    lines: list[str] = []
    if not trace.on_gpu and any(device.name for device in trace.devices):
        lines.append("The trace names a GPU but holds nothing that ran on it: only the host's side can be explained.")
    if case.steps.skipped:
        lines.append(f"{case.steps.skipped} step at the front was left out as warm-up.")
    cut = recorded > case.steps.count
    if cut:
        lines.append(
            f"{recorded} steps were recorded; the figures are of {case.steps.count} in a row, as long as most."
        )
    if trace.on_gpu and not cut and (old := backlog(case.attribution)).any():
        spent = units.text(float((trace.end_ns - trace.start_ns)[old].sum()) * 1e-9, "s")
        lines.append(
            f"{int(old.sum())} kernels and copies at the start ({spent}) were launched before the recording began: "
            "they are left out."
        )
    lines += _unknown(case)
    if grows := memory_growth.words(case):
        lines.append(grows)
    if limits_from.startswith("none"):
        lines.append(f"Limits: {limits_from}.")
    extra_s, measured = case.profiled_step_s - case.step_s, unprofiled_s(trace)
    if extra_s > MODEL_OFF * case.step_s and (measured or extra_s <= DISTORTED * case.profiled_step_s):
        lines.append(
            f"Under the profiler a step took {units.text(case.profiled_step_s, 's')}: the timeline shows that one, the "
            f"figures the {'measured' if measured else 'estimated'} one without it."
        )
    used = set(devices_of(trace)[trace.lane[trace.device_rows]].tolist())
    if len(used) > 1:
        mine = int(devices_of(trace)[trace.lane[case.model.event_row[0]]]) if len(case.model.event_row) else 0
        lines.append(f"The process uses {len(used)} GPUs; the figures are those of GPU {mine}, the busiest.")
    if case.others:
        whose = f"rank {trace.rank}'s" if trace.rank is not None else f"those of {trace.source}"
        lines.append(f"{len(case.others) + 1} ranks were read; the figures are {whose}.")
    if left_out:
        plural = "s" if left_out > 1 else ""
        lines.append(f"{left_out} other trace{plural} without a rank or a device were left out: name each alone.")
    if not trace.on_gpu and not len(case.items):
        lines.append("The trace has no device events and no op with a cost: only the host's time is split.")
    return tuple(lines)


def _noted(trace: Trace, start: str) -> bool:
    """Whether the capture left such a note."""
    return any(str(note).startswith(start) for note in _listed(trace.meta.get("notes")))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _unknown(case: Case) -> list[str]:
    unknown: dict[str, float] = defaultdict(float)
    for item, spent in zip(case.items, case.split.busy_s.tolist(), strict=True):
        if item.floor_s is None:
            unknown[item.name] += spent
    total = sum(unknown.values())
    if total <= 0.005 * case.step_s:
        return []
    worst = sorted(unknown, key=lambda name: -unknown[name])[:4]
    names = ", ".join(f"{name[:60]} ({units.percent(unknown[name] / case.step_s)})" for name in worst)
    return [
        f"The cost of {units.percent(total / case.step_s)} of the step is not known, and counts in the floor as it was "
        f"measured: {names}{_more(len(unknown) - len(worst))}."
    ]


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
