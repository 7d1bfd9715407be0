"""A model on a GPU: every op timed, the sum, what it holds, and what follows: tokens per second, MFU, energy, cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sublight.predict import census, clocks, memory
from sublight.predict import expected as op_times
from sublight.predict.backward import GRADIENTS
from sublight.predict.expected import Timed
from sublight.predict.machine import Machine
from sublight.predict.memory import USABLE, Memory
from sublight.predict.model import Model
from sublight.predict.operation import Operation
from sublight.predict.step import ONE_GPU, Mode, Step

MICRO_BATCHES = 4  # the most for each stage of a pipeline, when training


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperation:
    """An op of the step, with all its runs."""

    operation: Operation
    timed: Timed
    runs: int  # the time of so many, those of a pipeline that fills and drains included
    hidden_s: float = 0.0  # of a link's time: what passes while other ops run
    hidden_floor_s: float = 0.0  # of its floor: what would, if they all took their floors

    @property
    def expected_s(self) -> float:
        return self.runs * self.timed.expected_s - self.hidden_s

    @property
    def floor_s(self) -> float:
        return self.runs * self.timed.floor_s - self.hidden_floor_s

    @property
    def bound(self) -> str:
        """memory, compute, launch or link: what the floor is made of."""
        bound = self.timed.bound
        if bound in ("memory", "launch"):
            return bound
        return "link" if self.operation.kind == "link" else "compute"

    @property
    def cause(self) -> str:
        """The same, and of memory which bytes: weights, the cache, or activations."""
        if self.bound != "memory":
            return self.bound
        operation = self.operation
        if operation.kind == "attention":
            return "cache" if operation.shape["q_len"] == 1 else "activations"
        return "weights" if operation.kind == "product" and operation.direction == "fwd" else "activations"


class OfOps:
    """What the ops of a prediction add up to."""

    __slots__ = ()
    ops: tuple[TimedOperation, ...]

    @property
    def expected_s(self) -> float:
        return sum(op.expected_s for op in self.ops)

    @property
    def floor_s(self) -> float:
        return sum(op.floor_s for op in self.ops)

    @property
    def error(self) -> float:
        """Relative; as if every op were off the same way, which is more than is likely."""
        total = self.expected_s
        return sum(op.expected_s * op.timed.error for op in self.ops) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(OfOps):
    """One step of a model on one GPU, or on several alike."""

    model: Model
    machine: Machine
    step: Step  # of the whole batch
    ops: tuple[TimedOperation, ...]  # of one GPU
    memory: Memory  # of one GPU
    price_per_hour: float | None = None  # of one GPU

    @property
    def how(self) -> Mapping[str, float]:
        """The share of the time that is known in each way."""
        shares: dict[str, float] = {}
        for op in self.ops:
            shares[op.timed.how] = shares.get(op.timed.how, 0.0) + op.expected_s / (self.expected_s or 1.0)
        return shares

    @property
    def bounds(self) -> Mapping[str, float]:
        """The share of the time by what bounds the ops, largest first."""
        shares: dict[str, float] = {}
        for op in self.ops:
            shares[op.cause] = shares.get(op.cause, 0.0) + op.expected_s / (self.expected_s or 1.0)
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    @property
    def bottleneck(self) -> str:
        return next(iter(self.bounds), "nothing")

    @property
    def hidden_s(self) -> float:
        """Time of links that passes while other ops run."""
        return sum(op.hidden_s for op in self.ops)

    @property
    def clock_share(self) -> float:
        """The clock of this step's products, as a share of the highest clock."""
        return 1 / clocks.slower(self.machine) if self.step.trains else 1.0

    @property
    def gpus(self) -> int:
        return self.step.parallel.gpus

    @property
    def flops(self) -> float:
        """Of one GPU, on tensor cores: its part of what the model needs, however uneven the parts of the GPUs are. Ops
        that are done again count once."""
        ops = [op.operation for op in self.ops]
        if self.gpus > 1:
            ops = [*census.census(self.model, replace(self.step, parallel=ONE_GPU))]
        whole = sum(
            op.count * flops
            for op in ops
            if not op.name.endswith("(again)")
            for limit, flops in op.cost.flops.items()
            if limit.startswith("matmul")
        )
        return whole / self.gpus

    @property
    def mfu(self) -> float:
        """The model's FLOPs over what the vendor's peak would do in that time."""
        return self.flops / (self.expected_s * self.machine.peak(self.step.precision.products))

    @property
    def tokens_per_s(self) -> float:
        return self.step.tokens / self.expected_s

    @property
    def joules_per_token(self) -> float | None:
        """At the board's power limit: at most this."""
        power = self.machine.gpu.power_w
        return power * self.gpus / self.tokens_per_s if power else None

    @property
    def price_per_million(self) -> float | None:
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.gpus / 3600 * 1e6 / self.tokens_per_s

    @property
    def room_bytes(self) -> float:
        return USABLE * (self.machine.gpu.memory_bytes or 0)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room_bytes

    @property
    def largest_batch(self) -> int:
        """The largest batch that fits, of all GPUs together."""
        parallel = self.step.parallel
        here = memory.largest_batch(self.model, replace(self.step, batch=1), self.machine.gpu.memory_bytes or 0)
        return here * parallel.data


