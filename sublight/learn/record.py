"""What an exercise is: a problem, which an op's record states wherever there is one, sizes, a goal, texts and code.

An exercise is a folder: `__init__.py` holds this record, `starter.py` what the learner begins with, `solution.py` what
passes, `en.md` and `zh.md` the texts. A submission writes into tensors that it is given, so that the grader owns all
memory: `add(x, y, out)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sublight.correct import Call, Inputs
from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost

EXERCISES_FOLDER = Path(__file__).parent / "exercises"
DTYPES = ("float32", "bfloat16")
Kind = Literal["kernel", "paper", "cuda"]  # what a submission is: Triton and its launch, plain Python, or CUDA C++
CUDA = ".cu"  # ends the name of an exercise's variant in CUDA C++


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be computed. Loaded when something is checked: it needs torch."""

    reference: Call  # PyTorch's own composition
    inputs: Callable[[Shape, str, str, int], Inputs]  # (shape, dtype, device, seed)

    def outputs(self, inputs: Inputs) -> Inputs:
        """What the reference gives for these inputs."""
        import torch

        with torch.no_grad():
            results = self.reference(*inputs)
        return results if isinstance(results, tuple) else (results,)


def problem_of(
    op: str,
    arrange: Call = lambda *inputs: inputs,
    shape_of: Callable[[Shape], Shape] = lambda shape: shape,
    around: Callable[[Call], Call] = lambda reference: reference,
    **options: Any,
) -> Problem:
    """The problem of an op's record; `arrange` changes how its inputs lie, `shape_of` names the dimensions as the op
    does, `around` goes around its reference, `options` go to it."""
    from sublight import ops

    record = ops.find(op)

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        return tuple(arrange(*record.inputs(shape_of(shape), dtype, device, seed)))

    return Problem(reference=around(partial(record.reference, **options)), inputs=inputs)


def rows_apart(x: Any) -> tuple[Any, ...]:
    """Rows around 100, 0 and -100 in turn, in place: where exp is taken of a row as it is, it overflows or vanishes."""
    import torch

    row = torch.arange(x.shape[0], device=x.device)
    x += (100 * (1 - row % 3))[:, None].to(x.dtype)
    return (x,)


def rounded_once(reference: Call) -> Call:
    """As PyTorch computes 16-bit products on a GPU: sums in float32, rounded once. On a CPU it is slow at them, and
    some of its kernels round more often."""

    def call(*inputs: Any) -> Any:
        import torch

        kinds = [x.dtype for x in inputs if x.is_floating_point()]
        narrow = next((kind for kind in kinds if kind in (torch.float16, torch.bfloat16)), None)
        if narrow is None:
            return reference(*inputs)
        results = reference(*(x.float() if x.dtype == narrow else x for x in inputs))
        return tuple(y.to(narrow) for y in results) if isinstance(results, tuple) else results.to(narrow)

    return call


def in_cuda(exercise: Exercise, **changes: Any) -> Exercise:
    """The same exercise in CUDA C++: in float32 unless changed, all tensors without gaps."""

    def problem() -> Problem:
        plain = exercise.problem()

        def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
            return tuple(x.contiguous() for x in plain.inputs(shape, dtype, device, seed))

        return Problem(reference=lambda *given: _contiguous(plain.outputs(given)), inputs=inputs)

    same = {"name": f"{exercise.name}{CUDA}", "kind": "cuda", "dtypes": ("float32",), "problem": problem, "answers": {}}
    return replace(exercise, **{**same, **changes})


def _contiguous(results: Inputs) -> Inputs:
    return tuple(y.contiguous() for y in results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a correct kernel must reach at this shape: a fraction of the GPU's limit."""

    shape: Shape
    dtype: str = "float32"
    fraction: float = 0.9
    on_gpu: Shape | None = None  # where a GPU times it: larger, so that it works rather than waits for launches

    @property
    def timed_shape(self) -> Shape:
        return self.on_gpu or self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One step on the way."""

    name: str  # of its folder, of the learner's file and of the function in it; add.cu is add in CUDA C++
    chapter: str  # a key of CHAPTERS
    problem: Callable[[], Problem]
    cost: str | Callable[[Shape, str], Cost]  # an op's name, or the arithmetic where there is no op
    arguments: tuple[str, ...]  # of the function: inputs
    outputs: tuple[str, ...]  # of the function, after the inputs
    sizes: Mapping[str, tuple[int, int]]  # smallest and largest of each dimension that a check draws
    shown: Shape  # that the texts name
    goal: Goal | None  # None: a paper step is right or not
    needs: tuple[str, ...] = ()  # exercises to do before
    kind: Kind = "kernel"
    dtypes: tuple[str, ...] = DTYPES  # that a check draws, the first for every shape
    apart: tuple[str, ...] = ()  # inputs with an entry for each of the outputs' first dimension, apart from one another
    answers: Mapping[str, str | int] = field(default_factory=dict)  # names in the submission, and their right values

    @property
    def sizes_on(self) -> str:
        """The device of tensors that are made for their sizes alone."""
        return "cpu" if self.kind == "paper" else "meta"

    @property
    def function(self) -> str:
        return self.name.removesuffix(CUDA)

    @property
    def file(self) -> str:
        """What the learner's file is called."""
        return self.name if self.kind == "cuda" else f"{self.name}.py"

    @property
    def folder(self) -> Path:
        return EXERCISES_FOLDER / self.chapter / self.function

    @property
    def signature(self) -> str:
        """A kernel's launch writes into outputs that it is given; a paper step returns them. CUDA C++ gets sizes."""
        written = self.outputs if self.kind != "paper" else ()
        sizes = tuple(self.sizes) if self.kind == "cuda" else ()
        return f"{self.function}({', '.join((*self.arguments, *written, *sizes))})"

    def starter(self) -> str:
        return self._code("starter")

    def solution(self) -> str:
        return self._code("solution")

    def _code(self, name: str) -> str:
        return (self.folder / f"{name}{CUDA if self.kind == 'cuda' else '.py'}").read_text(encoding="utf-8")

    def least_cost(self, shape: Shape, dtype: str) -> Cost:
        """What no implementation goes below."""
        if isinstance(self.cost, str):
            return find_cost(self.cost)(shape, dtype, "fwd")
        return self.cost(shape, dtype)
