"""Attention modules that a careless swap would get wrong: each gives what it gave before, or raises what it raised."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers.integrations import sdpa_attention as library
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.rules import sdpa
from sublight.ops.attention.attention import reference

TOKENS, WINDOW, WIDTH, HEADS = 6, 3, 64, 2
OWN_TABLE = AttentionInterface()


def eager(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **more: Any) -> Any:
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def doubled(*args: Any, **named: Any) -> Any:
    out, weights = sdpa_attention_forward(*args, **named)
    return out * 2, weights


class Plain(torch.nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.qkv = torch.nn.Linear(16, 3 * HEADS * WIDTH)
        self.scaling, self.is_causal = WIDTH**-0.5, True
        self.drop = 0.0

    def heads(self, x: Any) -> Any:
        return self.qkv(x).float().view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)

    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attention_interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager
        )
        return attention_interface(
            self, q, k, v, attention_mask, dropout=self.drop, scaling=self.scaling, **kwargs
        )  # fmt: skip


class ComparesIt(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        scale = 1.0 if attend is sdpa_attention_forward else 0.1
        return attend(self, q, k, v, attention_mask, scaling=scale)


class HandsItOn(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return named_like(attend, self, q, k, v, attention_mask)


def named_like(attend: Any, *args: Any) -> Any:
    return attend(*args, scaling=2.0 if attend.__name__ == "sdpa_attention_forward" and not attend.__closure__ else 0.1)


class WrapsIt(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = functools.partial(ALL_ATTENTION_FUNCTIONS["sdpa"], scaling=0.9)
        return attend(self, q, k, v, attention_mask)


class Aliases(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        table = ALL_ATTENTION_FUNCTIONS
        attend = doubled if table["sdpa"] is sdpa_attention_forward else table["sdpa"]
        return attend(self, q, k, v, attention_mask, scaling=0.2)


class OwnTable(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = OWN_TABLE.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, scaling=0.2)


class Biased(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, scaling=0.2, position_bias=q @ k.mT)


class Unnamed(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, 0.0, 0.3)


class Learned(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v, attention_mask, scaling=float(x.abs().mean()), is_causal=x.shape[0] > 1)


class FewerKeys(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k[:, :, 1:], v[:, :, 1:], None, scaling=0.2)


class NarrowValues(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k, v[..., :5], None, scaling=0.2)


class OneHead(Plain):
    """Keys of one head for all, which PyTorch broadcasts, and no word of it."""

    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q, k[:, :1], v[:, :1], None, scaling=0.2)


class Marked(torch.Tensor):
    pass


class Subclassed(Plain):
    def forward(self, x: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(x)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(self, q.as_subclass(Marked), k, v, None, scaling=0.2)


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Any:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def registered(value: Any) -> Any:
    AttentionInterface.register("sdpa", value)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def window(batch: int = 2, heads: int = 1, width: int = WINDOW) -> torch.Tensor:
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - width)
    return seen.expand(batch, heads, TOKENS, TOKENS).clone()


def with_hole(*at: int, heads: int = 1) -> torch.Tensor:
    mask = window(heads=heads)
    mask[at] = ~mask[at]
    return mask


def half_sdpa(*args: Any, **named: Any) -> Any:
    return torch._C._nn.scaled_dot_product_attention(*args, **named) / 2


SLIDING = {"sliding_window": WINDOW}
MODULES = (
    *(ComparesIt, HandsItOn, WrapsIt, Aliases, OwnTable, Biased, Unnamed, FewerKeys, NarrowValues, OneHead, Subclassed),
)
CALLS: dict[str, dict[str, Any]] = {  # of Plain, as its own forward takes them
    "a bit of the window is another": {"attention_mask": with_hole(0, 0, 4, 3), **SLIDING},
    "in one batch entry": {"attention_mask": with_hole(1, 0, 5, 0), **SLIDING},
    "of one head": {"attention_mask": with_hole(0, 1, 2, 2, heads=HEADS), **SLIDING},
    "the window is another than the module says": {"attention_mask": window(width=2), **SLIDING},
    "a window that nobody names": {"attention_mask": window()},
    "a mask of numbers that are added": {"attention_mask": torch.where(window(), 0.0, -9.0), **SLIDING},
    "a causal mask as a tensor": {"attention_mask": window(width=TOKENS), "sliding_window": TOKENS},
    "a mask of rows": {"attention_mask": window()[:, :, :1], **SLIDING},
    "a mask of two dimensions": {"attention_mask": window()[0, 0], **SLIDING},
    "a bias by the way": {"position_bias": torch.randn(2, HEADS, TOKENS, TOKENS)},
    "weights are asked for": {"output_attentions": True},
    "a soft cap": {"softcap": 5.0},
    "a cache in pages": {"cache": object()},
    "is_causal as a word": {"is_causal": ""},
    "a scale twice": {"scaling": 0.5},
}
STATES: dict[str, Callable[[Any], Any]] = {  # after the patch
    "eager since": lambda module: replaced(module.config, "_attn_implementation", "eager"),
    "another sdpa in the table": lambda module: registered(doubled),
    "another code in sdpa": lambda module: replaced(sdpa_attention_forward, "__code__", _ones.__code__),
    "other defaults": lambda module: replaced(
        sdpa_attention_forward, "__defaults__", (0.0, 0.01, False, None, None)
    ),
    "another PyTorch": lambda module: replaced(torch.nn.functional, "scaled_dot_product_attention", half_sdpa),
    "another repeat_kv": lambda module: replaced(library, "repeat_kv", lambda x, n: x * 0),
    "dropout": lambda module: replaced(module, "drop", 0.5),
    "a scale that is a tensor": lambda module: replaced(module, "scaling", torch.tensor(0.2)),
    "PyTorch's math alone": lambda module: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
    "autocast": lambda module: torch.autocast("cpu", torch.bfloat16),
    "is_causal is a number": lambda module: replaced(module, "is_causal", 0),
}  # fmt: skip


def _ones(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: Any = None,
    is_causal: Any = None, position_bias: Any = None, cache: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    return query.transpose(1, 2) * 0 + 1, None


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As on a GPU where ours wins at every size; a result of ours is far from right, so that none passes for theirs."""
    calls: list[Any] = []

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append(options)
        return reference(q, k, v, **options) + 7

    monkeypatch.setattr(sdpa, "attention", wrong)
    monkeypatch.setattr(sdpa, "SHORTEST", 2)
    monkeypatch.setattr(sdpa, "is_won", lambda *args: True)
    return calls