def micro(step: Step, size: int = 0) -> tuple[Step, int, int]:
    """What one GPU runs at a time, how often, and for how many rounds: its part of the batch, cut for a pipeline into
    parts of `size` sequences, or as many parts as are usual.

    A pipeline fills and drains: with m parts and p stages, m + p - 1 rounds; while tokens are generated it stays full.
    What only the first or the last stage has runs once for each part.
    """
    parallel = step.parallel
    here = -(-step.batch // parallel.data)
    if parallel.pipeline == 1:
        return replace(step, batch=here), 1, 1
    size = size or -(-here // (parallel.pipeline * (MICRO_BATCHES if step.trains else 1)))
    parts = -(-here // size)
    rounds = max(parts, parallel.pipeline) if step.mode == "decode" else parts + parallel.pipeline - 1
    return replace(step, batch=size), parts, rounds


def micro_sizes(step: Step) -> tuple[int, ...]:
    """Parts to try in a pipeline: the usual ones, and larger ones, which take fewer rounds.

    >>> micro_sizes(Step(mode="train", batch=40, context=1, parallel=replace(ONE_GPU, pipeline=2)))
    (5, 8, 16, 32, 40)
    """
    least = micro(step)[0].batch
    if step.parallel.pipeline == 1 or step.mode == "decode":
        return (least,)
    here = -(-step.batch // step.parallel.data)
    larger = [1 << power for power in range(here.bit_length()) if least < 1 << power < here]
    return tuple(dict.fromkeys((least, *larger, here)))


def in_a_long_run(op: Operation, machine: Machine, longer: float) -> Timed:
    """With products that take so many times longer, at the clock that the power limit leaves. What the memory bounds
    takes no longer than before, until its products do: those of the same op with bytes that take as long as they."""
    burst = op_times.timed(op, machine)
    products_s = op_times.products_s(op.cost, machine)
    if longer == 1.0 or not products_s or burst.bound == "launch":
        return burst
    share = min(1.0, products_s / burst.floor_s)
    lighter = replace(
        op.cost, read_bytes=math.ceil(share * op.cost.read_bytes), write_bytes=math.ceil(share * op.cost.write_bytes)
    )
    bound_by_products = op_times.timed(replace(op, cost=lighter), machine)
    return replace(burst, expected_s=max(burst.expected_s, longer * bound_by_products.expected_s))


def overlapped(ops: tuple[TimedOperation, ...], buckets: int) -> tuple[TimedOperation, ...]:
    """Gradients are summed over the GPUs while the backward pass of the layers before them runs: all but the last
    bucket's, as long as that pass lasts. Of a pipeline's parts the last alone has whole gradients. No other link waits
    for less: a cut product's sum, tokens on their way to experts and a stage's input are needed at once.
    """
    under = [
        op
        for op in ops
        if op.operation.kind != "link" and (op.operation.direction == "bwd" or op.operation.name.endswith("(again)"))
    ]
    backward_s = sum(op.operation.count * op.timed.expected_s for op in under)
    backward_floor_s = sum(op.operation.count * op.timed.floor_s for op in under)
    share = 1 - 1 / buckets
    return tuple(
        replace(
            op,
            hidden_s=min(share * op.expected_s, backward_s),
            hidden_floor_s=min(share * op.floor_s, backward_floor_s),
        )
        if op.operation.name == GRADIENTS
        else op
        for op in ops
    )


def predict(model: Model, machine: Machine, step: Step, *, price_per_hour: float | None = None) -> Prediction:
    """The step; of a pipeline, cut into the parts that take least time."""
    held = memory.memory(model, replace(step, batch=-(-step.batch // step.parallel.data)))
    ways = (_ops(model, machine, step, size) for size in micro_sizes(step))
    ops = min(ways, key=lambda each: sum(op.expected_s for op in each))
    return Prediction(model=model, machine=machine, step=step, ops=ops, memory=held, price_per_hour=price_per_hour)


def _ops(model: Model, machine: Machine, step: Step, size: int) -> tuple[TimedOperation, ...]:
    part, parts, rounds = micro(step, size)
    longer = clocks.slower(machine) if step.trains else 1.0
    ops = tuple(
        TimedOperation(
            operation=op,
            timed=in_a_long_run(op, machine, longer),
            runs=op.count * (1 if op.once else parts if op.at_end else rounds),
        )
        for op in census.census(model, part)
    )
    return overlapped(ops, buckets=max(1, model.layers // step.parallel.pipeline)) if step.overlap else ops


def modes_of(model: Model) -> tuple[Mode, ...]:
    """The steps that make sense for a model."""
    return ("prefill", "decode", "train") if model.generates else ("forward", "train")


def side_by_side(
    model: Model, machines: Iterable[Machine], steps: Iterable[Step], *, price_per_hour: float | None = None
) -> tuple[Prediction, ...]:
    steps = tuple(steps)
    return tuple(predict(model, machine, step, price_per_hour=price_per_hour) for machine in machines for step in steps)
