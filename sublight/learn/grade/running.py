"""The stages of one check: run on cases, left out, compiled, at the goal's size; each gives faults, or nothing.

Inputs come from this process's own randomness, which no other process has; outputs are poisoned before each call and
read here; what is right is computed here, after the submission has answered. The one rule of `correct.py` decides.
"""

from __future__ import annotations

import linecache
import math
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sublight.correct import FACTOR, Error, Inputs, error
from sublight.gpus import Gpu
from sublight.learn.grade.buffers import Shared, Spec
from sublight.learn.grade.cases import Case
from sublight.learn.grade.child import explained
from sublight.learn.grade.crew import Crew, Ended, Mode, Task
from sublight.learn.grade.judge import fault_of
from sublight.learn.grade.launches import difference, programs_of
from sublight.learn.grade.left_out import filled, left_out
from sublight.learn.grade.sandbox import Budget
from sublight.learn.record import Exercise, Problem
from sublight.learn.verdict import Fault, KernelFigures

FEW = 8  # numbers that a person works out by hand
DRAWS, MOST_DRAWS = 8, 64  # of one case, where luck may have decided …
ENOUGH_ELEMENTS = 4096  # … which is so the more, the fewer elements there are; …
NEAR = 2 * FACTOR  # … up to so many times PyTorch's error the most: elements of a row may be off together
SAMPLE = {"parts": 136, "least": 6, "seconds": 0.25}  # of each launch's programs at the goal's size …
DRAWS_AT_GOAL = 4  # … drawn again where luck may have decided
_LAUNCHES = {"kernel": "kernel[grid](...)", "cuda": "kernel<<<blocks, threads>>>(...)"}
GOAL_NUMBER = 99  # of the goal among the cases, in the names of their files


