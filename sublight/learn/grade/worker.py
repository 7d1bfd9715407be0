"""The processes that run submissions: one stands ready with Triton's interpreter under watch, one with its compiler.

Each is forked for every check, so that a check does not wait for torch and Triton to load, and a submission leaves
nothing behind. Run as `python -m sublight.learn.grade.worker interpret=FD compile=FD`, ends of the grader's sockets;
`launch=FD` stands ready for a GPU, and does not touch it before it has forked. Every message is JSON: the grader never
unpickles what a submission could have written. Nothing here knows what is right.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from sublight.learn.grade.child import Serve

MESSAGE_BYTES = 1 << 16
MOST_DESCRIPTORS = 2  # the child's channel, and memory that it is to map


def main(ends: dict[str, int]) -> None:
    """A process for each mode, with its end of the grader's socket; this one takes the last."""
    gc.disable()  # loading makes many objects, and hardly any garbage
    if set(ends) != {"play"}:
        import torch

        torch.set_num_threads(1)  # OpenMP's threads do not live through a fork
    *others, last = ends
    for mode in others:
        if os.fork() == 0:
            _serve(mode, ends)
    _serve(last, ends)


def _serve(mode: str, ends: dict[str, int]) -> None:
    for other, end in ends.items():
        if other != mode:
            os.close(end)
    os.environ.pop("TRITON_INTERPRET", None)
    if mode == "interpret" or (mode == "launch" and os.environ.get("CUDA_VISIBLE_DEVICES") == ""):
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton loads
    module = "cuda.play" if mode == "play" else mode
    _stand_ready(ends[mode], importlib.import_module(f"sublight.learn.grade.{module}").prepared())
    os._exit(0)


def _stand_ready(descriptor: int, serve: Serve) -> None:
    """Fork for every order until the grader hangs up. What is loaded is no garbage: a child's collector would go
    through all of it, and so copy its pages."""
    gc.freeze()
    gc.enable()
    requests = socket.socket(fileno=descriptor)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not data:
            return
        order = json.loads(data)
        if "kill" in order:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(order["kill"], signal.SIGKILL)
            requests.send(b"0")
            continue
        if "wait" in order:
            if order.get("end"):  # here, where its number means it: a sandbox has numbers of its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(order["wait"], signal.SIGKILL)
            _, status = os.waitpid(order["wait"], 0)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        child = os.fork()
        if child == 0:
            requests.close()
            _run(serve, Connection(descriptors[0]), {**order, "descriptors": descriptors[1:]})
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(json.dumps(child).encode())


def _run(serve: Serve, channel: Connection, order: dict[str, Any]) -> None:
    """In the child: what the submission prints goes to its log; then it is over, whatever the submission left."""
    os.setsid()  # so that the grader ends all of it at once
    os.environ["HOME"] = os.environ["TMPDIR"] = order["folder"]
    os.environ["TRITON_CACHE_DIR"] = os.path.join(order["folder"], "cache")  # nothing for other programs to find
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        serve(channel, order)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main({mode: int(end) for mode, _, end in (word.partition("=") for word in sys.argv[1:])})
