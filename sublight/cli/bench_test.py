"""`sublight bench cuda:NAME`: a ladder's steps beside PyTorch and our op, in one run and one table."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sublight import bench, ops
from sublight.cli import bench as cli_bench
from sublight.correct import forward_errors, worst
from sublight.errors import BadInput
from sublight.extensions import LADDERS, timed
from sublight.report import fakes


def test_the_op_beside_a_ladder_computes_the_same() -> None:
    """By its reference, which its kernels are held to elsewhere."""
    for name, beside in cli_bench.BESIDE.items():
        ladder, op = timed.find(name, LADDERS), ops.find(beside)
        for dtype in set(ladder.dtypes) & set(op.dtypes):
            inputs = ladder.inputs(ladder.test_shapes[-1], dtype, "cpu", 0)
            assert worst(forward_errors(op.reference, ladder.reference, inputs)).ok, f"{name} {dtype}"


def test_a_ladder_is_timed_beside_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(kind="cuda", cache_bytes=2**20)
    began = []

    def rows(case: timed.Case, *rest: object, others: dict, **more: object) -> list:
        if began:
            raise KeyboardInterrupt
        began.append((case.ladder.name, dict(case.shape), list(others)))
        return [replace(fakes.run().rows[0], op=case.ladder.name, provider="naive")]

    monkeypatch.setattr("sublight.limits.run.this_machine", lambda kind: machine)
    monkeypatch.setattr(bench, "limits_for", lambda machine, progress: fakes.limits())
    monkeypatch.setattr(bench, "run", lambda chosen, **rest: replace(fakes.run(), rows=tuple(
        replace(fakes.run().rows[0], op=op.name) for op in chosen)))  # fmt: skip
    monkeypatch.setattr(timed, "rows", rows)
    names = ["rms_norm", "cuda:softmax", "cuda:residual"]
    run, interrupted = cli_bench.measure(names[:2], None, ["64x32"], [], [], [], True)
    assert [row.op for row in run.rows] == ["rms_norm", "softmax"] and not interrupted
    assert began.pop() == ("softmax", {"rows": 64, "cols": 32}, ["sublight"])
    run, interrupted = cli_bench.measure(names[1:], None, [], [], [], [], True)
    assert [row.op for row in run.rows] == ["softmax"] and interrupted, "ops that were not named, or the second ladder"


def test_what_a_ladder_does_not_take_is_one_line() -> None:
    for words, message in (
        ((["cuda:matmull"], None, [], [], [], []), "unknown ladder 'cuda:matmull': did you mean cuda:matmul"),
        ((["cuda:matmul"], None, [], [], ["liger"], []), "liger is not for ladders"),
        ((["cuda:matmul"], "cpu", [], [], [], []), "CUDA C\\+\\+ ladders are timed on an NVIDIA GPU"),
    ):
        with pytest.raises(BadInput, match=message):
            cli_bench.measure(*words, False)
