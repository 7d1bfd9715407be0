"""One row inside of a CUDA graph goes another way through the model: the same logits, and who takes which block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.engines.generate import weights
from sublight.engines.generate.config import Config
from sublight.engines.generate.llama import Cache, Llama
from sublight.fix.quantize import linear, row
from sublight.ops.matmul import low_bit_matmul
from sublight.ops.matmul.row_linear import reference

CONFIG = Config(
    layers=2, dim=128, inner=256, heads=4, kv_heads=2, head_dim=32, vocab=50, longest=32, eps=1e-5, theta=1e4,
    qkv_bias=True,
)  # fmt: skip


def logits(model: Llama, *, in_graph: bool) -> Any:
    """Of a third token behind two."""
    cache = Cache(CONFIG, 2, 16, model.weights.tokens)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    for at in range(3):
        place = torch.tensor([at])
        length = torch.tensor([at + 1], dtype=torch.int32)
        found = model.decode(torch.tensor([7 + at]), place, 16 + place, table, length, cache, in_graph=in_graph)
    return found


@pytest.mark.parametrize("how", ["", "w4a16", "w4a16+head"])
def test_one_row_in_a_graph_gives_the_same(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = weights.random(CONFIG, dtype=torch.float32, device="cpu", how=how)
    monkeypatch.setattr(linear, "low_bit_matmul", low_bit_matmul.reference)  # interpreted, it would take minutes
    model = Llama(CONFIG, made, mode="eager")
    plain = logits(model, in_graph=True)
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["gated"])
        return reference(*args, **options)

    model.layers = replace(model.layers, row_linear=counted)
    monkeypatch.setattr(row, "why_no_stream", lambda *args, **options: "")
    assert torch.equal(logits(model, in_graph=False), plain) and not calls, "only inside of graphs"
    assert torch.equal(logits(model, in_graph=True), plain), "the same sums in the same order"
    assert calls == ([False, False, True, False] * CONFIG.layers + [False] * ("head" in how)) * 3


def test_launches_begin_early_inside_of_graphs_alone() -> None:
    model = Llama(CONFIG, weights.random(CONFIG, dtype=torch.float32, device="cpu"), mode="eager")
    plain, theirs, seen = logits(model, in_graph=True), model.layers, []

    def watched(name: str) -> Any:
        def call(*args: Any, dependent: bool = False, **options: Any) -> Any:
            seen.append((name, dependent))
            return getattr(theirs, name)(*args, **options)

        return call

    names = ("rope_kv_write", "paged_attention")
    model.layers = replace(theirs, **{name: watched(name) for name in names}, has_early=True)
    for in_graph in (True, False):
        seen.clear()
        assert torch.equal(logits(model, in_graph=in_graph), plain)
        assert seen == [(name, in_graph) for name in names] * CONFIG.layers * 3


def test_a_block_that_does_not_stream_goes_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = weights.random(CONFIG, dtype=torch.float32, device="cpu", how="w4a16")
    model = Llama(CONFIG, made, mode="eager")
    model.layers = replace(model.layers, row_linear=lambda *args, **options: pytest.fail("streamed"))
    down = made.blocks[1].down
    monkeypatch.setattr(row, "why_no_stream", lambda x, weight, *rest, **o: "odd" * (weight is down.packed))
    block = made.blocks[1]
    assert model._one_row_by(made.tokens[:1], block, in_graph=True) is None
    assert model._one_row_by(made.tokens[:1], made.blocks[0], in_graph=True)
    assert model._one_row_by(made.tokens[:1], made.blocks[0], in_graph=False) is None
