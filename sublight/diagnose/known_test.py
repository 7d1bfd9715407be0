"""Whose limits a trace is judged by, and that the answer says so."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from sublight import gpus, nvml
from sublight.diagnose import fakes, known
from sublight.diagnose.replay_test import products, steps
from sublight.errors import BadInput
from sublight.limits import run
from sublight.predict import known_limits
from sublight.results import write_json
from sublight.trace.record import Device, Trace

ON_GPU = steps(lambda m: products(m, 1, 50.0), 1)
ON_CPU = steps(lambda m: m.work("aten::relu", (64, 64), us=50.0), 1)


def named(name: str, **more: Any) -> Trace:
    return dataclasses.replace(ON_GPU, devices=(Device(index=0, name=name, **more),))


@pytest.fixture(autouse=True)
def _another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a GPU, never measured."""
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvml, "health", lambda: None)


def test_what_is_known_of_the_gpu_that_the_trace_names() -> None:
    limits, said = known.limits_for(named("NVIDIA H200"))
    gpu = gpus.find("h200")
    assert "NVIDIA H200" in limits.device and said.startswith("known of the H200") and "reached rates" in said
    assert limits.value("matmul_bf16") == gpu.reached["matmul_bf16"] < gpu.peak_flops["bf16"]
    assert limits.value("hbm_copy") == gpu.reached["hbm_copy"]
    assert limits.link_rate() == gpu.nvlink_bytes_per_s, "collectives have a floor"


def test_vendor_figures_where_nobody_reached_any() -> None:
    gpu = next(gpu for gpu in gpus.all_gpus() if not gpu.reached and gpu.peak_flops.get("fp16"))
    limits, said = known_limits.of_gpu(gpu)
    assert said.endswith("vendor figures") and "reached" not in said
    assert limits.value("matmul_fp16") == gpu.peak_flops["fp16"]
    assert limits.value("hbm_copy") == gpu.memory_bytes_per_s
    assert limits.value("launch_graph_node") == known_limits.NODE_S
    assert all(limit.value for limit in limits.limits), "what is not known is left out"


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("NVIDIA H200", None, "h200"),
        ("NVIDIA A100-SXM4-80GB", 80 << 30, "a100"),
        ("NVIDIA A100-SXM4-40GB", 40 << 30, "a10040"),
        ("GRID A100-40C", 40 << 30, "a10040"),  # of the table's boards of this model, the nearest
        ("GRID A100-80C", 80 << 30, "a100"),
        ("Tesla V100-SXM2-16GB", 16 << 30, "v100"),
        ("NVIDIA GeForce RTX 4090", None, "rtx4090"),
    ],
)
def test_boards_are_found_by_model_and_memory(name: str, memory: int | None, key: str) -> None:
    found = known.find(name, named(name, memory_bytes=memory))
    assert found is not None and found.key == key
    assert memory is None or abs((found.memory_bytes or 0) - memory) < 0.1 * memory


@pytest.mark.parametrize("name", ["", "NVIDIA Z9000", "accelerator"])
def test_an_unknown_gpu_has_no_floors_and_a_way_out(name: str) -> None:
    limits, said = known.limits_for(named(name))
    assert limits.limits == () and limits.kind == "cuda"
    assert said.startswith("none: ") and "--gpu NAME" in said and (not name or name in said)


def test_a_named_gpu_or_a_file_comes_first(tmp_path: Path) -> None:
    limits, _ = known.limits_for(named("NVIDIA H200"), gpu="a100")
    assert "A100" in limits.device
    write_json(fakes.limits().to_json(), tmp_path / "limits.json")
    limits, said = known.limits_for(named("NVIDIA H200"), gpu="a100", file=str(tmp_path / "limits.json"))
    assert limits == fakes.limits()
    assert "limits.json" in said and "made up" in said and "2026-11-15" in said


@pytest.mark.parametrize("text", ["{}", "no json", '{"device": 3}', None])
def test_what_is_no_file_of_limits(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "limits.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match="not a file of limits" if text is not None else "cannot read .*No such file"):
        known.limits_for(ON_GPU, file=str(path))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(gpus.UnknownGpu, match="h2000"):
        known.limits_for(ON_GPU, gpu="h2000")


def of_cpu(**meta: object) -> Trace:
    return dataclasses.replace(ON_CPU, meta=meta)


def here() -> Trace:
    """A trace of this machine, as our capture marks it."""
    return of_cpu(cpu=run.this_machine("cpu").device.rpartition(" (")[0], cores=os.cpu_count())


def test_a_cpu_that_was_never_measured_has_no_floors() -> None:
    limits, said = known.limits_for(here())
    assert (limits.kind, limits.limits) == ("cpu", ())
    assert said.startswith("none: ") and "sublight limits" in said


def test_a_cpu_that_was_measured() -> None:
    machine = run.this_machine("cpu")
    write_json(dataclasses.replace(fakes.limits("cpu"), date="2026-11-15T02:00:00").to_json(), machine.cache_path)
    limits, said = known.limits_for(here())
    assert limits.value("host_copy") == fakes.RATES["host_copy"]
    assert said == "measured on this machine, 2026-11-15"


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "does not say which CPU"),
        ({"cpu": 7}, "does not say which CPU"),
        ({"cpu": "VAX 11/780"}, "of another CPU, VAX 11/780"),
        ({"cpu": "", "cores": 3}, "does not say which CPU"),
        ({**here().meta, "cores": 10**6}, "of another CPU"),
    ],
)
def test_a_foreign_cpu_is_not_judged_by_this_machine(meta: dict[str, object], words: str) -> None:
    machine = run.this_machine("cpu")
    write_json(fakes.limits("cpu").to_json(), machine.cache_path)
    limits, said = known.limits_for(of_cpu(**meta))
    assert limits.limits == () and words in said and "--limits FILE" in said
    assert known.device_of(of_cpu(**meta), limits) != machine.device


@pytest.mark.parametrize(("name", "own"), [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_this_machines_measurement_counts_for_its_own_kind(
    name: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = run.Machine(kind="cuda", device="NVIDIA H200", uuid="GPU-1", driver="570", gpu=gpus.find("h200"))
    monkeypatch.setattr(nvml, "health", lambda: "there is a GPU")
    monkeypatch.setattr(run, "machine_by_driver", lambda: machine)
    write_json(fakes.limits().to_json(), machine.cache_path)
    limits, said = known.limits_for(named(name))
    assert said.startswith("measured on this machine") == own
    assert (limits.value("hbm_copy") == fakes.RATES["hbm_copy"]) == own


def test_the_device_that_was_used_gives_the_name() -> None:
    devices = (Device(index=1, name="NVIDIA A100"), Device(index=0, name="NVIDIA H200"))
    assert known.device_name(dataclasses.replace(ON_GPU, devices=devices)) == "NVIDIA H200"
    assert known.device_name(dataclasses.replace(ON_GPU, devices=devices[:1])) == "NVIDIA A100"
    assert known.device_name(dataclasses.replace(ON_GPU, devices=())) == ""
