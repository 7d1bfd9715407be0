"""Take the profiler's own cost off a model, so that its step lasts what the step lasted without the profiler."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np

from sublight.diagnose import replay
from sublight.diagnose.model import Model
from sublight.trace.record import Kind, Trace

LEFT = 0.2  # of the host's time between calls, at least, is its own
MOST_S = 20e-6  # that the profiler can cost an event
EVENT_S, MEMORY_S = 2e-6, 1e-6  # of the host's time: an op or an API call with its shapes; with its allocations
STACKS, PYTHON_S = 1.5, 0.7e-6  # times as much where stacks are recorded; and each Python function
SLOWER = 4.0  # times as long, at most: the host in the steps that were timed, against those that were recorded
NUDGE = 0.03  # of the host's time, to see whether the step grows with it
CLOSE = 0.01  # to the measured step
EXACT = 0.001
ROUNDS = 14  # of narrowing down
CROWDED = 1.5  # processes that want to run, a core
SHORTEST_S, LONGEST_S, MOST_STEPS = 1e-7, 1e6, 10**9  # of steps that can be


def corrected(model: Model, trace: Trace) -> tuple[Model, float]:
    """The model without the profiler's cost, as long as the step that was measured where one was; and how far it was
    off that before it was made to fit.

    First goes what each event costs, then, if that is not all, a share of the host's other time, which the profiler
    slows down where ops run inside it. What is still too long is shortened throughout. A step that was recorded
    shorter than it is was shorter on the host: loading and Python vary, kernels do not.
    """
    if not unprofiled_s(trace):
        return _estimated(model, trace), 0.0
    step_s = replay.step_s(model)
    measured = measured_s(trace, step_s)
    if step_s > measured:
        whole = model
        model, step_s = _fitted(lambda cost_s: _cheaper(whole, cost_s, trace.on_gpu), measured, MOST_S, step_s)
    if step_s > measured * (1 + CLOSE):
        cheaper = model
        model, step_s = _fitted(lambda share: _faster(cheaper, share), measured, 1 - LEFT, step_s)
    off = step_s / measured - 1
    if off < -EXACT and _host_bound(model, step_s):
        short = model
        model, step_s = _fitted(lambda more: _faster(short, -more), measured, SLOWER - 1, step_s)
    return (model.scaled(measured / step_s) if step_s > measured else model), off


def _host_bound(model: Model, step_s: float) -> bool:
    """Whether the step grows with the host's time."""
    return replay.step_s(_faster(model, -NUDGE)) > step_s * (1 + NUDGE / 3)


def _estimated(model: Model, trace: Trace) -> Model:
    """Somebody else's trace of a GPU: what recording its events usually costs the host, a lower bound."""
    if trace.tool != "pytorch" or not trace.on_gpu:
        return model
    cost_s = EVENT_S + (MEMORY_S if trace.memory is not None else 0.0)
    functions = len(trace.of_kind(Kind.PYTHON)) / max(len(trace.of_kind(Kind.OP, Kind.RUNTIME)), 1)
    return _cheaper(model, cost_s * (STACKS if has_stacks(trace) else 1.0) + PYTHON_S * functions, on_gpu=True)


def has_stacks(trace: Trace) -> bool:
    return len(trace.of_kind(Kind.PYTHON)) > 0 or any(detail.stack for detail in trace.details)


def _fitted(change: Callable[[float], Model], measured: float, most: float, before_s: float) -> tuple[Model, float]:
    """The change, none to `most`, after which the step takes what was measured, or as near to it as a change gets; and
    the step then. `before_s` is the step without a change: the longer the change, the further the step is from it.
    """
    low, low_s = 0.0, before_s
    high, model = most, change(most)
    high_s = replay.step_s(model)
    if (high_s - measured) * (low_s - measured) >= 0:
        return model, high_s  # all of it is not enough
    for round_ in range(ROUNDS):
        share = (low_s - measured) / (low_s - high_s) if round_ % 3 < 2 else 0.5  # halved now and then: it may bend
        middle = low + min(max(share, 0.02), 0.98) * (high - low)
        model = change(middle)
        step_s = replay.step_s(model)
        if abs(step_s - measured) < EXACT * measured:
            return model, step_s
        if (step_s - measured) * (low_s - measured) > 0:
            low, low_s = middle, step_s
        else:
            high, high_s = middle, step_s
    return change(high), high_s


def _cheaper(model: Model, cost_s: float, on_gpu: bool) -> Model:
    """Every recorded event costs the host so much less."""
    taken = cost_s * model.torch_events
    before = model.before_s["launch"]
    launch = np.maximum(before - taken, LEFT * before)
    model = model.replace(before_s={**model.before_s, "launch": launch})
    if on_gpu:
        return model
    inside = np.maximum(taken - (before - launch), 0.0)[model.call]  # of an op on a CPU: what is recorded inside it
    return model.replace(duration_s=np.maximum(model.duration_s - inside, LEFT * model.duration_s))


def _faster(model: Model, share: float) -> Model:
    """The host's time by every cause, and its calls, shorter by this share."""
    before = {cause: (1 - share) * column for cause, column in model.before_s.items()}
    return model.replace(before_s=before, cost_s=(1 - share) * model.cost_s, tail_s=(1 - share) * model.tail_s)


def measured_s(trace: Trace, recorded_s: float) -> float:
    """The step that figures are of: the timed one; on a crowded machine the recorded one if it is shorter, since a
    profiler makes no step shorter, and other programs make some longer.
    """
    timed = unprofiled_s(trace)
    return recorded_s if crowded(trace) and recorded_s < timed else timed


def crowded(trace: Trace) -> bool:
    """Whether other programs wanted the cores while this was recorded."""
    load, cores = trace.meta.get("load"), trace.meta.get("cores")
    return isinstance(load, int | float) and isinstance(cores, int) and cores > 0 and load > CROWDED * cores


def unprofiled_s(trace: Trace) -> float:
    """The step's time without the profiler, where our capture measured it."""
    total, count = trace.meta.get("unprofiled_total_s"), trace.meta.get("unprofiled_steps")
    if isinstance(count, int) and 0 < count < MOST_STEPS and _is_time(total):
        return float(total) / count
    times = unprofiled_times_s(trace)
    return statistics.median(times) if times else 0.0


def unprofiled_times_s(trace: Trace) -> list[float]:
    """The steps' times without the profiler, one by one; a file may hold anything under that name."""
    times = trace.meta.get("unprofiled_step_s")
    return [float(time) for time in times if _is_time(time)] if isinstance(times, list) else []


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and SHORTEST_S < value < LONGEST_S
