"""What `import sublight` offers beside the ops: measure a call, this machine, the ops; ask what a call gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sublight.timing import measure

if TYPE_CHECKING:
    from sublight.limits.probe import Kind
    from sublight.op import Choice, Op
    from sublight.results import Limits, Run

__all__ = ["bench_ops", "measure", "measure_limits", "why"]


def why(op: str | Op, *args: Any) -> Choice:
    """Which implementation `op` runs for these arguments, and the reason."""
    from sublight import ops

    found = ops.find(op) if isinstance(op, str) else op
    return found.choose(*args)


def measure_limits(*, device: Kind | None = None, quick: bool = False, only: Iterable[str] = ()) -> Limits:
    """What `sublight limits` measures; the GPU where there is one, unless `device` says otherwise."""
    from sublight.limits import run

    return run.run(kind=device, quick=quick, only=only)


def bench_ops(*names: str, device: Kind | None = None, shapes: Sequence[str] = (), quick: bool = False) -> Run:
    """What `sublight bench` measures: these ops, or all, against their floors on this machine."""
    from sublight import bench, ops
    from sublight.limits import run

    machine = run.this_machine(device)
    chosen = [ops.find(name) for name in names] or ops.OPS
    return bench.run(chosen, machine=machine, limits=bench.limits_for(machine), shapes=shapes, quick=quick)
