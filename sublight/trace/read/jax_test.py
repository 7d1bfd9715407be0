"""JAX's Chrome traces: what is a device's work, what only groups it, and what an explanation makes of it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose.consistency import contradictions
from sublight.diagnose.explain import explain
from sublight.errors import BadInput
from sublight.trace import load
from sublight.trace.read import jax_fakes
from sublight.trace.record import Kind, Trace


def loaded(tmp_path: Path, found: Any = None, name: str = "host.trace.json.gz") -> Trace:
    data = found if isinstance(found, bytes) else jax_fakes.text(found)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (trace,) = load.load(tmp_path / name)
    return trace


def row(trace: Trace, name: str) -> int:
    return int(trace.rows_named(lambda each: each == name)[0])


def test_every_event_is_what_its_labels_say(tmp_path: Path) -> None:
    trace = loaded(tmp_path)
    assert trace.tool == "jax" and trace.lost == ()
    assert Counter(Kind(kind).name for kind in trace.kind.tolist()) == {
        "KERNEL": 9, "MEMCPY": 3, "RUNTIME": 15, "OP": 3, "PYTHON": 3, "RANGE": 3,
    }  # fmt: skip
    gemm = row(trace, "gemm_fusion_dot_general_7")
    lane = trace.lane_of(gemm)
    assert (lane.kind, lane.number, lane.device) == ("stream", "13", 0)
    detail = trace.detail_of(gemm)
    assert (detail.grid, detail.block, detail.registers) == ((128, 1, 1), (256, 1, 1), 226)
    assert detail.module == "jit(train_step)/transformer/mlp/dot_general"
    copy = row(trace, "Memcpy HtoD (Pageable -> Device)")
    assert trace.bytes[copy] == 65536
    assert "train.py(88): main" in trace.names and "train#2" in trace.names


def test_groups_of_the_same_time_are_no_work(tmp_path: Path) -> None:
    trace = loaded(tmp_path)
    assert not {"jit_train_step", "transformer", "gemm_fusion_dot_general.7"} & set(trace.names)


def test_a_step_of_jax_is_explained(tmp_path: Path) -> None:
    found = explain([loaded(tmp_path, jax_fakes.trace(steps=4))])
    assert contradictions(found) == []
    assert found.steps == 4 and found.step_s == pytest.approx(2e-3, rel=0.02)
    assert found.breakdown["communication"] == pytest.approx(600e-6, rel=0.02)
    first = found.ops[0]
    assert (first.name, first.family) == ("gemm_fusion_dot_general_7", "matmul")
    assert first.device_s == pytest.approx(800e-6, rel=0.01)
    assert "train.py:41" in first.source or first.module.startswith("jit(train_step)")


def test_a_file_whose_mark_was_lost_is_known_by_its_labels(tmp_path: Path) -> None:
    found = jax_fakes.trace()
    del found["metadata"]
    assert loaded(tmp_path, found).tool == "jax"
    assert loaded(tmp_path, found["traceEvents"]).tool == "jax"


def test_a_tpus_work_is_on_its_ops_thread(tmp_path: Path) -> None:
    found = jax_fakes.trace()
    found["traceEvents"][0]["args"]["name"] = "/device:TPU:0"
    trace = loaded(tmp_path, found)
    assert [trace.name_of(at) for at in trace.device_rows.tolist()] == ["gemm_fusion_dot_general.7"] * 3


def test_damage_costs_what_it_hits(tmp_path: Path) -> None:
    whole = jax_fakes.text()
    broken = whole.replace(b'"dur":800.0', b'"dur":8 00.0', 1)
    trace = loaded(tmp_path, broken)
    assert len(trace) == len(loaded(tmp_path, whole)) - 1
    assert trace.lost == ("1 event could not be read.",)
    half = loaded(tmp_path, whole[: len(whole) // 2])
    assert 0 < len(half) < len(trace)


@pytest.mark.parametrize("events", [[], [{}], [jax_fakes.label("process_name", 1, "/device:GPU:0")]])
def test_nothing_in_it_is_said(tmp_path: Path, events: list[Any]) -> None:
    with pytest.raises(BadInput, match="empty trace of JAX's"):
        loaded(tmp_path, {**jax_fakes.trace(), "traceEvents": events})


def test_numbers_may_be_words(tmp_path: Path) -> None:
    found = json.loads(jax_fakes.text().replace(b'"correlation_id":"', b'"correlation_id":"x'))
    trace = loaded(tmp_path, found)
    assert trace.on_gpu, "an id that is none costs the link, not the kernel"


def test_a_cpus_ops_are_its_work_and_belong_to_the_call_that_started_them(tmp_path: Path) -> None:
    """XLA runs them on threads of its own, after the step's range has ended; a loop holds its body's over again."""
    events: list[Any] = [jax_fakes.label("process_name", 701, "/host:CPU")]
    for number in range(3):
        at, op = 1000.0 + 100 * number, {"hlo_module": "jit_f", "run_id": str(7 - number)}
        events += [
            jax_fakes.span("train", 701, 1, at, 50.0, step_num=str(number)),
            jax_fakes.span("CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice", 701, 1, at + 5, 4.0),
            jax_fakes.span("while.1", 701, 2, 2000.0 + 1000 * number, 900.0, hlo_op="while.1", **op),
            jax_fakes.span("dot.3", 701, 2, 2010.0 + 1000 * number, 800.0, hlo_op="dot.3", **op),
        ]
    found = loaded(tmp_path, {"metadata": {"highres-ticks": True}, "traceEvents": [*events, {}]})
    kernels = found.of_kind(Kind.KERNEL)
    assert [found.name_of(row) for row in kernels.tolist()] == ["dot.3"] * 3
    assert found.correlation[found.of_kind(Kind.RUNTIME)].tolist() == found.correlation[kernels].tolist() == [1, 2, 3]
    explained = explain([found])
    assert (explained.device, explained.kind, explained.verdict) == ("the CPU, by XLA", "cpu", "device-idle")
    assert explained.step_s == pytest.approx(2.8e-3 / 3, rel=0.01) and "torch" not in explained.findings[0].fix
