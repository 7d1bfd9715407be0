"""The best way to spread a model over N GPUs: every way that divides, each at the batch that serves it best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sublight.predict import memory
from sublight.predict.estimate import Prediction, predict
from sublight.predict.links import NODE_GPUS
from sublight.predict.machine import Machine
from sublight.predict.model import Model
from sublight.predict.step import Parallel, Step

MOST_BATCH = 4096
FINEST = 32  # a batch is right to this part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A way to spread the model, and what it does at one batch."""

    prediction: Prediction
    meets: bool  # the latency target

    @property
    def parallel(self) -> Parallel:
        return self.prediction.step.parallel


def ways(model: Model, gpus: int) -> Iterator[Parallel]:
    """Every split of so many GPUs that the model's sizes divide by; a product is cut within one machine only."""
    experts = next((block.experts.count for block in model.blocks if block.experts), 0)
    is_convolution = model.family == "convolution"
    for tensor in _divisors(gpus):
        if tensor > 1 and (is_convolution or model.heads % tensor or tensor > NODE_GPUS):
            continue
        for pipeline in _divisors(gpus // tensor):
            if pipeline > 1 and (is_convolution or pipeline > model.layers):
                continue
            data = gpus // tensor // pipeline
            spread = {1, tensor, tensor * data} if experts else {1}
            for expert in sorted(spread):
                if expert == 1 or experts % expert == 0:
                    yield Parallel(tensor=tensor, pipeline=pipeline, data=data, expert=expert)


def _divisors(number: int) -> list[int]:
    """
    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [part for part in range(1, number + 1) if number % part == 0]


def _batches(model: Model, machine: Machine, step: Step) -> list[int]:
    """Powers of two for each GPU that has a part of the batch, up to what fits, and that itself."""
    alone = replace(step, batch=1)
    most = min(memory.largest_batch(model, alone, machine.gpu.memory_bytes or 0), MOST_BATCH)
    powers = [1 << power for power in range(13) if 1 << power < most]
    return [batch * step.parallel.data for batch in [*powers, most] if batch]


def plans(
    model: Model,
    machine: Machine,
    like: Step,
    gpus: int,
    *,
    latency_s: float | None = None,
    batch: int | None = None,
    price_per_hour: float | None = None,
) -> tuple[Plan, ...]:
    """Best first: those that meet the target by tokens per second, then the others by how near they come.

    Without a batch each way takes the one that gives most tokens per second within the target.
    """
    found = []
    for parallel in ways(model, gpus):
        step = replace(like, parallel=parallel)
        if batch is None:
            batches: Sequence[int] = _batches(model, machine, step)
        else:
            batches = [batch] if batch >= parallel.data else []
        tried = [_plan(model, machine, replace(step, batch=each), latency_s, price_per_hour) for each in batches]
        fitting = [each for each in tried if each.prediction.fits]
        if batch is None:
            fitting += _between(model, machine, fitting, latency_s, price_per_hour)
        if fitting:
            found.append(min(fitting, key=_order))
    return tuple(sorted(found, key=_order))


def _plan(model: Model, machine: Machine, step: Step, latency_s: float | None, price: float | None) -> Plan:
    found = predict(model, machine, step, price_per_hour=price)
    return Plan(prediction=found, meets=_meets(found, latency_s))


def _between(
    model: Model, machine: Machine, tried: Sequence[Plan], latency_s: float | None, price: float | None
) -> Iterator[Plan]:
    """Batches between the largest of `tried` that meets the target and the next one, which does not."""
    batches = {plan.prediction.step.batch: plan.meets for plan in tried}
    low = max((batch for batch, meets in batches.items() if meets), default=0)
    high = min((batch for batch in batches if batch > low), default=0)
    if not low or not high:
        return
    step = tried[0].prediction.step
    data = step.parallel.data
    low, high = low // data, high // data
    while high - low > max(1, low // FINEST):
        middle = (low + high) // 2
        plan = _plan(model, machine, replace(step, batch=middle * data), latency_s, price)
        low, high = (middle, high) if plan.meets else (low, middle)
        yield plan


def _meets(found: Prediction, latency_s: float | None) -> bool:
    return latency_s is None or found.expected_s <= latency_s


def _order(plan: Plan) -> tuple[bool, float]:
    found = plan.prediction
    return (False, -found.tokens_per_s) if plan.meets else (True, found.expected_s)
