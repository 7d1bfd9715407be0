"""A paper step: arithmetic in plain Python, called with numbers and lists of numbers; no kernel runs."""

from __future__ import annotations

from typing import Any

from sublight.learn.grade import child


def computed(function: Any, tensors: tuple[list[Any], list[Any]], names: tuple[str, ...], file: str) -> dict[str, Any]:
    """One call; what it returns is written to the grader's memory."""
    inputs, outputs = tensors
    failure = None
    try:
        returned = function(*(x.tolist() for x in inputs))
        results = returned if len(outputs) > 1 else (returned,)
        failure = _mismatch(results, names) or next(filter(None, map(_written, names, results, outputs)), None)
        if failure and len(names) > 1:
            failure["text"] += f": `return {', '.join(names)}`"
    except BaseException as error:  # the submission's; a MemoryError and a SystemExit, too
        failure = child.failure_of(error, file)
    return {"failure": failure, "launches": 0, "has_returned": True}


def _mismatch(results: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    if isinstance(results, tuple | list) and len(results) == len(names):
        return None
    return {"text": f"it must return {len(names)} results", "line": 0}


def _written(name: str, result: Any, output: Any) -> dict[str, Any] | None:
    """Why this result does not fit; None where it was taken."""
    import torch

    try:
        made = torch.tensor(result, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        words = "nothing" if result is None else f"a {type(result).__name__}"
        return {"text": f"{name} must be {_of(output.shape)}, and {words} was returned", "line": 0}
    if made.shape != output.shape:
        return {"text": f"{name} must be {_of(output.shape)}, and {_of(made.shape)} was returned", "line": 0}
    output.copy_(made)
    return None


def _of(shape: Any) -> str:
    """
    >>> _of((3, 4)), _of(())
    ('a list of 3 lists of 4 numbers', 'one number')
    """
    if not len(shape):
        return "one number"
    return "a list of " + " lists of ".join(str(size) for size in shape) + " numbers"
