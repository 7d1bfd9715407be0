"""For the tests: ops run under PyTorch's own profiler on the CPU, and the costs that they are checked against."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.trace.costs import FAMILIES, cost_of, family_of
from sublight.trace.record import Detail

Recorded = Mapping[str, list[tuple[str, Detail]]]  # by case: the ops that it ran, in order
FP32, INT64, BF16 = 4, 8, 2  # bytes


@dataclass(frozen=True)
class Case:
    """A call, one op that it makes, and what that op must cost."""

    run: Callable[[], Any]
    op: str
    family: str
    read_bytes: int
    write_bytes: int
    flops: float | None = None  # None: not checked
    limit: str = ""
    which: int = 0  # of the calls of that op, the first or a later one


def record(cases: Mapping[str, Case]) -> Recorded:
    """One trace of all cases, taken apart again."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for name, case in cases.items():
            with torch.profiler.record_function(f"case {name}"):
                case.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    spans = {e["name"][5:]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("case ")}
    ops = sorted((event for event in events if event.get("cat") == "cpu_op"), key=lambda event: event["ts"])
    return {
        name: [(op["name"], _detail(op["args"])) for op in ops if start <= op["ts"] <= end]
        for name, (start, end) in spans.items()
    }


def check(case: Case, ops: list[tuple[str, Detail]]) -> None:
    calls = [detail for op, detail in ops if op == case.op]
    assert calls, f"{case.op} was not called: {[op for op, _ in ops]}"
    found = cost_of(case.op, calls[case.which])
    assert found is not None
    assert found.family == case.family and case.family in FAMILIES
    assert family_of(case.op) == case.family  # by its name alone
    assert (found.cost.read_bytes, found.cost.write_bytes) == (case.read_bytes, case.write_bytes)
    assert found.cost.launches == 1
    assert found.shape and found.dtype
    assert found.inplace == case.op.endswith("_")
    if case.flops is not None:
        assert found.cost.total_flops == case.flops
    if case.limit:
        assert set(found.cost.flops) == {case.limit}


def plain(*shape: int, dtype: Any = None) -> Any:
    import torch

    return torch.randn(*shape, dtype=dtype)


def leaf(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, requires_grad=True)


def backward(value: Any) -> None:
    """With a dense gradient: the one that sum() makes is expanded from a single element."""
    import torch

    value.backward(torch.ones_like(value))


def _detail(args: Mapping[str, Any]) -> Detail:
    return Detail(
        dims=_frozen(args.get("Input Dims", [])),
        strides=_frozen(args.get("Input Strides", [])),
        types=_frozen(args.get("Input type", [])),
        concrete=_frozen(args.get("Concrete Inputs", [])),
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
