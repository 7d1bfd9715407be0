"""Traces of a machine made up for tests: a host that calls, streams that run in order. Its clock counts microseconds.

A launch reaches its stream LATENCY_US after the call began; a stream takes the next event where the last one ended;
a call finds room in the queue or waits for it. So the time of a step can be worked out by hand. Rates are round:
a pass over BIG in bfloat16 (read, write) takes 100 µs, the product of PRODUCT 1 ms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sublight.diagnose import explain
from sublight.diagnose.case import Case, Rule
from sublight.diagnose.record import Finding
from sublight.results import Limit, Limits
from sublight.trace import steps
from sublight.trace.record import EMPTY, NONE, Detail, Device, Kind, Lane, Trace

LATENCY_US = 4.0
CALL_US = 3.0  # of an API call that waits for nothing
HOST_US = 8.0  # of an op on the host, its call included
QUEUE = 1022
BIG = (10_000, 10_000)
PRODUCT = ((4_000, 10_000), (10_000, 10_000))
GEMM, SGEMM, ELEMENTWISE = "nvjet_tst_128x256_64x4", "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel<8>"
BF16, FP32 = "c10::BFloat16", "float"
RATES = {
    **dict.fromkeys(("hbm_read", "hbm_write", "hbm_copy", "hbm_triad"), 4e12),
    **{"matmul_bf16": 800e12, "matmul_tf32": 400e12, "matmul_fp32": 50e12, "vector_fp32": 100e12},
    **{"h2d_pinned": 50e9, "launch_graph_node": 1e-6},
    **{"host_copy": 100e9, "launch_eager": 1e-6},
}
_IDS = ("correlation", "external", "sequence", "bytes", "graph_node")
_LANES = (
    *(Lane(kind="thread", process="python", number=str(n)) for n in range(2)),
    *(Lane(kind="stream", process="GPU 0", number=str(n), device=0) for n in range(3)),
)
_STREAM = 2  # the first stream's lane


def limits(kind: Any = "cuda") -> Limits:
    rates = tuple(Limit(name=name, unit="", value=value) for name, value in RATES.items())
    return Limits(device="made up", kind=kind, date="2026-11-15", limits=rates)


def case(trace: Trace, *others: Trace) -> Case:
    kind = "cuda" if trace.on_gpu else "cpu"
    return explain._case(trace, steps.find(trace), limits(kind), others)


class Machine:
    """Write down what happens, in the order that the host meets it; then ask for the trace."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free: dict[int, float] = {}
        self.thread = 0
        self._rows: list[tuple[float, ...]] = []
        self._names: dict[str, int] = {}
        self._details: dict[Any, Detail] = {str(EMPTY): EMPTY}
        self._ends: list[float] = []
        self._launches = self._steps = 0

    def add(
        self, kind: Kind, name: str, lane: int, start: float, end: float, detail: Detail = EMPTY, **ids: int
    ) -> None:
        self._details.setdefault(str(detail), detail)
        at = self._names.setdefault(name, len(self._names)), list(self._details).index(str(detail))
        self._rows.append((kind, at[0], lane, at[1], start, end, *(ids.get(key, NONE) for key in _IDS)))

    @contextmanager
    def range(self, name: str, kind: Kind = Kind.RANGE, **more: Any) -> Iterator[None]:
        start, thread, place = self.now, self.thread, len(self._rows)
        yield
        self.add(kind, name, thread, start, self.now, **more)
        self._rows.insert(place, self._rows.pop())  # before what it encloses, were it as long

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps += 1
        with self.range(f"ProfilerStep#{self._steps}"):
            yield

    def python(self, us: float) -> None:
        self.now += us

    def load(self, us: float, iterator: str = "_SingleProcessDataLoaderIter") -> None:
        with self.range(f"enumerate(DataLoader)#{iterator}.__next__"):
            self.now += us

    def call(self, name: str, us: float = CALL_US) -> None:
        """An API call that starts nothing."""
        with self.range(name, Kind.RUNTIME):
            self.now += us

    def sync(self, tail_us: float = 2.0, stream: int = 0, name: str = "cudaStreamSynchronize") -> None:
        with self.range(name, Kind.RUNTIME):
            self.now = max(self.now, self.free.get(stream, 0.0)) + tail_us

    def op(
        self,
        name: str,
        *dims: Any,
        us: float,
        kernel: str = ELEMENTWISE,
        dtype: str = BF16,
        host: float = HOST_US,
        grid: int = 1000,
        sequence: int = NONE,
        **more: Any,
    ) -> None:
        """An op on the host, around the launch of a kernel that takes `us`."""
        lists = [bool(shape) and isinstance(shape[0], tuple) for shape in dims]
        types = tuple("TensorList" if many else dtype if dims[at] else "Scalar" for at, many in enumerate(lists))
        with self.range(name, Kind.OP, detail=Detail(dims=dims, types=types), sequence=sequence):
            self.now += (host - CALL_US) / 2
            self.launch(kernel, us, detail=Detail(grid=(grid, 1, 1), block=(256, 1, 1)), **more)
            self.now += (host - CALL_US) / 2

    def lookups(self, count: int, us: float = 100.0, **more: Any) -> None:
        """Work that no rule has a word about: 100 µs at the floor, nothing to fuse, no product."""
        for _ in range(count):
            self.op("aten::embedding", (100_000, 1_000), (100_000,), us=us, kernel="embedding", **more)

    def launch(
        self,
        name: str,
        us: float,
        *,
        stream: int = 0,
        after: int | None = None,
        detail: Detail = EMPTY,
        kind: Kind = Kind.KERNEL,
        call: str = "cudaLaunchKernel",
        blocking: bool = False,
        size: int = NONE,
    ) -> None:
        """A call and what it starts, behind all of stream `after` where that is given."""
        self._launches += 1
        start = self.now
        if len(self._ends) >= QUEUE:
            self.now = max(self.now, self._ends[-QUEUE])
        begin = max(self.now + LATENCY_US, *(self.free.get(line, 0.0) for line in (stream, after) if line is not None))
        self.free[stream] = begin + us
        self._ends.append(begin + us)
        self.now = begin + us + 1.0 if blocking else self.now + CALL_US
        self.add(Kind.RUNTIME, call, self.thread, start, self.now, correlation=self._launches)
        self.add(kind, name, _STREAM + stream, begin, begin + us, detail, correlation=self._launches, bytes=size)

    def copy(self, us: float, size: int, memory: str = "Pageable", *, way: str = "HtoD", **more: Any) -> None:
        name = f"Memcpy {way} ({memory} -> Device)" if way == "HtoD" else f"Memcpy {way} (Device -> {memory})"
        with self.range("aten::copy_", Kind.OP):
            self.now += 2.0
            self.launch(name, us, kind=Kind.MEMCPY, call="cudaMemcpyAsync", size=size, **more)

    def item(self, tail_us: float = 2.0) -> None:
        """What `tensor.item()` does: a copy of four bytes, and the wait for it."""
        with self.range("aten::item", Kind.OP):
            self.now += 2.0
            copy = "Memcpy DtoH (Device -> Pageable)"
            self.launch(copy, 1.0, kind=Kind.MEMCPY, call="cudaMemcpyAsync", size=4)
            self.sync(tail_us)

    def work(self, name: str, *dims: Any, us: float, dtype: str = FP32) -> None:
        """An op on a CPU."""
        with self.range(name, Kind.OP, detail=Detail(dims=dims, types=(dtype,) * len(dims))):
            self.now += us

    def trace(self, *, rank: int | None = None, lost: Sequence[str] = (), tool: Any = "nsight", **meta: Any) -> Trace:
        """The trace of this machine, by a profiler that costs nothing unless told otherwise."""
        rows = sorted(self._rows, key=lambda row: (row[4], -row[5]))
        table = np.array(rows, dtype=np.float64).reshape(-1, 6 + len(_IDS)).T
        kind, name, lane, detail = table[:4].astype(np.int32)
        start, end = np.rint(1000 * table[4:6]).astype(np.int64)
        return Trace(
            source="made up.json",
            tool=tool,
            names=tuple(self._names),
            lanes=_LANES,
            details=tuple(self._details.values()),
            devices=(Device(index=0, name="NVIDIA H200", sms=132),),
            rank=rank,
            lost=tuple(lost),
            meta=meta,
            kind=kind.astype(np.uint8),
            name=name,
            lane=lane,
            detail=detail,
            start_ns=start,
            end_ns=end,
            **dict(zip(_IDS, table[6:].astype(np.int64), strict=True)),
        )


def without_limits(trace: Trace) -> Case:
    """Limits of a device of which nothing is known."""
    known = dataclasses.replace(limits(), limits=())
    return explain._case(trace, steps.find(trace), known, ())


def findings(case: Case, rules: Sequence[Rule]) -> tuple[list[Finding], float]:
    """What these rules find, and what all of it saves together."""
    judged = explain._judged(case, rules, case.step_s)
    return judged.findings, judged.combined_s
