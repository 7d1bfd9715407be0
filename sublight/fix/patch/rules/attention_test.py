"""MultiheadAttention swapped: the same results and gradients, PyTorch's own forward for what ours does not take."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.attention import fused_mha
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules.attention import ATTENTION


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def swapped(module: nn.Module) -> nn.Module:
    found = ATTENTION.find(module, module)
    assert isinstance(found, Swap)
    other = copy.deepcopy(module)
    other.forward = found.forward.__get__(other)
    return other


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": False, "attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
        {"need_weights": False, "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    ],
    ids=["plain", "weights", "causal", "padding"],
)
def test_results_and_gradients_are_the_modules_own(options: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 2, batch_first=batch_first)
    other = swapped(module)
    x = torch.randn(2, 5, 32) if batch_first else torch.randn(5, 2, 32)
    for call in (module, other):
        call(x, x, x, **options)[0].square().sum().backward()
    expected, found = (call(x, x, x, **options) for call in (module, other))
    torch.testing.assert_close(found, expected)
    for one, theirs in zip(other.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, theirs.grad)


def test_ours_runs_where_it_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(fused_mha, "attention", lambda q, k, v, **how: calls.append(how) or q)
    module = swapped(nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)).eval()
    x = torch.randn(2, 5, 32)
    module(x, x, x, need_weights=False)
    assert len(calls) == 1 and calls[0]["dropout"] == 0.0
    module(x, x, x)  # asks for weights
    module.train()(x, x, x, need_weights=False)  # drops some: its own draws
    module.eval().out_proj.register_forward_hook(lambda *args: None)
    module(x, x, x, need_weights=False)  # which PyTorch's forward would not call
    assert len(calls) == 1


def test_what_the_plan_is_asked_has_attentions_sizes() -> None:
    module = nn.MultiheadAttention(32, 2, kdim=8, vdim=8, batch_first=False)
    found = ATTENTION.find(module, module)
    assert isinstance(found, Swap)
    q, k, v = found.arguments(module, torch.zeros(5, 3, 32), torch.zeros(7, 3, 8), value=torch.zeros(7, 3, 8))
    assert [tuple(x.shape) for x in (q, k, v)] == [(3, 2, 5, 16), (3, 2, 7, 16), (3, 2, 7, 16)]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Own(32, 2), "a forward of its own"),
        (nn.MultiheadAttention(32, 2, add_bias_kv=True), "keys that are added"),
        (nn.MultiheadAttention(32, 2, add_zero_attn=True), "keys that are added"),
    ],
)
def test_others_are_left_with_a_reason(module: nn.Module, words: str) -> None:
    found = ATTENTION.find(module, module)
    assert isinstance(found, Left) and words in found.reason


def test_other_modules_are_none_of_its_business() -> None:
    assert ATTENTION.find(nn.Linear(2, 2), nn.Linear(2, 2)) is None
