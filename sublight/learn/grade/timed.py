"""A submission's time at the goal's size, by the grader's own clock, on a GPU.

The grader owns all memory. Before each timed run it writes new random numbers into every input and poison into every
output; then its clock runs from the order until the answer, and the outputs are copied at once: what is not written by
then is poison in that copy, so an answer that comes early is a wrong one. Every output of every run is judged by the
one rule; where that says no, more draws tell bad luck from an error, as in `correct.settled`. A run is many launches
over sets of buffers that together are many times the L2, and takes `LEAST_RUN_S` at least.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sublight.correct import FACTOR, Error, Inputs, error, pooled
from sublight.gpus import Gpu
from sublight.learn.grade.arena import Arena, Plan
from sublight.learn.grade.crew import Crew, Ended, Task
from sublight.learn.grade.goal import ABOVE_LIMIT, floor_s
from sublight.learn.grade.judge import fault_of, unwritten
from sublight.learn.grade.sandbox import Budget
from sublight.learn.record import Exercise
from sublight.learn.verdict import Fault, Timing

LEAST_RUN_S = 0.002  # a shorter one is mostly the way of a message
RUN_S = 0.02  # that a run aims at
RUNS = 5
CALLS = 64  # that one replay holds at least, where it may: the way of a message is the smaller a part of it
MOST_SETS = 64
L2_BYTES = 64 << 20  # of a GPU whose own is not known
ROOM = 16  # parts of the GPU's memory, of which all sets take one at most
DRAWS = 8  # times the sets of a run, that its error may be drawn over
NO_LUCK = 100.0  # times PyTorch's error: no draw of numbers is so unlucky
SPREAD = 16  # times the L2 that all sets fill together: what a submission makes stay there is a small part of them
BUDGET = Budget(cpu_s=60.0, wall_s=60.0, memory_bytes=8 * 2**30)  # CUDA takes room for itself


Draws = tuple[list[Inputs], list[list[Any]]]  # inputs and results of each set


class Wrong(NamedTuple):
    """An output of one set, and how far it is off."""

    ratio: float
    ours: Any
    theirs: Any
    truth: Any


@dataclass(slots=True, kw_only=True)
class Stopwatch:
    """One submission on the way through its timed runs: `begin`, then `faults`, then `timing`."""

    exercise: Exercise
    gpu: Gpu
    order: dict[str, Any]  # as `check` makes it: the submission's file, its function, where it may write
    crew: Crew
    device: Literal["cuda", "cpu"] = "cuda"
    most_sets: int = MOST_SETS
    least_calls: int = CALLS
    runs: int = RUNS
    faults: list[Fault] = field(default_factory=list)
    _plan: Any = None
    _arena: Any = None
    _task: Task | None = None
    _method: str = ""
    _keeps_inputs: bool = True

    @property
    def case(self) -> str:
        assert self.exercise.goal
        shape, dtype = self.exercise.goal.timed_shape, self.exercise.goal.dtype
        return f"{', '.join(f'{name} = {size}' for name, size in shape.items())}, {dtype}"

    @property
    def floor_s(self) -> float:
        """The time below which nobody goes at this size."""
        goal = self.exercise.goal
        assert goal
        return floor_s(self.gpu, self.exercise.least_cost(goal.timed_shape, goal.dtype))

    def begin(self) -> None:
        """Memory, the child, its first calls and its graphs: all that compiles. Others may do this at the same time."""
        goal, problem = self.exercise.goal, self.exercise.problem()
        assert goal
        inputs = problem.inputs(goal.timed_shape, goal.dtype, "meta", 0)
        sets = self._sets(self.exercise.least_cost(goal.timed_shape, goal.dtype).bytes)
        self._plan = Plan.of(inputs, problem.outputs(inputs), sets)
        size = self._plan.inputs_bytes + self._plan.outputs_bytes
        self._arena = Arena.on_gpu(size) if self.device == "cuda" else Arena.on_cpu(size)
        self._fill()
        place = {"plan": self._plan.to_json(), "arena": self._arena.order, "device": self.device}
        self._task = self.crew.begin("launch", {**self.order, **place}, BUDGET, *self._arena.descriptors)
        self._arena.sent()
        try:
            self._heard(self._task.answer())
            for request in ({"do": "call", "sets": min(2, sets)}, {"do": "record"}):
                if not self.faults:
                    self._heard(self._task.ask(**request))
        except Ended as ended:
            self._blame("limit", str(ended))

    def _sets(self, set_bytes: int) -> int:
        """Enough to fill the L2 many times, unless the GPU's memory is too small for them, their copies and float64."""
        wanted = SPREAD * (self.gpu.l2_bytes or L2_BYTES)
        if self.gpu.memory_bytes:
            wanted = min(wanted, self.gpu.memory_bytes // ROOM)
        return min(self.most_sets, max(2, math.ceil(wanted / max(set_bytes, 1))))

    def timing(self) -> Timing | None:
        """The time of one call, or None and `faults`."""
        try:
            return None if self.faults else self._timed()
        except Ended as ended:
            self._blame("limit", str(ended))
            return None

    def close(self) -> None:
        if self._task is not None:
            self._task.end()
        if self._arena is not None:
            self._arena.close()

    def _timed(self) -> Timing | None:
        luck, sets = random.Random(secrets.randbits(64)), self._plan.sets
        order = [number for _ in range(math.ceil(self.least_calls / sets)) for number in luck.sample(range(sets), sets)]
        self._heard(self._ask(do="arrange", order=order))
        times, runs = 1, list[float]()
        while not self.faults and len(runs) < self.runs:
            elapsed_s = self._run(times)
            if not runs and elapsed_s < RUN_S / 2 and times == 1:  # the first shows how many replays make a run
                times = max(2, math.ceil(RUN_S / elapsed_s))
                continue
            if elapsed_s >= LEAST_RUN_S:
                runs.append(elapsed_s / (times * len(order)))
            else:
                times *= 4
        if not self.faults:
            self._alone(luck.randrange(sets))
        if self.faults:
            return None
        seconds = min(runs)  # what disturbs a run only adds to it
        return self._floored(Timing(seconds=seconds, fraction=self.floor_s / seconds, case=self.case, sets=sets,
                                    runs_s=tuple(runs), calls=times * len(order), method=self._method))  # fmt: skip

    def _run(self, times: int) -> float:
        """One timed run, judged: its time by the wall."""
        elapsed_s, made, results = self._drawn(do="replay", times=times)
        self._judge(made, results, again=lambda: self._drawn(do="replay", times=1)[1:])
        return elapsed_s

    def _drawn(self, **request: Any) -> tuple[float, list[Inputs], list[list[Any]]]:
        """What the child took for this on new numbers, these numbers and what was written."""
        made = self._fill()
        begin_s = time.perf_counter()
        answer = self._ask(**request)
        elapsed_s = time.perf_counter() - begin_s
        results = self._copied()
        self._method = f"{answer.get('method')}{self._arena.method}"
        self._keeps_inputs = self._keeps_inputs and self._are_inputs_kept(made)
        self._heard(answer)
        return elapsed_s, made, results

    def _alone(self, number: int) -> None:
        """One call's graph must write its own set's outputs, and no other's: calls are not batched into one."""

        def one() -> tuple[list[Inputs], list[list[Any]]]:
            _, made, results = self._drawn(do="one", number=number)
            others = [y for place, each in enumerate(results) if place != number for y in each]
            if not self.faults and not all(bool(unwritten(y).all()) for y in others):
                self._blame("launch", "one call writes other calls' outputs, too: each must do its own work")
            return made[number : number + 1], results[number : number + 1]

        self._judge(*one(), again=one)

    def _floored(self, found: Timing) -> Timing | None:
        if self.device == "cuda" and found.fraction > ABOVE_LIMIT:
            self._blame(
                "launch", f"it reached {found.fraction:.2f} of the limit, which cannot be: some work is left out"
            )
            return None
        return found

    def _fill(self) -> list[Inputs]:
        """New numbers in every set's inputs, poison elsewhere; what was written is kept, to be judged by."""
        goal, problem = self.exercise.goal, self.exercise.problem()
        assert goal
        self._arena.poison()
        made = []
        for inputs, _ in self._plan.tensors(self._arena.pages):
            drawn = problem.inputs(goal.timed_shape, goal.dtype, self.device, secrets.randbits(62))
            for tensor, x in zip(inputs, drawn, strict=True):
                tensor.copy_(x)
            made.append(drawn)
        self._synchronize()
        return made

    def _copied(self) -> list[list[Any]]:
        copy = self._arena.pages[self._plan.inputs_bytes :].clone()
        self._synchronize()
        return self._plan.results(copy)  # type: ignore[no-any-return]

    def _judge(self, made: list[Inputs], results: list[list[Any]], again: Callable[[], Draws]) -> None:
        """Every output of every set, and that inputs are what they were. A maximum over few numbers is luck: where
        PyTorch's happens to be small, right code looks wrong, so `again` draws more of both."""
        if not self.faults:
            errors, worst = self._errors(made, results)
            most = DRAWS * len(errors)
            while not self.faults and NO_LUCK > pooled(errors).ratio > FACTOR and len(errors) < most:
                more, others = self._errors(*again())
                errors += more
                worst = {name: max(worst[name], others[name], key=lambda each: each.ratio) for name in worst}
            whole = pooled(errors)
            if not self.faults and not whole.ok:
                wrong = worst[whole.name]
                self.faults.append(fault_of(whole.name, wrong.ours, wrong.theirs, wrong.truth, whole, self.case))
        if not self._keeps_inputs:
            self._blame("inputs", "inputs were changed: a kernel writes to outputs alone")

    def _errors(self, made: list[Inputs], results: list[list[Any]]) -> tuple[list[list[Error]], dict[str, Wrong]]:
        """Of each output of each set; and of each output the set in which it is farthest off."""
        problem, errors = self.exercise.problem(), []
        worst: dict[str, Wrong] = {}
        for drawn, ours in zip(made, results, strict=True):
            theirs = problem.outputs(drawn)
            truth = problem.outputs(tuple(x.double() if x.is_floating_point() else x for x in drawn))
            found = [error(*each) for each in zip(self.exercise.outputs, ours, theirs, truth, strict=True)]
            errors.append(found)
            for one, *tensors in zip(found, ours, theirs, truth, strict=True):
                if one.name not in worst or one.ratio > worst[one.name].ratio:
                    worst[one.name] = Wrong(one.ratio, *(x if one.ok else x.cpu() for x in tensors))
        return errors, worst

    def _are_inputs_kept(self, made: list[Inputs]) -> bool:
        import torch

        sets = zip(self._plan.tensors(self._arena.pages), made, strict=True)
        return all(torch.equal(*pair) for (inputs, _), drawn in sets for pair in zip(inputs, drawn, strict=True))

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._task is not None
        return self._task.ask(**request)

    def _heard(self, answer: dict[str, Any]) -> None:
        if failure := answer["failure"]:
            self._blame("failed", failure["text"], line=failure["line"])
        for name, line in (answer.get("torch") or {}).items():
            self._blame("torch", f"torch's {name} ran: the kernel must do the work", line=line)

    def _blame(self, kind: Any, text: str, line: int = 0) -> None:
        self.faults.append(Fault(kind=kind, text=text, line=line, case=self.case))

    def _synchronize(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def timed(exercise: Exercise, order: dict[str, Any], *, crew: Crew, gpu: Gpu) -> tuple[list[Fault], Timing | None]:
    """A submission that is right, by the clock: what is wrong with it on this GPU, or its time, held to the goal."""
    watch = Stopwatch(exercise=exercise, gpu=gpu, order=order, crew=crew)
    try:
        watch.begin()
        found = watch.timing()
    finally:
        watch.close()
    goal = exercise.goal
    if found and goal and found.fraction < goal.fraction:
        text = f"it reaches {found.fraction:.2f} of this {gpu.key}'s limit, the goal is {goal.fraction:g}"
        watch.faults.append(Fault(kind="goal", text=text, case=found.case))
    return watch.faults, found
