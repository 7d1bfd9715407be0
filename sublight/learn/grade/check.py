"""One check: scan, run on sizes that nobody knows beforehand, judge every result, compile for a GPU, hold to the goal.

Inputs come from this process's own randomness, which no other process has; outputs are poisoned before each call and
read here; what is right is computed here, after the submission has answered. The one rule of `correct.py` decides.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sublight.correct import Error, Inputs, error
from sublight.cost import shape_text
from sublight.gpus import Gpu, memory_peak
from sublight.learn.grade.buffers import Shared, Spec
from sublight.learn.grade.cases import Case, cases_of
from sublight.learn.grade.crew import Crew, Ended, Task
from sublight.learn.grade.judge import fault_of
from sublight.learn.grade.sandbox import Budget
from sublight.learn.grade.scan import branches, runnable, scan, words_between_blocks
from sublight.learn.grade.scratch import tail
from sublight.learn.record import Exercise, Problem
from sublight.learn.verdict import Fault, KernelFigures, Verdict
from sublight.results import Limit, Limits

DRAWS, MOST_DRAWS = 8, 64  # of one case, where luck may have decided …
ENOUGH_ELEMENTS = 4096  # … which is so the more, the fewer elements there are
SAMPLE, DRAWS_AT_GOAL = 12, 4  # programs of each launch at the goal's size; drawn again where luck may have decided
ABOVE_LIMIT = 1.02  # more than this of the limit means that the work was not done
_JOIN = "blocks are joined by & and |, with parentheses around each side"
PRINTED_BYTES = 4000  # of what a submission printed


@dataclass(slots=True, kw_only=True)
class _Check:
    """What one check holds while it runs."""

    exercise: Exercise
    problem: Problem
    crew: Crew
    folder: Path
    gpu: Gpu
    budget: Budget
    order: dict[str, Any]
    goal: Case
    goal_specs: dict[str, Any]
    notes: dict[str, None] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)  # kernels that ran on the cases
    cpu_s: float = 0.0

    @contextmanager
    def task(self, mode: Any) -> Iterator[Task]:
        task = self.crew.begin(mode, self.order, self.budget)
        try:
            yield task
        finally:
            self.cpu_s += task.cpu_s
            task.end()

    def values(self, cases: list[Case]) -> tuple[list[Fault], list[str]]:
        """The first case's faults, and the cases that were right before it."""
        right: list[str] = []
        with self.task("interpret") as task:
            try:
                if faults := _failed(task.answer(), ""):
                    return faults, right
                for number, case in enumerate(cases):
                    if faults := self._case(task, case, number):
                        return faults, right
                    right.append(str(case))
            except Ended as ended:
                at = str(cases[len(right)])
                return [Fault(kind="limit", text=str(ended), case=at)], right
        return [], right

    def _case(self, task: Task, case: Case, number: int) -> list[Fault]:
        """One shape: two draws into the same memory at first, more where PyTorch's luck may have decided."""
        inputs, outputs = self._buffers(case, number)
        draws = 2 if number == 0 else 1
        most = min(MOST_DRAWS, max(DRAWS, ENOUGH_ELEMENTS // sum(shared.tensor.numel() for shared in outputs)))
        errors: list[list[Error]] = []
        results: tuple[Inputs, ...] = ()
        while len(errors) < draws:
            truths = self._fill(case, inputs)
            before = [shared.digest() for shared in inputs]
            for shared in outputs:
                shared.poison()
            answer = task.ask(**_specs(inputs, outputs))
            self.launched |= set(answer.get("kernels", ()))
            changed = [name for name, shared, digest in zip(self.exercise.arguments, inputs, before, strict=True)
                       if shared.digest() != digest]  # fmt: skip
            if faults := self._seen(answer, changed, str(case)):
                has_run = all(fault.kind in ("kernel", "inputs") for fault in faults)
                return faults + (self._wrong(outputs, *truths, case)[0] if has_run else [])
            faults, drawn = self._wrong(outputs, *truths, case)
            if any(one.misplaced for one in drawn):
                return faults
            errors.append(drawn)
            results = results or (tuple(shared.tensor.clone() for shared in outputs), *truths)
            pooled = [_pooled(each) for each in zip(*errors, strict=True)]
            if all(one.ok for one in pooled):
                continue
            if len(errors) >= most:
                worst = next(place for place, one in enumerate(pooled) if not one.ok)
                ours, theirs, truth = (each[worst] for each in results)
                return [fault_of(self.exercise.outputs[worst], ours, theirs, truth, pooled[worst], str(case))]
            draws = max(draws, min(most, 2 * len(errors)))
        return []

    def _buffers(self, case: Case, number: int) -> tuple[list[Shared], list[Shared]]:
        example = self.problem.inputs(case.shape, case.dtype, "meta", 0)
        results = self.problem.outputs(example)
        return (
            [Shared.like(x, self.folder / f"{number}-in-{i}") for i, x in enumerate(example)],
            [Shared.like(y, self.folder / f"{number}-out-{i}") for i, y in enumerate(results)],
        )

    def _fill(self, case: Case, inputs: list[Shared]) -> tuple[Inputs, Inputs]:
        """New random numbers; and what PyTorch makes of them, in their data type and in float64."""
        made = self.problem.inputs(case.shape, case.dtype, "cpu", secrets.randbits(62))
        for shared, x in zip(inputs, made, strict=True):
            shared.tensor.copy_(x)
        wide = tuple(x.double() if x.is_floating_point() else x for x in made)
        return self.problem.outputs(made), self.problem.outputs(wide)

    def _seen(self, answer: dict[str, Any], changed: list[str], case: str) -> list[Fault]:
        """What was seen of a call, before its results are looked at."""
        faults = _failed(answer, case)
        faults += _of_torch(answer, case)
        if not faults and not answer["launches"]:
            text = f"no kernel was launched: {self.exercise.name} must call kernel[grid](...)"
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

    def reached(self, case: Case) -> tuple[list[Fault], tuple[KernelFigures, ...]]:
        """Nothing may be right where no kernel runs; then the figures at the goal's size."""
        with self.task("compile") as task:
            try:
                if faults := _failed(task.answer(), ""):
                    return faults, ()
                if faults := self._without_kernels(task, case):
                    return faults, ()
                answer = task.ask(**self.goal_specs, is_small=False)
            except Ended as ended:
                return [Fault(kind="limit", text=str(ended), case=str(self.goal))], ()
        if faults := _failed(answer, str(self.goal)) + _of_torch(answer, str(self.goal)):
            return faults, ()
        if answer["refused"]:
            return [_refusal(answer["refused"])], ()
        return [], tuple(KernelFigures(**figures) for figures in answer["kernels"])

    def at_goal(self) -> list[Fault]:
        """Some programs of the goal's own launches, with numbers: what is judged there must be what was right before.

        A launch that reads what others wrote cannot be judged by some of its programs: then it must be of a kernel
        that was right on the cases.
        """
        inputs, outputs = self._buffers(self.goal, len(self.order))
        pooled: list[Error] = []
        with self.task("interpret") as task:
            try:
                if faults := _failed(task.answer(), ""):
                    return faults
                for _ in range(DRAWS_AT_GOAL):
                    truths = self._fill(self.goal, inputs)
                    for shared in outputs:
                        shared.poison()
                    answer = task.ask(**_specs(inputs, outputs), sample=SAMPLE)
                    found = {each["id"] for each in answer.get("findings", ())}
                    if "uninitialised-read" in found:
                        return self._unknown_kernels(answer)
                    if faults := self._seen(answer, [], str(self.goal)):
                        return faults
                    faults, errors = self._of_sample(outputs, *truths)
                    pooled = [a.merge(b) for a, b in zip(pooled, errors, strict=True)] if pooled else errors
                    if all(each.ok for each in pooled):
                        return []
                    if any(math.isinf(each.ratio) for each in errors):
                        break
            except Ended as ended:
                return [Fault(kind="limit", text=str(ended), case=str(self.goal))]
        return faults

    def _of_sample(self, outputs: list[Shared], theirs: Inputs, truth: Inputs) -> tuple[list[Fault], list[Error]]:
        """Of what was written, what is wrong."""
        faults, errors = [], []
        for name, shared, their, true in zip(self.exercise.outputs, outputs, theirs, truth, strict=True):
            at = shared.written()
            ours = shared.tensor[at]
            measured = error(name, ours, their[at], true[at])
            if not ours.numel():
                measured = replace(measured, misplaced=1)
                text = f"at this size {SAMPLE} of its programs, drawn by chance, write nothing to {name}"
                faults.append(Fault(kind="launch", text=text, case=str(self.goal)))
            elif not measured.ok:
                text = f"at this size it writes other numbers to {name} than at the sizes before"
                faults.append(Fault(kind="launch", text=text, case=str(self.goal)))
            errors.append(measured)
        return faults, errors

    def _unknown_kernels(self, answer: dict[str, Any]) -> list[Fault]:
        return [
            Fault(kind="launch", text=f"{name} runs at this size alone, where nobody sees whether it is right",
                  case=str(self.goal))
            for name in answer["kernels"]
            if name not in self.launched
        ]  # fmt: skip

    def refusals(self) -> list[Fault]:
        """Only whether the compiler takes it, where the interpreter's results are wrong already."""
        with self.task("compile") as task:
            try:
                answer = {} if task.answer()["failure"] else task.ask(**self.goal_specs, is_small=False)
            except Ended:
                return []
        return [_refusal(answer["refused"])] if answer.get("refused") else []

    def _without_kernels(self, task: Task, case: Case) -> list[Fault]:
        inputs, outputs = self._buffers(case, -1)
        truths = self._fill(case, inputs)
        answer = task.ask(**_specs(inputs, outputs), is_small=True)
        if faults := _failed(answer, str(case)) + _of_torch(answer, str(case)):
            return faults
        _, errors = self._wrong(outputs, *truths, case)
        if all(each.ok for each in errors):
            return [Fault(kind="launch", text="the result is right without any kernel: it comes from somewhere else")]
        return []


def _without_data(problem: Problem, case: Case) -> dict[str, Any]:
    """Specs without files: nobody writes these sizes. The first such call in a process loads more of torch."""
    inputs = problem.inputs(case.shape, case.dtype, "meta", 0)

    def specs(tensors: Inputs) -> list[dict[str, Any]]:
        kinds = [str(x.dtype).removeprefix("torch.") for x in tensors]
        return [
            Spec(file="", shape=tuple(x.shape), strides=tuple(x.stride()), dtype=kind).to_json()
            for x, kind in zip(tensors, kinds, strict=True)
        ]

    return {"inputs": specs(inputs), "outputs": specs(problem.outputs(inputs))}


def check(
    exercise: Exercise, source: str, *, crew: Crew, gpu: Gpu, file: str = "", budget: Budget | None = None
) -> Verdict:
    """Judge a submission; everything that it is comes from `source`."""
    file = file or f"{exercise.name}.py"
    goal = exercise.goal
    verdict = Verdict(
        exercise=exercise.name,
        file=file,
        faults=tuple(scan(source, exercise.name)),
        gpu=gpu.key,
        source=source,
        goal_case=f"{shape_text(goal.shape)} {goal.dtype}",
        goal_fraction=goal.fraction,
    )
    if verdict.faults:
        return verdict
    problem, largest = exercise.problem(), Case(shape=goal.shape, dtype=goal.dtype)
    goal_specs = _without_data(problem, largest)  # while the crew gets ready
    began = time.process_time()
    with crew.folder() as name:
        folder = Path(name)
        script = folder / f"{exercise.name}.py"
        script.write_text(runnable(source), encoding="utf-8")
        order = {
            "source": str(script),
            "function": exercise.name,
            "folder": name,
            "log": str(folder / "printed"),
            "gpu": gpu.key,
        }
        running = _Check(exercise=exercise, problem=problem, crew=crew, folder=folder, gpu=gpu,
                         budget=budget or Budget(), order=order, goal=largest, goal_specs=goal_specs)  # fmt: skip
        cases = cases_of(exercise, secrets.SystemRandom())
        faults, right = running.values(cases)
        kernels: tuple[KernelFigures, ...] = ()
        if not faults:
            faults, kernels = running.reached(cases[0])
        elif branches(source):
            faults = running.refusals() + faults
            for line in words_between_blocks(source):
                running.notes[f"line {line}: `and` and `or` are for single numbers: {_JOIN}"] = None
        printed = tail(folder / "printed", PRINTED_BYTES).decode(errors="replace")
        paths = name + "/"
        cost = exercise.least_cost(goal.shape, goal.dtype)
        floor_s = cost.bytes / _memory_rate(gpu, cost.read_bytes, cost.write_bytes)
        judged = replace(verdict, faults=tuple(faults), kernels=kernels, floor_s=floor_s)
        if not faults and not (faults := _held_to_goal(judged)):
            faults = running.at_goal()
    verdict = replace(
        verdict,
        faults=tuple(replace(fault, text=fault.text.replace(paths, "")) for fault in faults),
        cases=tuple(right),
        kernels=kernels,
        least_bytes=cost.bytes,
        floor_s=floor_s,
        notes=tuple(note.replace(paths, "") for note in running.notes),
        printed=printed,
        cpu_s=running.cpu_s + time.process_time() - began,
    )
    return verdict


def _held_to_goal(verdict: Verdict) -> list[Fault]:
    case, fraction = verdict.goal_case, verdict.fraction
    if fraction is None:
        why = "; ".join(kernel.sentence for kernel in verdict.kernels) or "no kernel was launched at this size"
        return [Fault(kind="goal", text=f"what it reaches cannot be predicted: {why}", case=case)]
    if fraction > ABOVE_LIMIT:
        text = f"it would reach {fraction:.2f} of the limit, which cannot be: at this size it leaves out some work"
        return [Fault(kind="launch", text=text, case=case)]
    if fraction < verdict.goal_fraction:
        slowest = max(verdict.kernels, key=lambda kernel: kernel.seconds or 0.0)
        text = f"its code allows {fraction:.2f} of the {verdict.gpu}'s limit, the goal is {verdict.goal_fraction:g}"
        return [Fault(kind="goal", text=f"{text}: {slowest.name}: {slowest.sentence}", case=case)]
    return []


def _memory_rate(gpu: Gpu, read_bytes: int, write_bytes: int) -> float:
    """As the roof over a kernel takes it: what was reached on such a GPU, else the vendor's figure."""
    reached = tuple(Limit(name=name, unit="B/s", value=rate) for name, rate in gpu.reached.items())
    known = Limits(device=gpu.name, kind="cuda", limits=reached).memory_rate(read_bytes, write_bytes)
    return known or memory_peak(gpu).value


def _specs(inputs: list[Shared], outputs: list[Shared]) -> dict[str, Any]:
    return {
        "inputs": [shared.spec.to_json() for shared in inputs],
        "outputs": [shared.spec.to_json() for shared in outputs],
    }


def _failed(answer: dict[str, Any], case: str) -> list[Fault]:
    failure = answer["failure"]
    return [Fault(kind="failed", text=failure["text"], line=failure["line"], case=case)] if failure else []


def _refusal(words: str) -> Fault:
    """The compiler's sentence, `FILE:LINE: words`; without the ways round that Triton itself advises against."""
    place = re.match(r"\S+?\.py:(\d+): ", words)
    sentence = words[place.end() :] if place else words
    return Fault(kind="compile", text=sentence.partition("  Alternatively")[0], line=int(place[1]) if place else 0)


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
