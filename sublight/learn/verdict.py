"""What a check has shown: faults with their places, or what the kernel will reach on a GPU."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sublight import units

NOTEBOOK = "the notebook"  # in place of a file: its functions have no common line numbers
Kind = Literal[
    "syntax",  # Python cannot read it
    "missing",  # the function is not there
    "scan",  # it contains what a submission may not
    "limit",  # time, memory, or the process ended
    "failed",  # it raised an exception
    "torch",  # torch did some of the work
    "launch",  # no kernel was launched, or the result does not come from one
    "inputs",  # the inputs are not what they were
    "unwritten",  # elements of an output were never written
    "values",  # elements of an output are wrong
    "kernel",  # bounds, races, uninitialised reads: what the watched interpreter notes
    "compile",  # the compiler refuses it
    "goal",  # right, but too slow
    "answer",  # a question of the exercise is not answered, or wrongly
]


def visible(words: str) -> str:
    """A submission's words without what moves a terminal's cursor, turns the writing round, or is no character.

    >>> visible("\\x1b[2Jpassed \\u202e\\ud800 a\\tb \u5b8c\u6210\\r\\n")
    '\\\\x1b[2Jpassed \\\\u202e\\\\ud800 a\\tb 完成\\n'
    """
    return "".join(
        each if each.isprintable() or each in "\n\t" or unicodedata.category(each) == "Zs" else ascii(each)[1:-1]
        for each in words.replace("\r\n", "\n")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong: what, where, and what to do."""

    kind: Kind
    text: str
    line: int = 0  # of the learner's file; 0: none in particular
    case: str = ""  # the shape and data type at which it shows


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """What one launch at the goal's shape is on the target GPU; read off its compiled code."""

    name: str
    registers: int
    spill_bytes: int
    occupancy: float | None  # of the SM's warp slots
    limited_by: str
    sectors: int  # of 32 bytes, that the blocks which were followed move
    ideal_sectors: int
    programs: int
    seconds: float | None  # at best
    sentence: str  # what holds it back
    unfollowed: str = ""  # why not all that it reads and writes is known
    uncounted: str = ""  # what it moves besides: bulk copies (TMA), whose tiles the compiled code does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the grader's clock showed at the goal's size, on a GPU."""

    seconds: float  # of one call, in the shortest of the runs
    fraction: float  # of the GPU's limit at that size
    case: str  # the size and data type
    runs_s: tuple[float, ...]
    calls: int  # in each run
    sets: int  # of buffers
    method: str  # graph: launches in CUDA graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one check of one file came to."""

    exercise: str
    file: str
    faults: tuple[Fault, ...]
    cases: tuple[str, ...] = ()  # shapes and data types that were right
    gpu: str = ""
    goal_case: str = ""
    goal_fraction: float = 0.0
    kernels: tuple[KernelFigures, ...] = ()
    least_bytes: int = 0  # that any implementation moves at the goal's shape
    floor_s: float | None = None
    timing: Timing | None = None  # None: it was not run on a GPU
    is_by_data: bool = False  # whole numbers say what is read, as in a gather: the bound may count too little of it
    notes: tuple[str, ...] = ()  # worth knowing, nothing to mend
    source: str = ""
    printed: str = ""  # what the submission printed
    cpu_s: float = 0.0  # of the children and of the judge, without loading torch
    drawn_by: Callable[[Verdict], str] | None = None  # what a notebook shows it with

    @property
    def is_right(self) -> bool:
        return all(fault.kind in ("goal", "answer") for fault in self.faults)

    @property
    def has_passed(self) -> bool:
        return not self.faults

    @property
    def predicted_s(self) -> float | None:
        """All launches, one after the other; None where not all that one does is known."""
        times = [None if self.is_unknown(kernel) else kernel.seconds for kernel in self.kernels]
        return sum(time or 0.0 for time in times) if times and None not in times else None

    def is_unknown(self, kernel: KernelFigures) -> bool:
        """Whether its time would leave out some of what it reads and writes."""
        return bool(kernel.unfollowed) and not self.is_by_data

    @property
    def fraction(self) -> float | None:
        """Of the GPU's limit, that this code allows at best: a bound read off the compiled code, no measurement.
        None where the code is wrong: what leaves out work has no speed."""
        predicted = self.predicted_s
        if not self.floor_s or not predicted or not self.is_right:
            return None
        fraction = self.floor_s / predicted
        counts_too_little = self.is_by_data or any(kernel.uncounted for kernel in self.kernels)
        return min(1.0, fraction) if counts_too_little else fraction

    @property
    def sentence(self) -> str:
        if self.has_passed and self.fraction is None:
            return f"{self.exercise}: passed"
        if self.has_passed and self.timing:
            reached = units.percent(self.timing.fraction)
            return f"{self.exercise}: passed, and reaches {reached} of this {self.gpu}'s limit"
        if self.has_passed:
            return (
                f"{self.exercise}: passed, and its code allows {units.percent(self.fraction)} of the {self.gpu}'s limit"
            )
        if self.is_right:
            lacks = "not yet fast enough" if any(fault.kind == "goal" for fault in self.faults) else "not yet answered"
            return f"{self.exercise}: right, but {lacks}"
        return f"{self.exercise}: not yet right"

    def line(self, fault: Fault) -> str:
        """The learner's own line, where a fault has one."""
        lines = self.source.splitlines()
        return lines[fault.line - 1].strip() if 0 < fault.line <= len(lines) else ""

    def __str__(self) -> str:
        lines = [self.sentence]
        for fault in self.faults:
            number = "" if self.file == NOTEBOOK else f"line {fault.line}, "
            place = f"{number}`{self.line(fault)}`: " if fault.line else ""
            lines.append(f"  {place}{fault.text}" + (f" ({fault.case})" if fault.case else ""))
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        return self.drawn_by(self) if self.drawn_by else None

    def to_json(self) -> dict[str, Any]:
        return {
            "exercise": self.exercise,
            "file": self.file,
            "passed": self.has_passed,
            "right": self.is_right,
            "faults": [
                {"kind": each.kind, "line": each.line or None, "text": each.text, "case": each.case or None}
                for each in self.faults
            ],
            "cases": list(self.cases),
            "gpu": self.gpu or None,
            "goal": {"case": self.goal_case, "fraction": self.goal_fraction} if self.goal_case else None,
            "fraction_predicted": self.fraction,
            "floor_s": self.floor_s,
            "predicted_s": self.predicted_s,
            "timed": {name: getattr(self.timing, name) for name in Timing.__slots__} if self.timing else None,  # type: ignore[attr-defined]
            "least_bytes": self.least_bytes or None,
            "kernels": [
                {name: getattr(kernel, name) for name in KernelFigures.__slots__}  # type: ignore[attr-defined]
                for kernel in self.kernels
            ],
            "notes": list(self.notes),
            "printed": self.printed,
            "cpu_s": self.cpu_s,
        }
