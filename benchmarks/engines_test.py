"""The script for the GPU: its table says what rows say, and a part that breaks costs its own rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

KERNELS = [{"kernel": "gemm", "count": 32.0, "us": 750.0}]
SCRIPT = Path(__file__).with_name("engines.py")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return importlib.import_module("benchmarks.engines")


def test_the_table_compares_within_a_part_and_batch(module: ModuleType) -> None:
    plain = {"part": "decode", "fraction": 0.5, "memory_bytes": 2e9}
    rows = [
        {**plain, "mode": "compile", "batch": 1, "tokens_per_s": 100.0},
        {**plain, "mode": "compile", "batch": 64, "tokens_per_s": 1000.0},
        {**plain, "mode": "graphs", "batch": 64, "tokens_per_s": 2500.0, "step_s": 1e-3, "kernels": KERNELS},
        {"part": "decode", "mode": "int4", "error": "not done within 22 s"},
    ]
    lines = module.table(rows).splitlines()
    assert [line.split()[4] for line in lines[1:4]] == ["1.00", "1.00", "2.50"]
    assert "not done within 22 s" in lines[4]
    assert "graphs, batch 64: 1000 µs a step, 750 of them in kernels" in lines and lines[-1].endswith("32 x  gemm")


def test_each_part_is_bounded(module: ModuleType) -> None:
    assert all(sum(modes.values()) <= 320 for modes in module.LIMIT_S.values())


def test_a_part_that_breaks_says_why(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = module.run_part("decode", "launches", ["--device", "nowhere"])
    assert len(rows) == 1 and "invalid choice" in rows[0]["error"]
    monkeypatch.setitem(module.LIMIT_S["decode"], "launches", 0.01)
    assert module.run_part("decode", "launches", ["--tiny", "--device", "cpu"])[0]["error"] == "not done within 0 s"


@pytest.mark.usefixtures("one_thread")
def test_a_tiny_run_gives_figures(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step: the rest is time."""
    pytest.importorskip("torch")
    monkeypatch.setattr(module, "MEASURED_S", 0.0)
    monkeypatch.setattr(module, "WARMUP", 1)
    texts = list(module.decode("graphs", "cpu", module.TINY))
    assert [each["batch"] for each in texts] == [1, 3] and all(each["tokens_per_s"] > 0 for each in texts)


@pytest.mark.parametrize("batch", (1, 3))
def test_the_loop_that_is_compiled_is_the_same_model(batch: int) -> None:
    """Not compiled here: its tokens follow from all that it wrote to its cache, and are the engine's."""
    torch = pytest.importorskip("torch")
    from sublight.engines.generate import weights
    from sublight.engines.generate.config import Config
    from sublight.engines.generate.llama import Cache, Llama

    config = Config(
        layers=2, dim=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=50, longest=32, eps=1e-5, theta=1e4
    )
    made = weights.random(config, dtype=torch.float64, device="cpu")
    compiled_loop = importlib.import_module("benchmarks.compiled_loop")
    loop = compiled_loop.Loop(config, made, batch, 10, "cpu", lambda function: function)
    model, cache = Llama(config, made, mode="eager"), Cache(config, batch * 2, 16, made.tokens)
    cache.k.view_as(loop.k).copy_(loop.k)
    cache.v.view_as(loop.v).copy_(loop.v)
    table = torch.arange(batch * 2, dtype=torch.int32).view(batch, 2)
    ids, positions = loop.ids.clone(), loop.positions.clone()
    for _ in range(4):
        loop.step()
        slots = torch.arange(batch) * 32 + positions
        ids = model.decode(ids, positions, slots, table, (positions + 1).int(), cache).argmax(-1)
        positions = positions + 1
        assert torch.equal(ids, loop.ids) and torch.equal(positions, loop.positions)
