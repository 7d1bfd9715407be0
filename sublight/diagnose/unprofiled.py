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
CLOSE = 0.01  # to the measured step
ROUNDS = 14  # of halving
SHORTEST_S, LONGEST_S, MOST_STEPS = 1e-7, 1e6, 10**9  # of steps that can be


def corrected(model: Model, trace: Trace) -> Model:
    """The model without the profiler's cost: first what each event costs, then, if that is not all, a share of the
    host's other time, which the profiler slows down where ops run inside it.
    """
    measured = unprofiled_s(trace)
    if not measured:
        return _estimated(model, trace)
    if replay.run(model).step_s <= measured:
        return model
    model = _least(lambda cost_s: _cheaper(model, cost_s, trace.on_gpu), measured, MOST_S)
    if replay.run(model).step_s <= measured * (1 + CLOSE):
        return model
    return _least(lambda share: _faster(model, share), measured, 1 - LEFT)


def _estimated(model: Model, trace: Trace) -> Model:
    """Somebody else's trace of a GPU: what recording its events usually costs the host, a lower bound."""
    if trace.tool != "pytorch" or not trace.on_gpu:
        return model
    cost_s = EVENT_S + (MEMORY_S if trace.memory is not None else 0.0)
    functions = len(trace.of_kind(Kind.PYTHON)) / max(len(trace.of_kind(Kind.OP, Kind.RUNTIME)), 1)
    return _cheaper(model, cost_s * (STACKS if has_stacks(trace) else 1.0) + PYTHON_S * functions, on_gpu=True)


def has_stacks(trace: Trace) -> bool:
    return len(trace.of_kind(Kind.PYTHON)) > 0 or any(detail.stack for detail in trace.details)


def _least(change: Callable[[float], Model], measured: float, most: float) -> Model:
    """The smallest change after which the step takes no longer than measured; at most `most`."""
    low, high = 0.0, most
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if replay.run(change(middle)).step_s > measured:
            low = middle
        else:
            high = middle
    return change(high)


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


def unprofiled_s(trace: Trace) -> float:
    """The step's time without the profiler, where our capture measured it."""
    total, count = trace.meta.get("unprofiled_total_s"), trace.meta.get("unprofiled_steps")
    if isinstance(count, int) and 0 < count < MOST_STEPS and _is_time(total):
        return float(total) / count
    times = unprofiled_times_s(trace)
    return statistics.median(times) if times else 0.0


def unprofiled_times_s(trace: Trace) -> list[float]:
    """Of the steps one by one; a file may hold anything under that name."""
    times = trace.meta.get("unprofiled_step_s")
    return [float(time) for time in times if _is_time(time)] if isinstance(times, list) else []


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and SHORTEST_S < value < LONGEST_S
