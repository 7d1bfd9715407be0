"""Ops × shapes × data types × providers × directions: each checked, timed alone, and set against its floor.

Every provider of a case gets the same inputs in the same run. What ran is read from the profiler, not assumed: `ours`
is true only where a kernel of this project was seen.
"""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sublight import correct, timing
from sublight.backend import native, private
from sublight.correct import FAR_OFF, Inputs
from sublight.cost import DTYPES, Cost, Direction, Shape, shape_text
from sublight.errors import BadInput, nearest
from sublight.health.check import wrong_with
from sublight.health.read import this_gpu
from sublight.limits import busy
from sublight.limits import run as limits_run
from sublight.limits.run import Machine
from sublight.op import Op
from sublight.results import Limits, Result, Run
from sublight.timing import Thunk

Progress = Callable[[str, int, int], None]
DISPATCHED, UNDISPATCHED = "sublight", "launch"  # what a user's call gets; our kernels whether or not they win
ALWAYS = (DISPATCHED, "torch")
LADDER = "ladder"  # every named step of ours
NEEDED = {  # the limits that a floor is made of
    "cuda": ("hbm_copy", "launch_graph_node", "vector_fp32", "matmul_bf16"),
    "cpu": ("host_copy", "launch_eager"),
}
CPU_BYTES = 2**25  # a CPU is shown the op, not the machine's limit at a GPU's sizes
CPU_FLOPS = 1e10  # of one entry of a batch
CHECK_ELEMENTS = 2**25  # a float64 reference of more than this is taken over the first rows
MAX_INPUT_SETS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table row before it is measured, less its provider."""

    op: Op
    shape: Shape
    dtype: str
    direction: Direction

    @property
    def cost(self) -> Cost:
        return self.op.cost(self.shape, self.dtype, self.direction)


def missing_limits(machine: Machine, needed: Sequence[str] = ()) -> list[str]:
    """What floors need, and was never measured on this device; or only while it was busy, and now it is not."""
    cached, wanted = limits_run.cached(machine), needed or NEEDED[machine.kind]
    if cached is None:
        return list(wanted)
    missing = [name for name in wanted if cached.value(name) is None]
    again = [name for name in limits_run.measured_busy(cached) if name in wanted and name not in missing]
    return [*missing, *again] if not again or busy.is_quiet() else missing


def limits_for(machine: Machine, progress: Progress | None = None) -> Limits:
    """What this machine reached before; where that lacks what a floor needs, measured now, quickly, and kept."""
    cached = limits_run.cached(machine)
    missing = missing_limits(machine)
    if not missing and cached is not None:
        return cached
    measured = limits_run.run(kind=machine.kind, quick=True, only=missing, progress=progress)
    kept = {limit.name: limit for limit in (cached.limits if cached else ()) if limit.value is not None}
    known = {limit.name: limit for limit in measured.limits} | kept
    return replace(measured, limits=tuple(known.values()), source="measured just now (--quick)")


def run(
    ops: Sequence[Op],
    *,
    machine: Machine,
    limits: Limits,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    against: Sequence[str] = (),
    directions: Sequence[Direction] = (),
    quick: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Measure; Ctrl-C keeps the rows that are done."""
    check_providers(ops, against)
    limits_run.check_room(machine)
    if machine.kind == "cuda" and ops:
        native.wait()  # what a user's calls cost once it is built, a minute after the first one, is what is timed
    work = [
        (case, name)
        for case in cases(ops, machine, shapes, dtypes, directions, quick)
        for name in providers(case.op, against)
    ]
    rows: list[Result] = []
    unwell = wrong_with(this_gpu()) if machine.kind == "cuda" else []
    try:
        for case, group in _grouped(work):
            bench = _Bench(case, machine, limits, quick)
            for name in group:
                if progress:
                    progress(f"{case.op.name} {shape_text(case.shape)} {case.direction} {name}", len(rows), len(work))
                rows.append(bench.measure(name))
            bench.release()
    except KeyboardInterrupt:
        pass
    unwell += wrong_with(this_gpu()) if machine.kind == "cuda" else []
    return Run(
        gpu=machine.gpu.key if machine.gpu else machine.device,
        driver=machine.driver,
        torch=_version("torch"),
        triton=_version("triton"),
        commit=commit(),
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        limits=limits,
        rows=tuple(rows),
        unwell=tuple(dict.fromkeys(unwell)),
    )


