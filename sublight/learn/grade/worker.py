"""The processes that run submissions: two stand ready, one with Triton's interpreter under watch, one with its compiler.

Each is forked for every check, so that a check does not wait for torch and Triton to load, and a submission leaves
nothing behind. Run as `python -m sublight.learn.grade.worker FD FD`, the ends of two sockets of the grader. Every
message is JSON: the grader never unpickles what a submission could have written. Nothing here knows what is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sublight.learn.grade.sandbox import Budget, confine

Serve = Callable[[Connection, dict[str, Any]], None]
MESSAGE_BYTES = 1 << 16


def main(interpret: int, compile: int) -> None:
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not live through a fork
    if os.fork() == 0:
        os.close(compile)
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton loads
        from sublight.learn.grade import interpret as interpreting

        _stand_ready(interpret, interpreting.prepared())
        os._exit(0)
    os.close(interpret)
    os.environ.pop("TRITON_INTERPRET", None)
    from sublight.learn.grade import compile as compiling

    _stand_ready(compile, compiling.prepared())
    os._exit(0)


def _stand_ready(descriptor: int, serve: Serve) -> None:
    """Fork for every order until the grader hangs up."""
    requests = socket.socket(fileno=descriptor)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        if not data:
            return
        order = json.loads(data)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        child = os.fork()
        if child == 0:
            requests.close()
            _run(serve, Connection(descriptors[0]), order)
        os.close(descriptors[0])
        requests.send(json.dumps(child).encode())


def _run(serve: Serve, channel: Connection, order: dict[str, Any]) -> None:
    """In the child: what the submission prints goes to its log; then it is over, whatever the submission left."""
    os.setsid()  # so that the grader ends all of it at once
    os.environ["HOME"] = os.environ["TMPDIR"] = order["folder"]
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        serve(channel, order)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


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
    import traceback

    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = traceback.format_exception_only(cause)[-1].strip().splitlines()[0]
    place = place_of(error)
    return {"text": words, "line": place.line if place else 0}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