@dataclass(slots=True, kw_only=True)
class Running:
    """What one check holds while it runs."""

    exercise: Exercise
    problem: Problem
    crew: Crew
    folder: Path
    gpu: Gpu
    budget: Budget
    order: dict[str, Any]
    notes: dict[str, None] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)  # launches at the goal's size, in words
    launched: set[str] = field(default_factory=set)  # kernels that ran on the cases
    shapes: dict[str, tuple[Inputs, Inputs]] = field(default_factory=dict)  # of cases, by their words
    spent_s: list[float] = field(default_factory=list)  # processor time of each task that has ended
    compiling: Future[tuple[list[Fault], tuple[KernelFigures, ...]]] | None = None  # `reached`, beside the cases
    compiler: Task | None = None
    mode: Mode = "interpret"  # how a submission runs with numbers

    @property
    def goal(self) -> Case:
        assert self.exercise.goal
        return Case(shape=self.exercise.goal.shape, dtype=self.exercise.goal.dtype)

    @contextmanager
    def task(self, mode: Any) -> Iterator[Task]:
        task = self.crew.begin(mode, self.order, self.budget)
        try:
            yield task
        finally:
            self.spent_s.append(task.cpu_s)
            task.end()

    def values(self, cases: list[Case], pool: ThreadPoolExecutor | None = None) -> tuple[list[Fault], list[str]]:
        """The first case's faults, and the cases that were right before it. Once the first case is right, the compiler
        begins in `pool`: most mistakes show before."""
        right: list[str] = []
        with self.task(self.mode) as task:
            try:
                if faults := failed(task.answer(), ""):
                    return faults, right
                for number, case in enumerate(cases):
                    if faults := self._case(task, case, number):
                        return faults, right
                    right.append(str(case))
                    if pool and self.compiling is None:
                        self.compiling = pool.submit(self.reached, cases[0])
            except Ended as ended:
                at = str(cases[len(right)])
                return [Fault(kind="limit", text=str(ended), case=at)], right
        return [], right

    def _case(self, task: Task, case: Case, number: int) -> list[Fault]:
        """One shape: two draws into the same memory at first, more where PyTorch's luck may have decided."""
        inputs, outputs = self._buffers(case, number)
        draws = 2 if number == 0 else 1
        elements = sum(shared.tensor.numel() for shared in outputs)
        errors: list[list[Error]] = []
        results: tuple[Inputs, ...] = ()
        has_faults = False
        while len(errors) < draws:
            truths = self._fill(case, inputs)
            before = [shared.digest() for shared in inputs]
            for shared in outputs:
                shared.poison()
            answer = self._ask(task, case, inputs, outputs)
            self.launched |= set(answer.get("kernels", ()))
            changed = [name for name, shared, digest in zip(self.exercise.arguments, inputs, before, strict=True)
                       if shared.digest() != digest]  # fmt: skip
            if faults := self._seen(answer, changed, str(case)):
                has_run = all(fault.kind in ("kernel", "inputs") for fault in faults)
                return faults + (self._wrong(outputs, *truths, case)[0] if has_run else [])
            faults, drawn = self._wrong(outputs, *truths, case)
            if faults and answer.get("has_returned") and self.exercise.kind != "paper":
                self.notes[f"what {self.exercise.function} returns is not looked at: write into the outputs"] = None
            if any(fault.kind == "unwritten" for fault in faults) and any(len(shared.written()) for shared in outputs):
                self.notes |= dict.fromkeys(filter(None, map(programs_of, answer.get("made", ()))))
            if any(one.misplaced for one in drawn):
                return faults
            errors.append(drawn)
            if not results or (faults and not has_faults):  # what is shown: the first draw that was wrong
                results, has_faults = (tuple(shared.tensor.clone() for shared in outputs), *truths), bool(faults)
                if faults and self.exercise.kind == "paper":
                    self._tell(inputs)
            pooled = [_pooled(each) for each in zip(*errors, strict=True)]
            if all(one.ok for one in pooled):
                continue
            most = most_draws(max(one.ratio for one in pooled), elements)
            if len(errors) >= most:
                worst = next(place for place, one in enumerate(pooled) if not one.ok)
                ours, theirs, truth = (each[worst] for each in results)
                return [fault_of(self.exercise.outputs[worst], ours, theirs, truth, pooled[worst], str(case))]
            draws = max(draws, min(most, 2 * len(errors)))
        return []

    def _tell(self, inputs: list[Shared]) -> None:
        """Of a step on paper, what it was called with, where that can be worked out by hand."""
        few = [(name, shared.tensor) for name, shared in zip(self.exercise.arguments, inputs, strict=True)]
        words = [f"{name} = {x.tolist()}" for name, x in few if x.numel() <= FEW]
        if len(words) == len(few):
            self.notes[f"it was called with {', '.join(words)}"] = None

    def _ask(self, task: Task, case: Case, inputs: list[Shared], outputs: list[Shared], **more: Any) -> dict[str, Any]:
        """One call on these tensors, and what was seen of it."""
        return task.ask(
            **specs_of(inputs, outputs), is_goal=self.exercise.goal is not None and case == self.goal, **more
        )

    def _buffers(self, case: Case, number: int, *, is_poisoned: bool = True) -> tuple[list[Shared], list[Shared]]:
        example, results = self._shapes_of(case)
        return (
            [Shared.like(x, self.folder / f"{number}-in-{i}", is_poisoned=is_poisoned) for i, x in enumerate(example)],
            [Shared.like(y, self.folder / f"{number}-out-{i}", is_poisoned=is_poisoned) for i, y in enumerate(results)],
        )

    def _goal_specs(self) -> dict[str, Any]:
        """Without data, which nobody looks at there; but whole numbers say what is read, so these are real."""
        inputs, outputs = ([Spec.of(x) for x in each] for each in self._shapes_of(self.goal))
        if any(not x.is_floating_point() for x in self._shapes_of(self.goal)[0]):
            made = self.problem.inputs(self.goal.shape, self.goal.dtype, "cpu", secrets.randbits(62))
            for place, x in enumerate(made):
                if not x.is_floating_point():
                    shared = Shared.like(x, self.folder / f"goal-in-{place}")
                    shared.tensor.copy_(x)
                    inputs[place] = shared.spec
        return {"inputs": [each.to_json() for each in inputs], "outputs": [each.to_json() for each in outputs]}

    def _shapes_of(self, case: Case) -> tuple[Inputs, Inputs]:
        if str(case) not in self.shapes:
            inputs = self.problem.inputs(case.shape, case.dtype, self.exercise.sizes_on, 0)
            self.shapes[str(case)] = inputs, self.problem.outputs(inputs)
        return self.shapes[str(case)]

    def _fill(self, case: Case, inputs: list[Shared]) -> tuple[Inputs, Inputs]:
        """New random numbers, and what is right for them."""
        return self._truths(self._draw(case, inputs))

    def _draw(self, case: Case, inputs: list[Shared]) -> Inputs:
        made = self.problem.inputs(case.shape, case.dtype, "cpu", secrets.randbits(62))
        for shared, x in zip(inputs, made, strict=True):
            shared.tensor.copy_(x)
        return made

    def _truths(self, made: Inputs) -> tuple[Inputs, Inputs]:
        """What PyTorch makes of these numbers, in their data type and in float64."""
        wide = tuple(x.double() if x.is_floating_point() else x for x in made)
        return self.problem.outputs(made), self.problem.outputs(wide)

    def _seen(self, answer: dict[str, Any], changed: list[str], case: str) -> list[Fault]:
        """What was seen of a call, before its results are looked at."""
        faults = failed(answer, case)
        faults += _of_torch(answer, case)
        if not faults and not answer["launches"] and self.exercise.kind != "paper":
            text = f"no kernel was launched: {self.exercise.function} must call {_LAUNCHES[self.exercise.kind]}"
            if answer["has_returned"]:
                text += f", and write into {self.exercise.outputs[0]}; what it returns is not looked at"
            faults.append(Fault(kind="launch", text=text, case=case))
        for name in changed:
            faults.append(Fault(kind="inputs", text=f"{name} was changed: a kernel writes to outputs alone", case=case))
        for finding in answer.get("findings", ()):
            text = f"{finding['id']}: {finding['detail']}"
            if finding["is_information"]:
                self.notes[f"line {finding['line']}: {text}" if finding["line"] else text] = None
            elif finding["id"] != "script-failed":
                faults.append(Fault(kind="kernel", text=text, line=finding["line"], case=case))
        return faults

    def _wrong(
        self, outputs: list[Shared], theirs: Inputs, truth: Inputs, case: Case
    ) -> tuple[list[Fault], list[Error]]:
        faults, errors = [], []
        for name, shared, their, true in zip(self.exercise.outputs, outputs, theirs, truth, strict=True):
            measured = error(name, shared.tensor, their, true)
            errors.append(measured)
            if not measured.ok:
                faults.append(fault_of(name, shared.tensor, their, true, measured, str(case)))
        return faults, errors

    def stop_compiling(self) -> None:
        """Stop a compilation whose result is not wanted any more."""
        if self.compiling is not None and self.compiler is not None:
            self.compiler.kill()

    def reached(self, case: Case) -> tuple[list[Fault], tuple[KernelFigures, ...]]:
        """Nothing may be right where no kernel runs; then the figures at the goal's size."""
        with self.task("compile") as task:
            self.compiler = task
            try:
                if faults := failed(task.answer(), ""):
                    return faults, ()
                if faults := self._without_kernels(task, case):
                    return faults, ()
                answer = task.ask(**self._goal_specs(), is_small=False)
            except Ended as ended:
                return [Fault(kind="limit", text=str(ended), case=str(self.goal))], ()
        if faults := failed(answer, str(self.goal)) + _of_torch(answer, str(self.goal)):
            return faults, ()
        if answer["refused"]:
            return [_refusal(answer["refused"], self.order["source"])], ()
        self.compiled = answer["made"]
        return [], tuple(KernelFigures(**figures) for figures in answer["kernels"])

    def at_goal(self) -> list[Fault]:
        """Programs of the goal's own launches, with numbers: what is judged there must be what was right before.

        Some of them are enough where each writes elements of its own: what they wrote must be right, and as much as
        all of them must write. Where they read or add to what others write, all of them run.
        """
        inputs, outputs = self._buffers(self.goal, GOAL_NUMBER, is_poisoned=False)
        pooled: list[Error] = []
        with self.task(self.mode) as task:
            try:
                if faults := failed(task.answer(), ""):
                    return faults
                for _ in range(DRAWS_AT_GOAL):
                    made = self._draw(self.goal, inputs)
                    for shared in outputs:
                        shared.poison()
                    answer = self._ask(task, self.goal, inputs, outputs, sample=SAMPLE)
                    if words := difference(self.compiled, answer.get("made", [])) if not answer["failure"] else "":
                        return [Fault(kind="launch", text=words, case=str(self.goal))]
                    found = {each["id"] for each in answer.get("findings", ())}
                    if answer.get("has_atomics") or "uninitialised-read" in found:
                        return self._all_programs(answer["kernels"])
                    if faults := self._seen(answer, [], str(self.goal)):
                        return faults
                    stores = zip(self.exercise.outputs, outputs, answer["written"], strict=True)
                    if words := "".join(filled(name, len(one.written()), launches) for name, one, launches in stores):
                        return [Fault(kind="goal", text=words, case=str(self.goal))]
                    faults, errors = self._of_sample(made, outputs, answer["written"])
                    pooled = [a.merge(b) for a, b in zip(pooled, errors, strict=True)] if pooled else errors
                    if all(each.ok for each in pooled):
                        return []
                    if faults and any(len(launches) > 1 for launches in answer["written"]):  # one over another
                        return self._all_programs(answer["kernels"])
                    if any(each.misplaced or math.isinf(each.ratio) for each in errors):
                        break
            except Ended as ended:
                return [Fault(kind="limit", text=str(ended), case=str(self.goal))]
        return faults

    def _all_programs(self, kernels: list[str]) -> list[Fault]:
        """The whole launch, judged as at any other size; where that takes too long, no kernel may be a new one."""
        new = [name for name in kernels if name not in self.launched]
        with self.task(self.mode) as task:
            try:
                return failed(task.answer(), "") or self._case(task, self.goal, GOAL_NUMBER)
            except Ended as ended:
                text = "all its programs had to run, because they read or add to what others write"
                text += f": {ended}; fewer programs that do more each take less"
                faults = [Fault(kind="limit", text=text, case=str(self.goal))]
        if new:
            text = f"{new[0]} runs at this size alone, where nobody sees whether it is right"
            return [Fault(kind="launch", text=text, case=str(self.goal))]
        return faults

    def _of_sample(self, made: Inputs, outputs: list[Shared], counts: list[Any]) -> tuple[list[Fault], list[Error]]:
        """Of what was written, what is wrong; and whether enough was. What is right is computed where it is needed."""
        import torch

        faults, errors = [], []
        places = [shared.written() for shared in outputs]
        each = [max(1, shared.tensor[:1].numel()) for shared in outputs]  # elements of an entry
        if is_apart := bool(self.exercise.apart):
            rows = torch.cat([at // size for at, size in zip(places, each, strict=True)]).unique()
            made = tuple(
                x[rows] if name in self.exercise.apart else x
                for name, x in zip(self.exercise.arguments, made, strict=True)
            )
        truths = zip(*self._truths(made), strict=True)
        for name, shared, at, size, (their, true), counted in zip(
            self.exercise.outputs, outputs, places, each, truths, counts, strict=True
        ):
            ours = shared.tensor.flatten()[at]
            there = torch.searchsorted(rows, at // size) * size + at % size if is_apart else at
            index = torch.unravel_index(there, their.shape)
            measured = error(name, ours, their[index], true[index])
            if words := left_out(name, ours.numel(), shared.tensor.numel(), counted):
                measured = replace(measured, misplaced=1)
                faults.append(Fault(kind="launch", text=words, case=str(self.goal)))
            elif not measured.ok:
                text = f"at this size it writes other numbers to {name} than at the sizes before"
                faults.append(Fault(kind="launch", text=text, case=str(self.goal)))
            errors.append(measured)
        return faults, errors

    def refusals(self) -> list[Fault]:
        """Only whether the compiler takes it, where the interpreter's results are wrong already."""
        with self.task("compile") as task:
            try:
                answer = {} if task.answer()["failure"] else task.ask(**self._goal_specs(), is_small=False)
            except Ended:
                return []
        return [_refusal(answer["refused"], self.order["source"])] if answer.get("refused") else []

    def _without_kernels(self, task: Task, case: Case) -> list[Fault]:
        inputs, outputs = self._buffers(case, -1)
        truths = self._fill(case, inputs)
        answer = task.ask(**specs_of(inputs, outputs), is_small=True)
        if faults := failed(answer, str(case)) + _of_torch(answer, str(case)):
            return faults
        _, errors = self._wrong(outputs, *truths, case)
        if all(each.ok for each in errors):
            return [Fault(kind="launch", text="the result is right without any kernel: it comes from somewhere else")]
        return []


def most_draws(ratio: float, elements: int) -> int:
    """Of a case whose error so far is so many times PyTorch's, with so many elements in its outputs.

    >>> most_draws(2.5, 100_000), most_draws(20.0, 100_000), most_draws(20.0, 10), most_draws(math.inf, 100)
    (64, 8, 64, 40)
    """
    return MOST_DRAWS if ratio <= NEAR else min(MOST_DRAWS, max(DRAWS, ENOUGH_ELEMENTS // elements))


def specs_of(inputs: list[Shared], outputs: list[Shared]) -> dict[str, Any]:
    return {
        "inputs": [shared.spec.to_json() for shared in inputs],
        "outputs": [shared.spec.to_json() for shared in outputs],
    }


def failed(answer: dict[str, Any], case: str) -> list[Fault]:
    failure = answer["failure"]
    return [Fault(kind="failed", text=failure["text"], line=failure["line"], case=case)] if failure else []


def _refusal(words: str, file: str) -> Fault:
    """The compiler's sentence, `FILE:LINE: words`; without the ways round that Triton itself advises against."""
    place = re.match(r"\S+?\.py:(\d+): ", words)
    line = int(place[1]) if place else 0
    sentence = (words[place.end() :] if place else words).partition("  Alternatively")[0]
    kernel, _, reason = sentence.partition(" does not compile: ")
    if reason:
        reason = explained(reason, is_in_kernel=True, code=linecache.getline(file, line))
        sentence = f"{kernel} does not compile: {reason}"
    return Fault(kind="compile", text=sentence, line=line)


def _of_torch(answer: dict[str, Any], case: str) -> list[Fault]:
    return [
        Fault(kind="torch", line=line, case=case, text=f"torch's {name} ran: the kernel must do the work")
        for name, line in answer.get("torch", {}).items()
    ]


def _pooled(errors: tuple[Error, ...]) -> Error:
    first, *others = errors
    for other in others:
        first = first.merge(other)
    return first