def known_providers(op: Op) -> tuple[str, ...]:
    """What can be timed: the call, the steps of our ladder, PyTorch, and whoever else the record names."""
    ladder = [name for name in op.providers if name != DISPATCHED]
    return tuple(dict.fromkeys((DISPATCHED, UNDISPATCHED, *ladder, "torch", "compile", *op.peers)))


def check_providers(ops: Sequence[Op], against: Sequence[str]) -> None:
    from sublight.ops import OPS

    known = list(dict.fromkeys(name for op in (*ops, *OPS) for name in known_providers(op)))
    for name in against:
        if name not in (*known, LADDER):
            raise BadInput(f"unknown provider {name!r}: use one of {nearest(name, [*known, LADDER])}")


def providers(op: Op, against: Sequence[str]) -> tuple[str, ...]:
    """The call and PyTorch's always; others where they are asked for, by name or as the whole ladder."""
    wanted = {*ALWAYS, *against, *(op.providers if LADDER in against else ())}
    missing = [name for name in against if name not in (*known_providers(op), LADDER)]  # their rows say so
    return (*(name for name in known_providers(op) if name in wanted), *missing)


def cases(
    ops: Sequence[Op],
    machine: Machine,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    directions: Sequence[Direction],
    quick: bool,
) -> list[Case]:
    """What there is to measure. What is not given is the op's own: its shapes in bf16, on a CPU small ones in fp32."""
    found = []
    for op in ops:
        first = "bfloat16" if machine.kind == "cuda" else DTYPES[0]
        names = [op.parse_dtype(dtype) for dtype in dtypes] or [first if first in op.dtypes else next(iter(op.dtypes))]
        mine: Sequence[Shape] = [op.parse_shape(words) for words in shapes] or op.shapes
        if not shapes and machine.kind == "cpu":
            mine = _for_cpu(op, quick)
        elif not shapes and quick:
            mine = mine[::4]
        for shape in mine:
            for dtype in names:
                for direction in directions or op.directions:
                    case = Case(op=op.at(shape), shape=shape, dtype=dtype, direction=direction)
                    if direction == "fwd" or (op.launch_backward and case.cost.bytes):  # dz itself needs no kernel
                        found.append(case)
    return found


def commit() -> str:
    """Of the checkout that this runs from, with a mark where it has changes."""
    here = Path(__file__).resolve().parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
        return told.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


