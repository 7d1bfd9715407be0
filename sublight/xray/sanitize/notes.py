"""What a watched run has to say: findings, one for each fault and line, with a count and the first example."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from sublight.xray.record import Finding, Place


@dataclass(slots=True, kw_only=True)
class _Note:
    detail: str
    is_information: bool
    times: int = 0


@dataclass(slots=True)
class Notes:
    """Findings as they come in; the first of a kind gives the words."""

    by_place: dict[tuple[str, str, Place | None], _Note] = field(default_factory=dict)

    def add(self, id: str, kernel: str, place: Place | None, detail: str, *, is_information: bool = False) -> None:
        key = (id, kernel, place)
        note = self.by_place.get(key)
        if note is None or (note.is_information and not is_information):  # the graver one gives the words
            note = self.by_place[key] = _Note(
                detail=detail, is_information=is_information, times=note.times if note else 0
            )
        note.times += 1

    def has(self, id: str) -> bool:
        return any(each == id for each, _, _ in self.by_place)

    def findings(self) -> tuple[Finding, ...]:
        """
        >>> notes = Notes()
        >>> notes.add("race", "k", Place(file="a.py", line=3), "two programs write x[0]")
        >>> notes.add("race", "k", Place(file="a.py", line=3), "two programs write x[1]")
        >>> [finding.detail for finding in notes.findings()]
        ['two programs write x[0] (2 times in all)']
        """
        return tuple(
            Finding(
                id=id,
                kernel=kernel,
                place=place,
                detail=note.detail + (f" ({note.times} times in all)" if note.times > 1 else ""),
                is_information=note.is_information,
            )
            for (id, kernel, place), note in self.by_place.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Finds the user's line: the innermost frame that is neither Triton's, nor a library's, nor ours."""

    foreign: tuple[str, ...]  # how the names of their files begin

    @classmethod
    def of_libraries(cls) -> Stack:
        import torch
        import triton

        folders = [os.path.dirname(module.__file__ or "") + os.sep for module in (torch, triton)]
        xray = os.path.dirname(os.path.dirname(__file__))
        ours = [xray + os.sep, os.path.join(os.path.dirname(xray), "backend", "")]  # not our ops' kernels
        return cls(foreign=(*folders, *ours, "<", os.path.dirname(os.__file__) + os.sep))

    def place(self) -> Place:
        return self.instruction()[0]

    def instruction(self) -> tuple[Place, int]:
        """The line, and which instruction of its: one that comes again is a loop's."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(self.foreign):
                return Place(file=file, line=frame.f_lineno), frame.f_lasti
            frame = frame.f_back
        return Place(file="?", line=0), 0

    def place_of(self, error: BaseException) -> Place | None:
        """Where an exception came from, in the user's own code; a cause lies deeper than what it caused."""
        place: Place | None = None
        at: BaseException | None = error
        while at is not None:
            trace = at.__traceback__
            while trace is not None:
                file = trace.tb_frame.f_code.co_filename
                if not file.startswith(self.foreign):
                    place = Place(file=file, line=trace.tb_lineno)
                trace = trace.tb_next
            at = at.__cause__
        return place
