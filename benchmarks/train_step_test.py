"""The script for the GPU: its table says what its rows say, a part that breaks costs its own rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("train_step.py")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return importlib.import_module("benchmarks.train_step")


def test_the_table_compares_with_compile_at_the_same_batch(module: ModuleType) -> None:
    plain = {"memory_bytes": 2e9, "used_bytes": None, "step_ms": 50.0, "ready_s": 1.0}
    rows = [
        {"part": "graph", "batch": 32, "tokens_per_s": 600.0, "why_no_graph": "it waits", **plain},
        {"part": "compile", "batch": 32, "tokens_per_s": 500.0, **plain},
        {"part": "compile", "batch": 64, "tokens_per_s": 10.0, **plain},
        {"part": "eager", "error": "not done within 22 s"},
        {"part": "graph", "table": [{"op": "products", "launches": 3, "ms": 40.0, "floor_ms": 30.0, "kernels": {}}]},
        {"part": "loss", "name": "ours", "losses": [2.0], "last": 2.02},
        {"part": "loss", "name": "fp32", "losses": [2.0], "last": 2.0},
    ]
    text = module.table(rows)
    first, second = text.splitlines()[1:3]
    assert "1.200" in first and "no graph: it waits" in first and "1.000" in second
    assert "not done within 22 s" in text and "75 %" in text and "+1.00 % of fp32's" in text


def test_a_part_that_takes_too_long_says_so(module: ModuleType) -> None:
    rows = module.run_part("eager", ["--tiny", "--device", "cpu"], 0.01)
    assert rows == [{"part": "eager", "error": "not done within 0 s"}]


def test_kernels_are_known_by_their_names(module: ModuleType) -> None:
    import re

    def kind(name: str) -> str:
        return next((kind for kind, pattern in module.KERNELS if re.search(pattern, name)), "other")

    assert kind("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN") == "products"
    assert kind("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3") == "attention"
    assert kind("void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<cutlass::bfloat16_t>>") == "attention"
    assert kind("_bias_gelu_backward_kernel") == "gelu" and kind("_ring_backward_kernel") == "norms"
    assert kind("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>") == (
        "biases' gradients"
    )


@pytest.mark.usefixtures("one_thread")
def test_a_tiny_run_gives_figures(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step: the rest is time."""
    pytest.importorskip("torch")
    monkeypatch.setattr(module, "MEASURED_S", 0.0)
    monkeypatch.setattr(module, "WARMUP", 1)
    rows = list(module.speed("eager", "cpu", module.TINY))
    assert [row["batch"] for row in rows] == [2, 3] and all(row["tokens_per_s"] > 0 for row in rows)