def result_of(module: Any, x: Any, **call: Any) -> Any:
    torch.manual_seed(3)
    try:
        return [y if isinstance(y, torch.Tensor) else None for y in module(x, **call)]
    except Exception as error:
        return type(error)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, type) or isinstance(other, type):
        return one is other
    return all(type(a) is type(b) and (a is None or torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def text() -> Any:
    return torch.randn(2, TOKENS, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_of_another_kind_stays_as_it_was(kind: Any, ours: list[Any]) -> None:
    OWN_TABLE["sdpa"] = doubled
    module, x = kind(), text()
    before = result_of(module, x)
    found = patch(module, rules=(sdpa.HF_SDPA,))
    assert same(result_of(module, x), before) and not ours, found.rows


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_kind_is_theirs(name: str, ours: list[Any]) -> None:
    module, x = Plain(), text()
    before = result_of(module, x, **CALLS[name])
    assert patch(module, rules=(sdpa.HF_SDPA,)).swapped == 1
    assert same(result_of(module, x, **CALLS[name]), before) and not ours


@pytest.mark.parametrize("name", STATES)
def test_what_has_changed_since_is_theirs(name: str, ours: list[Any]) -> None:
    module, x = Plain(), text()
    assert patch(module, rules=(sdpa.HF_SDPA,)).swapped == 1
    with STATES[name](module):
        after = result_of(module, x)
        assert not ours
        unpatch(module)
        assert same(after, result_of(module, x))


def test_what_is_understood_is_ours(ours: list[Any]) -> None:
    module, x = Plain(), text()
    patch(module, rules=(sdpa.HF_SDPA,))
    calls: list[dict[str, Any]] = [{}, {"is_causal": False}, {"attention_mask": window(), **SLIDING}]
    for call in (
        *calls,
        {"attention_mask": window(batch=1), **SLIDING},
        {"attention_mask": window(heads=HEADS), **SLIDING},
    ):
        module(x, **call)
    assert [(each["causal"], each["window"]) for each in ours] == [(True, None), (False, None), *[(True, WINDOW)] * 3]
    learned = Learned()
    patch(learned, rules=(sdpa.HF_SDPA,))
    learned(x)
    assert ours[-1]["scale"] == pytest.approx(float(x.abs().mean())) and ours[-1]["causal"]
