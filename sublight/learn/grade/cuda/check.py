"""One check of CUDA C++: scan, play under watch, judge, compile by nvcc where there is one, hold to the goal.

What a CPU shows here: values by the one rule, bounds, races, barriers, uninitialised and misaligned accesses, each at
its line; by nvcc registers, spills, sectors and the time below which the code cannot go. What it does not show is said:
the kernel never ran on a GPU.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sublight.cost import shape_text
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.learn.grade import child
from sublight.learn.grade.buffers import Shared
from sublight.learn.grade.cases import Case, cases_of
from sublight.learn.grade.crew import Crew, Ended, Task
from sublight.learn.grade.cuda import build
from sublight.learn.grade.cuda.play import KINDS
from sublight.learn.grade.cuda.translate import call_of, for_host, pointer_of, scan
from sublight.learn.grade.goal import floor_s, held_to_goal
from sublight.learn.grade.running import GOAL_NUMBER, Running, failed, specs_of
from sublight.learn.grade.sandbox import Budget
from sublight.learn.record import Exercise
from sublight.learn.verdict import Fault, KernelFigures, Verdict

PLAYED = "played on a CPU: values, bounds, races and barriers are checked; it has not run on a GPU"
NO_NVCC = "no nvcc here: it was not compiled for a GPU, so registers, sectors and the goal are not judged"
FIRST_LOOK = {"parts": 2, "least": 2, "seconds": 0.0}  # at the goal's size: only what is launched
BUDGET = Budget(cpu_s=20.0)


@dataclass(slots=True, kw_only=True)
class Playing(Running):
    """A check's stages where a library of the submission's is called."""

    library: Path
    codes: Future[Any] | None = None  # what nvcc makes of the file; None: there is no nvcc
    lines: dict[int, int] = field(default_factory=dict)  # by address in the library

    def _ask(self, task: Task, case: Case, inputs: list[Shared], outputs: list[Shared], **more: Any) -> dict[str, Any]:
        numbers = [case.shape[name] for name in self.exercise.sizes]
        answer = task.ask(**specs_of(inputs, outputs), numbers=numbers, **more)
        if not answer["failure"]:
            answer["findings"] = self._findings(answer, case)
            answer["launched"], answer["made"] = answer["made"], [json.dumps(each) for each in answer["made"]]
        return answer

    def _findings(self, answer: dict[str, Any], case: Case) -> list[dict[str, Any]]:
        notes, base = answer["notes"], answer["base"]
        new = [note["pc"] for note in notes if not note["line"] and note["pc"] and note["pc"] not in self.lines]
        self.lines |= dict(zip(new, build.line_of(self.library, new, base, self.exercise.file), strict=True))
        kinds = {KINDS[note["kind"]] for note in notes}
        hidden = {"shared-uninitialised"} if "shared-race" in kinds else set()  # what a race leads to
        return [
            {"id": KINDS[note["kind"]], "line": note["line"] or self.lines.get(note["pc"], 0),
             "detail": self._words(note, case), "is_information": False}
            for note in notes
            if KINDS[note["kind"]] not in hidden
        ]  # fmt: skip

    def _words(self, note: dict[str, Any], case: Case) -> str:
        """A note of watched.h as a sentence."""
        names = (*self.exercise.arguments, *self.exercise.outputs)
        kind, thread = KINDS[note["kind"]], f"thread {note['thread']} of block {note['block']}"
        verb = "writes" if note["is_write"] else "reads"
        if kind == "bad-launch":
            return f"a block of {note['place']} threads, or a grid of no block: 1 to 1024 threads, 1 block at least"
        if kind == "barriers":
            return "threads of a block wait at different barriers: all of them must reach each __syncthreads()"
        if kind in ("shared-race", "shared-uninitialised"):
            if kind == "shared-race":
                text = f"{thread} {verb} shared memory that thread {note['other']} uses at the same time"
                return f"{text}: a __syncthreads() between them is missing"
            return f"{thread} reads shared memory that no thread of its block has written"
        name = names[note["tensor"]]
        sizes = {each: x.numel() for each, x in zip(names, sum(self._shapes_of(case), ()), strict=True)}
        place = f"{name}[{note['place']}]" if note["place"] >= 0 else f"before {name}[0]"
        if kind == "out-of-bounds":
            return f"{thread} {verb} {place}, and {name} has {sizes[name]} elements"
        if kind == "race":
            text = f"{thread} {verb} {place}, which another thread of this launch writes, and nothing orders the two"
            return f"{text}: give each element one writer, or use atomicAdd"
        if kind == "uninitialised-read":
            return f"{thread} reads {place}, which nobody has written"
        if kind == "input-written":
            return f"{thread} writes {place}: {name} is an input"
        if kind == "misaligned":
            return f"{place} is no multiple of the width that is read or written at once"
        return f"the host {verb} {place}: tensors are in the GPU's memory, which kernels alone reach"

    def figures(self) -> tuple[list[Fault], tuple[KernelFigures, ...]]:
        """What is launched at the goal's size, and what nvcc makes of it."""
        inputs, outputs = self._buffers(self.goal, GOAL_NUMBER, is_poisoned=False)
        with self.task(self.mode) as task:
            try:
                if faults := failed(task.answer(), ""):
                    return faults, ()
                answer = self._ask(task, self.goal, inputs, outputs, sample=FIRST_LOOK)
            except Ended as ended:
                return [Fault(kind="limit", text=str(ended), case=str(self.goal))], ()
        if faults := self._seen(answer, [], str(self.goal)):
            return [fault for fault in faults if "uninitialised" not in fault.text] or faults, ()
        self.compiled = answer["made"]
        if self.codes is None:
            return [], ()
        try:
            codes = self.codes.result()
        except BadInput as error:
            return [refusal(str(error))], ()
        tensors = [shared.tensor for shared in (*inputs, *outputs)]
        return [], tuple(figures_of(codes, launch, tensors) for launch in answer["launched"])


