"""A kernel with NVIDIA's assembly compiles for AMD without it; what cannot run there is said. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import gpus
from sublight.backend import device
from sublight.xray.amd import LOCAL_BYTES, MOST_THREADS, PLANS, AmdCompiled

ROOT = Path(__file__).parents[2]


def test_kernels_compile_for_amd() -> None:
    """bias_gelu holds three pieces of PTX on NVIDIA's GPUs; `make check-compile-amd` compiles all ops."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "sublight.xray.amd", "gfx950", "bias_gelu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any("_bias_gelu_kernel" in line and "gfx950" in line for line in lines)
    done_count, _, all_of_them, *_ = lines[-1].split()
    assert done_count == all_of_them and int(done_count) > 3


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({}, ""),
        ({"error": "_k does not compile"}, "_k does not compile"),
        ({"local_bytes": LOCAL_BYTES["gfx942"]}, ""),
        ({"local_bytes": LOCAL_BYTES["gfx942"] + 1}, "65537 bytes of local memory, a compute unit has 65536"),
        ({"threads": 2 * MOST_THREADS}, "2048 threads a program, a work group has 1024"),
    ],
)
def test_what_could_not_run_is_a_problem(found: dict[str, object], problem: str) -> None:
    assert AmdCompiled(kernel="_k", gfx="gfx942", **found).problem == problem  # type: ignore[arg-type]


def test_local_memory_is_the_tables() -> None:
    for gfx, key in (("gfx942", "mi300x"), ("gfx950", "mi355x")):
        gpu = gpus.find(key)
        assert (gpu.gfx, gpu.shared_bytes_per_sm, gpu.sms) == (gfx, LOCAL_BYTES[gfx], PLANS[gfx].multiprocessors)


def test_on_rocm_a_plan_is_made_for_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls gfx942 capability 9.4: read as NVIDIA's, it would get Hopper's kernels."""
    mi300x = SimpleNamespace(major=9, minor=4, multi_processor_count=304, shared_memory_per_block=65536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: mi300x)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    facts = device._facts.__wrapped__(0)
    assert (facts.capability, facts.multiprocessors, facts.shared_bytes, facts.backend) == (80, 304, 65536, "hip")


def test_on_rocm_no_kernel_of_ours_is_chosen_and_no_ptx_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x = SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda"), dtype=torch.float32)
    assert device.why_not_here(x) == ""  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "no kernel of ours has run on an AMD GPU" in device.why_not_here(x)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not device.takes_ptx()
    monkeypatch.setattr(torch.version, "hip", None)
    assert device.takes_ptx()


def test_an_op_that_is_not_there_is_no_success() -> None:
    command = [sys.executable, "-m", "sublight.xray.amd", "sofmax"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert ran.returncode == 2 and "unknown op 'sofmax': use softmax" in ran.stderr
