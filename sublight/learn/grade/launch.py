"""A submission on a GPU: it only launches, into memory that the grader owns; the grader fills, times and judges.

Each set's call is captured in a CUDA graph of its own, and the graphs are put together in the order that the grader
gives: what a timed run launches is fixed before the numbers are there, so nothing can be remembered, left out or
batched by looking at them. On a CPU (in tests) a graph is the call itself, in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from sublight.extensions import driver
from sublight.learn.grade import child
from sublight.learn.grade.arena import Plan, opened
from sublight.learn.grade.guard import Guard

Call = Callable[[], None]
Set = tuple[list[Any], list[Any]]  # inputs and outputs of one call


class Player(Protocol):
    """Where calls run."""

    method: str
    own: frozenset[str]  # operations of torch that are not the submission's

    def synchronize(self) -> None:
        """Wait for everything on the device, on whatever stream."""

    def record(self, calls: Sequence[Call]) -> None: ...

    def arrange(self, order: Sequence[int]) -> None:
        """What one replay is, as numbers of the recorded calls."""

    def replay(self, times: int) -> None: ...

    def one(self, number: int) -> None:
        """A single recorded call."""


class OnCpu:
    """Calls in turn."""

    method = "calls"
    own = frozenset({"set_", "copy_"})  # Triton's interpreter moves what it is given

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._order: list[int] = []

    def synchronize(self) -> None:
        pass

    def record(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)

    def arrange(self, order: Sequence[int]) -> None:
        self._order = list(order)

    def replay(self, times: int) -> None:
        for number in self._order * times:
            self._calls[number]()

    def one(self, number: int) -> None:
        self._calls[number]()


class OnGpu:
    """A graph for each call, and one graph of these graphs."""

    own: frozenset[str] = frozenset()

    def __init__(self) -> None:
        import torch

        self.method = "graph"
        self._stream = torch.cuda.Stream()
        self._graphs: list[Any] = []
        self._all: ctypes.c_void_p | None = None
        self._wait = driver.function("cuCtxSynchronize")  # before the submission loads: nothing it patches is used

    def synchronize(self) -> None:
        driver.checked(self._wait(), "cuCtxSynchronize")

    def record(self, calls: Sequence[Call]) -> None:
        import torch

        self.synchronize()
        for call in calls:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.stream(self._stream):
                graph.capture_begin()
                try:
                    call()
                finally:
                    graph.capture_end()
            graph.instantiate()
            self._graphs.append(graph)

    def arrange(self, order: Sequence[int]) -> None:
        whole, runnable = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuGraphCreate", ctypes.byref(whole), ctypes.c_uint(0))
        before: ctypes.c_void_p | None = None
        for number in order:
            node = ctypes.c_void_p()
            part = ctypes.c_void_p(self._graphs[number].raw_cuda_graph())
            after = (ctypes.byref(before), ctypes.c_size_t(1)) if before else (None, ctypes.c_size_t(0))
            driver.call("cuGraphAddChildGraphNode", ctypes.byref(node), whole, *after, part)
            before = node
        driver.call("cuGraphInstantiateWithFlags", ctypes.byref(runnable), whole, ctypes.c_ulonglong(0))
        self._all = runnable

    def replay(self, times: int) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        for _ in range(times):
            driver.call("cuGraphLaunch", self._all, stream)

    def one(self, number: int) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            self._graphs[number].replay()


def prepared() -> child.Serve:
    """Triton and torch loaded, and no GPU touched: a process that did could not fork."""
    import torch  # noqa: F401
    import triton  # noqa: F401

    def serve(channel: Connection, order: dict[str, Any]) -> None:
        with child.answering(channel) as answer:
            try:
                plan = Plan.from_json(order["plan"])
                pages = opened(order["arena"], order["descriptors"], order["device"])
                sets = plan.tensors(pages)
                player: Player = OnGpu() if order["device"] == "cuda" else OnCpu()
                function = child.load(order, programs=True)
                answer(failure=None)
                guard = Guard(order["source"])
                for request in child.orders(channel):
                    answer(**_done(player, guard, function, sets, request, order["source"]))
            except BaseException as error:
                answer(failure=child.failure_of(error, order["source"]))

    return serve


def _done(
    player: Player, guard: Guard, function: Any, sets: list[Set], request: dict[str, Any], file: str
) -> dict[str, Any]:
    """One order of the grader's."""
    failure = None
    try:
        match request["do"]:
            case "call":
                with guard:
                    for inputs, outputs in sets[: request["sets"]]:
                        function(*inputs, *outputs)
            case "record":
                with guard:
                    player.record([_call(function, *each) for each in sets])
            case "arrange":
                player.arrange(request["order"])
            case "replay":
                player.replay(request["times"])
            case "one":
                player.one(request["number"])
        player.synchronize()
    except Exception as error:
        failure = child.failure_of(error, file)
        with contextlib.suppress(Exception):
            player.synchronize()
    noted = {name: line for name, line in guard.noted.items() if name not in player.own}
    return {"failure": failure, "torch": noted, "method": player.method}


def _call(function: Any, inputs: list[Any], outputs: list[Any]) -> Call:
    return lambda: function(*inputs, *outputs)