class _Bench:
    """One case: its inputs, made once, and its providers, one after the other."""

    def __init__(self, case: Case, machine: Machine, limits: Limits, quick: bool) -> None:
        self.case, self.device, self.limits = case, machine.kind, limits
        self.time_limit_s = 0.05 if quick else 0.15
        self.cache_bytes = machine.cache_bytes

    @functools.cached_property
    def sets(self) -> list[Inputs]:
        """The same op over distinct buffers, together larger than the cache where so many fit in one graph."""
        case = self.case
        wanted = min(timing.sets_for(case.cost.bytes, self.cache_bytes), MAX_INPUT_SETS)
        return [case.op.inputs(case.shape, case.dtype, self.device, seed) for seed in range(wanted)]

    @property
    def cold(self) -> bool:
        return self.case.cost.bytes * len(self.sets) >= self.cache_bytes

    def release(self) -> None:
        self.__dict__.pop("sets", None)
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def measure(self, provider: str) -> Result:
        """One row; what cannot be measured says why in its place."""
        case = self.case
        cost = case.cost
        floor = self.limits.floor(cost)
        row = Result(
            op=case.op.name,
            direction=case.direction,
            shape=dict(case.shape),
            dtype=case.dtype,
            provider=provider,
            floor_s=floor.seconds if floor else None,
            bound=floor.bound if floor else "",
            bytes=cost.bytes,
            flops=cost.total_flops,
        )
        try:
            return self._timed(row, provider)
        except ImportError as error:
            return replace(row, unavailable=f"not installed: {error.name or error}")
        except Exception as error:  # a peer may fail in any way; the others' rows must not be lost with it
            reason = str(error).splitlines()[0] if str(error) else ""
            return replace(row, unavailable=f"{type(error).__name__}: {reason}"[:200])

    def _timed(self, row: Result, provider: str) -> Result:
        import torch

        case = self.case
        with torch.set_grad_enabled(case.direction != "fwd"):
            error = self._error(provider)
            thunks = [self._thunk(provider, inputs) for inputs in self.sets]
            kernels = timing.kernels_of(thunks[0], device=self.device)
            samples = timing.measure(
                thunks,
                device=self.device,
                time_limit_s=self.time_limit_s,
                keep_outputs=case.cost.bytes < 2 * self.cache_bytes,
            )
            call_s = timing.call_seconds(thunks[0], device=self.device, time_limit_s=0.02)
        if provider == "compile" and self.device == "cpu":
            kernels = ("inductor",)  # what is listened to is not what compiled code runs
        ours = {kernel.name for kernel in case.op.kernels}
        return replace(
            row,
            ours=any(name in ours for name in kernels),
            kernel=", ".join(dict.fromkeys(name[:80] for name in kernels)),
            median_s=samples.median_s,
            spread_s=samples.spread_s,
            n=samples.n,
            method=samples.method,
            cache="cold" if self.cold else "warm",
            clock_mhz=samples.clock_mhz[1] if samples.clock_mhz else None,
            energy_j=samples.energy_j,
            call_s=call_s,
            error=error,
            note=", ".join(filter(None, (samples.note, *samples.throttle))),
        )

    def _thunk(self, provider: str, inputs: Inputs) -> Thunk:
        """The call that is timed: forward, backward alone over a forward pass made before, or one after the other."""
        if self.case.direction == "fwd":
            return self._bound(provider, inputs)
        return Backward(
            functools.partial(self._bound, provider), inputs, self.case.op.wrt, alone=self.case.direction == "bwd"
        )

    def _bound(self, provider: str, inputs: Inputs) -> Thunk:
        op = self.case.op
        if own := {DISPATCHED: op.call, UNDISPATCHED: op.launch, "torch": op.reference}.get(provider):
            return functools.partial(own, *inputs)
        if provider in op.providers:
            step = op.providers[provider]
            if reason := step.why_not(*inputs):
                raise NotImplementedError(reason)
            return functools.partial(step.launch, *inputs)
        if provider == "compile":
            return functools.partial(_compiled(op), *inputs)
        if provider not in op.peers:
            raise NotImplementedError(f"{provider} has no {op.name}")
        return op.peers[provider](*inputs)

    def _error(self, provider: str) -> float:
        """Our error over PyTorch's, against float64: the check that a timed kernel computes the right thing."""
        op, inputs = self.case.op, self._checked(self.sets[0])
        bind = functools.partial(self._bound, provider)
        if self.case.direction == "fwd":
            calls = op.judged(lambda *x: bind(x)()), op.judged(op.reference)
            errors = correct.forward_errors(*calls, inputs, writes=bool(op.writes))
        else:
            errors = correct.backward_errors(
                lambda *given: correct.gradients(
                    lambda *leaves: bind(leaves)(), given[-len(inputs) :], given[: -len(inputs)], wrt=op.wrt
                ),
                op.reference,
                inputs,
                correct.random_grads(op.reference, inputs, wrt=op.wrt),
                wrt=op.wrt,
            )
        return min(correct.worst(errors).ratio, FAR_OFF)

    def _checked(self, inputs: Inputs) -> Inputs:
        """The first rows only, or other inputs of a smaller shape, where a float64 reference of all would be large."""
        op, shape = self.case.op, dict(self.case.shape)
        if op.batch in shape:  # entries do not depend on one another
            entries = shape[op.batch]
            keep = max(1, CHECK_ELEMENTS * entries // max(1, max(x.numel() for x in inputs)))
            return tuple(x[:keep] if x.dim() and x.shape[0] == entries > keep else x for x in inputs)
        fewer = dict(shape)
        while op.cost(fewer, self.case.dtype, "fwd").bytes > 16 * CHECK_ELEMENTS and max(fewer.values()) > 1:
            first = next(key for key, size in fewer.items() if size > 1)
            fewer[first] //= 2
        return inputs if fewer == shape else op.inputs(fewer, self.case.dtype, self.device, 0)


class Backward:
    """A backward pass, alone over a forward pass made on first use and kept, or with its forward pass each time.

    Autograd runs a backward on the streams of its forward and of its leaves' first use, and a graph captures one stream
    only: so both are made anew on the stream that is current.
    """

    def __init__(
        self, bind: Callable[[Inputs], Thunk], inputs: Inputs, wrt: tuple[int, ...] | None, *, alone: bool
    ) -> None:
        self._bind, self._inputs, self._wrt, self._alone = bind, inputs, wrt, alone
        self._stream: int | None = None
        self._kept: tuple[list[Any], Inputs, Inputs] | None = None

    def __call__(self) -> Any:
        import torch

        stream = torch.cuda.current_stream().cuda_stream if self._inputs[0].is_cuda else 0
        if self._kept is None or stream != self._stream:
            leaves = correct.leaves_of(self._inputs, self._wrt)
            outputs = self._outputs(leaves)
            # a loss is what backward() is called on: its own gradient is one
            draw = [torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in outputs]
            grads = self._kept[2] if self._kept else tuple(draw)
            self._stream, self._kept = stream, (outputs, tuple(x for x in leaves if x.requires_grad), grads)
            self._leaves = leaves
        outputs, wanted, grads = self._kept
        if self._alone:
            return torch.autograd.grad(outputs, wanted, grads, retain_graph=True)
        outputs = self._outputs(self._leaves)
        return (*outputs, *torch.autograd.grad(outputs, wanted, grads))

    def _outputs(self, leaves: Inputs) -> list[Any]:
        result = self._bind(leaves)()
        return [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]


@functools.cache
def _compiled(op: Op) -> Callable[..., Any]:
    import torch

    private.dynamo.config.cache_size_limit = 4096  # one entry a shape, and every shape is a case of its own
    return torch.compile(op.reference, dynamic=False)


def _for_cpu(op: Op, quick: bool) -> list[Shape]:
    """The op's first shapes with a smaller batch, so that a CPU finishes in seconds; else its largest test shape."""
    dtype = next(iter(op.dtypes))
    if op.batch not in op.keys or op.cost({**op.shapes[0], op.batch: 1}, dtype, "fwd").total_flops > CPU_FLOPS:
        return [max(op.test_shapes, key=lambda shape: op.cost(shape, dtype, "fwd").bytes)]
    smaller: list[Shape] = []
    for shape in op.shapes[:1] if quick else op.shapes[1:6:2]:
        per_entry = op.cost(shape, dtype, "fwd").bytes / shape[op.batch]
        smaller.append({**shape, op.batch: max(1, min(shape[op.batch], int(CPU_BYTES / per_entry)))})
    return smaller


def _grouped(work: Sequence[tuple[Case, str]]) -> Iterator[tuple[Case, list[str]]]:
    by_case: dict[int, tuple[Case, list[str]]] = {}
    for case, name in work:
        by_case.setdefault(id(case), (case, []))[1].append(name)
    yield from by_case.values()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
