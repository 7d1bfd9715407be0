"""The script for a GPU: a tiny run names every op of the step, and a kernel goes to the innermost name."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("utilisation.py")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return importlib.import_module("benchmarks.utilisation")


def test_a_kernel_goes_to_the_innermost_name(module: ModuleType) -> None:
    def name(what: str, begin: int, length: int) -> dict[str, object]:
        return {"cat": "user_annotation", "name": f"op: {what}", "ts": begin, "dur": length, "tid": 1}

    def launch(number: int, at: int, thread: int = 1) -> list[dict[str, object]]:
        call = {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": at, "tid": thread}
        kernel = {"cat": "kernel", "name": "k", "ts": 999, "dur": number}
        return [each | {"args": {"correlation": number}} for each in (call, kernel)]

    events = [name("outer", 0, 100), name("inner", 10, 20), *launch(1, 15), *launch(2, 50), *launch(4, 15, thread=2)]
    assert module.by_name(events, "cuda") == {
        "inner": (1, pytest.approx(1e-6)),
        "outer": (1, pytest.approx(2e-6)),
        "no op of the model": (1, pytest.approx(4e-6)),
    }


@pytest.mark.usefixtures("one_thread")
def test_a_tiny_step_has_every_op(module: ModuleType) -> None:
    pytest.importorskip("torch")
    rows = module.measure(module.TINY, "cpu", batches=(3,), context=18, chunk=17)
    assert {row["step"] for row in rows} == {"prefill of 17 tokens", "decode, batch 3, 18 tokens each"}
    calls = {row["op"]: row["launches"] for row in rows if row["step"].startswith("decode")}
    layers = module.TINY["layers"]
    assert calls == {
        **dict.fromkeys(("qkv", "out", "gate and up", "down", "attention", "rope and cache", "SwiGLU"), layers),
        **{"norm": 2 * layers + 1, "embedding": 1, "head": 1, "largest logit": 1},
    }
    assert all(row["s"] > 0 for row in rows) and "| qkv |" in module.table(rows)
