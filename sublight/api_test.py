"""What `import sublight` offers is there, lazily, and does what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sublight
from sublight import api, ops
from sublight.limits import run as limits_run
from sublight.report import fakes


def test_every_name_resolves() -> None:
    for name in dir(sublight):
        assert getattr(sublight, name) is not None
    assert {"softmax", "why", "measure", "gpus", "__version__"} <= set(dir(sublight))


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sofmax'"):
        _ = sublight.sofmax
    with pytest.raises(AttributeError):
        _ = sublight.rows  # a helper of the ops, no op


def test_ops_are_the_functions_of_their_records() -> None:
    assert all(getattr(sublight, op.name) is op.call for op in ops.OPS)


def test_why_takes_a_name_or_an_op() -> None:
    x = torch.randn(3, 5)
    by_name = sublight.why("softmax", x)
    by_op = sublight.why(ops.find("softmax"), x)
    assert (by_name.provider, by_name.kernel, by_name.reason) == (by_op.provider, by_op.kernel, by_op.reason)
    assert by_name.kernel and by_name.reason


def test_measure_limits_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(limits_run, "run", lambda **given: asked.update(given) or fakes.limits())
    assert api.measure_limits(device="cpu", quick=True, only=["host_copy"]) == fakes.limits()
    assert asked == {"kind": "cpu", "quick": True, "only": ["host_copy"]}


def test_bench_ops_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublight.bench.limits_for", lambda machine: fakes.limits())
    run = sublight.bench_ops("add", device="cpu", shapes=["4096"], quick=True)
    assert {row.op for row in run.rows} == {"add"}
    assert {"sublight", "torch"} <= {row.provider for row in run.rows}
    assert all(row.median_s and row.median_s > 0 for row in run.rows)
