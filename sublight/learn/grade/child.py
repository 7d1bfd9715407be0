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


def failure_of(error: BaseException, place_of: Callable[[BaseException], Any]) -> dict[str, Any]:
    """An exception as one line, at the learner's own line."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = traceback.format_exception_only(cause)[-1].strip().splitlines()[0]
    place = place_of(error)
    return {"text": words, "line": place.line if place else 0}
