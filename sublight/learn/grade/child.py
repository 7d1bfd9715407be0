"""What a process that runs a submission does in either way: hear orders, load the submission, answer, confined."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sublight.learn.grade.sandbox import Budget, confine

Serve = Callable[[Connection, dict[str, Any]], None]


@contextlib.contextmanager
def answering(channel: Connection) -> Iterator[Callable[..., None]]:
    """Gives what sends an answer; each carries the processor time since the last."""
    spent = cpu_s()

    def answer(**values: Any) -> None:
        nonlocal spent
        now = cpu_s()
        channel.send_bytes(json.dumps({**values, "cpu_s": now - spent}).encode())
        spent = now

    yield answer


def orders(channel: Connection) -> Iterator[dict[str, Any]]:
    """What the grader sends, until it hangs up."""
    while True:
        try:
            yield json.loads(channel.recv_bytes())
        except EOFError:
            return


def cpu_s() -> float:
    """Of this process and of those it started."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(time.ru_utime + time.ru_stime for time in times)


def load(order: dict[str, Any], *, programs: bool) -> Any:
    """The submission's function; from here on this process is confined."""
    file = Path(order["source"])
    source = file.read_text(encoding="utf-8")
    confine(Budget(**order["budget"]), programs=programs)
    module = types.ModuleType("submission")
    module.__file__ = str(file)
    sys.modules["submission"] = module
    exec(compile(source, str(file), "exec"), module.__dict__)
    return getattr(module, order["function"])


def failure_of(error: BaseException, file: str) -> dict[str, Any]:
    """An exception as one line, at the learner's own line, the innermost; a cause lies deeper than what it caused."""
    cause, line, is_in_kernel = error, _line(error, file), False
    while cause.__cause__ is not None:
        is_in_kernel = is_in_kernel or type(cause).__name__ == "InterpreterError"
        cause = cause.__cause__
        line = _line(cause, file) or line
    words = traceback.format_exception_only(cause)[-1].strip().splitlines()[0]
    return {"text": explained(words, is_in_kernel=is_in_kernel), "line": line}


def _line(error: BaseException, file: str) -> int:
    lines = [at.lineno or 0 for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
    return lines[-1] if lines else 0


def explained(words: str, *, is_in_kernel: bool) -> str:
    """What Triton's interpreter says of common mistakes, in words that say what to do.

    >>> explained("TypeError: 'int' object is not iterable", is_in_kernel=False)
    'the grid must be a tuple, also of one number: kernel[(programs,)](...)'
    >>> explained("ZeroDivisionError: division by zero", is_in_kernel=True)
    'ZeroDivisionError: division by zero'
    """
    if "no attribute 'grid_idx'" in words:
        return "a kernel is not called like a function: start it on a grid of programs, kernel[grid](...)"
    if words == "TypeError: 'int' object is not iterable":
        if is_in_kernel:
            return "an address has no elements to index: read them with tl.load(x_ptr + place, mask=mask)"
        return "the grid must be a tuple, also of one number: kernel[(programs,)](...)"
    if "cannot be block type if pointer argument is not a block" in words:
        return "a block of values needs a block of addresses: tl.store(out_ptr + place, values, mask=mask)"
    if "arguments must be of type tl.constexpr" in words:
        return f"{words}: declare it `BLOCK: tl.constexpr` among the kernel's arguments"
    return words
