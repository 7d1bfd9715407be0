"""Answers that an exercise asks for beside the code: names in the submission that must have the right values."""

from __future__ import annotations

import ast

from sublight.learn.record import Exercise
from sublight.learn.verdict import Fault


def wrong_answers(exercise: Exercise, source: str) -> list[Fault]:
    """Each name that is missing or has another value; the source is read, not run."""
    given: dict[str, tuple[object, int]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                given[node.targets[0].id] = ast.literal_eval(node.value), node.lineno
            except ValueError:  # no plain value: no answer
                continue
    faults = []
    for name, right in exercise.answers.items():
        value, line = given.get(name, ("", 0))
        if line == 0:
            faults.append(Fault(kind="answer", text=f"{name} is missing: write {name} = ... as in the starter"))
        elif value in ("", 0, None):
            text = f"{name} has no answer yet: the page says what it may be"
            faults.append(Fault(kind="answer", line=line, text=text))
        elif value != right:
            faults.append(Fault(kind="answer", line=line, text=f"{name} = {value!r} is not what it is"))
    return faults