def refusal(words: str) -> Fault:
    """
    >>> refusal("/tmp/a/add.cu:3: nvcc: identifier \\"y\\" is undefined")
    Fault(kind='compile', text='nvcc: identifier "y" is undefined', line=3, case='')
    """
    place = re.match(r".*?\.cu:(\d+): ", words)
    return Fault(kind="compile", text=words[place.end() :] if place else words, line=int(place[1]) if place else 0)


def figures_of(codes: Any, launch: dict[str, Any], tensors: list[Any]) -> KernelFigures:
    """One launch of the kernels that nvcc compiled: its grid, its block and its arguments as they were played."""
    from sublight.learn.grade.compile import figures
    from sublight.xray.examine import bounded

    name = launch["name"].split("<")[0].strip()
    code = next(each for each in codes if re.split(r"[<(]", each.name)[0].split()[-1] == name)
    sides, grid = _trimmed(launch["threads"]), _trimmed(launch["grid"])
    resources = replace(code.resources, threads=math.prod(sides), dynamic_shared_bytes=launch["shared"])
    arguments = {
        argument: _argument(value, tensors)
        for argument, value in zip(code.signature, launch["arguments"], strict=False)
    }
    options = {**code.options, **({"block": sides} if sides[1:] else {})}
    code = replace(code, name=name, resources=resources, grid=grid, arguments=arguments, options=options)
    return KernelFigures(**figures(code, bounded(code), grid))


def _argument(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, list):
        return tensors[value[0]] if value[0] >= 0 else None
    return float(value) if isinstance(value, str) else value


def _trimmed(sides: list[int]) -> tuple[int, ...]:
    """
    >>> _trimmed([32, 8, 1]), _trimmed([1, 1, 1])
    ((32, 8), (1,))
    """
    while sides[1:] and sides[-1] == 1:
        sides = sides[:-1]
    return tuple(sides)


def check(exercise: Exercise, source: str, *, gpu: Gpu, file: str = "", budget: Budget | None = None) -> Verdict:
    """Judge a submission in CUDA C++."""
    goal = exercise.goal
    assert goal
    verdict = Verdict(
        exercise=exercise.name,
        file=file or exercise.file,
        faults=tuple(scan(source, exercise.function)),
        gpu=gpu.key,
        source=source,
        goal_case=f"{shape_text(goal.shape)} {goal.dtype}",
        goal_fraction=goal.fraction,
    )
    if verdict.faults:
        return verdict
    problem = exercise.problem()
    tensors = problem.inputs(exercise.shown, exercise.dtypes[0], "meta", 0)
    kinds = [(x, False) for x in tensors] + [(y, True) for y in problem.outputs(tensors)]
    pointers = [pointer_of(str(x.dtype).removeprefix("torch."), is_output=is_output) for x, is_output in kinds]
    call = call_of(exercise.function, pointers, len(exercise.sizes))
    program = f'#include "watched.h"\n#line 1 "{exercise.file}"\n{for_host(source)}\n#line 1 "{build.CALLER}"\n{call}\n'
    began = child.cpu_s()
    notes: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="sublight-learn-") as made, ThreadPoolExecutor(1) as pool:
        written = Path(made) / exercise.file
        written.write_text(source, encoding="utf-8")
        codes = pool.submit(_by_nvcc, written, gpu) if has_nvcc() else None  # while the other compiler works
        library, faults = build.library(program, Path(made), exercise.file)
        if library is None:
            verdict = replace(verdict, faults=tuple(faults))
        else:
            with Crew(modes=("play",)) as crew, crew.folder() as name:
                order = {"library": str(library), "source": str(written), "folder": name, "log": f"{name}/printed"}
                playing = Playing(exercise=exercise, problem=problem, crew=crew, folder=Path(name), gpu=gpu,
                                  mode="play", budget=budget or BUDGET, order=order, library=library,
                                  codes=codes)  # fmt: skip
                verdict = _judged(verdict, playing)
            notes = (*playing.notes, PLAYED, *(() if codes else (NO_NVCC,)))
    return replace(verdict, notes=notes, cpu_s=child.cpu_s() - began)  # its compilers and players have been waited for


def has_nvcc() -> bool:
    return shutil.which("nvcc") is not None


def _by_nvcc(file: Path, gpu: Gpu) -> Any:
    from sublight.xray.inputs.cuda import codes_of_cuda

    return codes_of_cuda(file, "", [gpu])


def _judged(verdict: Verdict, playing: Playing) -> Verdict:
    exercise = playing.exercise
    assert exercise.goal
    cost = exercise.least_cost(exercise.goal.shape, exercise.goal.dtype)
    verdict = replace(verdict, least_bytes=cost.bytes, floor_s=floor_s(playing.gpu, cost))
    faults, right = playing.values(cases_of(exercise, secrets.SystemRandom()))
    verdict = replace(verdict, faults=tuple(faults), cases=tuple(right))
    if faults:
        return verdict
    faults, kernels = playing.figures()
    verdict = replace(verdict, faults=tuple(faults), kernels=kernels)
    faults = faults or (held_to_goal(verdict) if playing.codes else []) or playing.at_goal()
    return replace(verdict, faults=tuple(faults))
