"""What one trial on a CPU does not show: other modes, sizes, devices, scales, and what is changed behind a forward."""

from __future__ import annotations

import array
import collections
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from sublight.fix.patch.model import patch
from sublight.fix.patch.trials import count

WIDTH = 16
HERE = globals()
STATE = {"on": False}


class Norm(nn.Module):
    eps = 1e-6

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), held

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x)


def _root_plus(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.held) * self.weight  # type: ignore[no-any-return]


class Flag:
    def __bool__(self) -> bool:
        return STATE["on"]


class Items:
    def __getitem__(self, name: str) -> float:
        return 1.0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = [0]


def _counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.held[0] += 1
    return self.normed(x)  # type: ignore[no-any-return]


def _slotted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.held.calls[0] += 1
    return self.normed(x)  # type: ignore[no-any-return]


def _deep(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.held["a"]["b"]["c"]["d"][0] += 1
    return self.normed(x)  # type: ignore[no-any-return]


def _queued(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.held += [1]
    return self.normed(x)  # type: ignore[no-any-return]


def _in_evaluation(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.normed(x) * (1.0 if self.training or not torch.is_grad_enabled() else 0.5)  # type: ignore[no-any-return]


def _detached_in_evaluation(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale * self.weight  # type: ignore[no-any-return]


def _elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.float16):
        return self.normed(x)  # type: ignore[no-any-return]


def _seeding(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return self.normed(x)  # type: ignore[no-any-return]


def _writing(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.weight.add_(1e-30)
    return self.normed(x)  # type: ignore[no-any-return]


def _flagged(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.normed(x) * (2 if self.held else 1)  # type: ignore[no-any-return]


def _entering(self: Any, x: torch.Tensor) -> torch.Tensor:
    with self.held:
        return self.normed(x)  # type: ignore[no-any-return]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x if x.size(0) > 64 else x * 1


class Entered:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...


FORWARDS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], Any]]] = {
    **{f"{eps} outside of the root": (_root_plus, lambda eps=eps: eps) for eps in (1e-12, 1e-15)},
    "evaluation with gradients": (_in_evaluation, lambda: None),
    "detached in evaluation": (_detached_in_evaluation, lambda: None),
    "length times a number": (lambda self, x: self.normed(x) * max(1.0, 0.001 * x.shape[0]), lambda: None),
    "root of a length": (lambda self, x: self.normed(x) * max(1.0, x.shape[-2] ** 0.5 / 64), lambda: None),
    "len": (lambda self, x: self.normed(x) * (0.5 if len(x) > 64 else 1.0), lambda: None),
    "a range": (lambda self, x: self.normed(x) * (0.5 if len(range(x.shape[-2])) > 5000 else 1.0), lambda: None),
    "is_cpu": (lambda self, x: self.normed(x) * (1 if x.is_cpu else 2), lambda: None),
    "type": (lambda self, x: self.normed(x) * (2 if x.type().startswith("torch.cuda") else 1), lambda: None),
    "text": (lambda self, x: self.normed(x) * (2 if "cuda" in repr(x) else 1), lambda: None),
    "is_shared": (lambda self, x: self.normed(x) * (2 if x.is_shared() else 1), lambda: None),
    "cpu": (lambda self, x: self.normed(x).cpu(), lambda: None),
    "to": (lambda self, x: self.normed(x).to("cpu"), lambda: None),
    "autocast of another device": (_elsewhere, lambda: None),
    "seed": (_seeding, lambda: None),
    "writes to its weight": (_writing, lambda: None),
    "array": (_counting, lambda: array.array("l", [0])),
    "bytes": (_counting, lambda: bytearray(1)),
    "queue": (_queued, collections.deque),
    "slots": (_slotted, Slotted),
    "deep": (_deep, lambda: {"a": {"b": {"c": {"d": [0]}}}}),
    "truth": (_flagged, Flag),
    "items": (lambda self, x: self.normed(x) * self.held["scale"], Items),
    "view of a dictionary": (
        lambda self, x: self.normed(x) * self.held["scale"],
        lambda: types.MappingProxyType({"scale": 1.0}),
    ),
    "a dictionary's method": (lambda self, x: self.normed(x) * self.held("scale", 1.0), lambda: {}.get),
    "context": (_entering, Entered),
    "TorchScript": (lambda self, x: self.normed(scripted(x)), lambda: None),
    "function's attribute": (lambda self, x: self.normed(x) * helper.eps, lambda: None),
}


def helper(x: torch.Tensor) -> torch.Tensor:
    return x


helper.eps = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_norm_that_may_do_otherwise_is_left(name: str) -> None:
    forward, held = FORWARDS[name]
    module: Any = type("OddNorm", (Norm,), {"forward": forward})(held())
    (row,) = patch(nn.Sequential(module)).rows
    assert not row.is_swapped, row


def test_a_trial_leaves_what_lies_deep_in_the_module() -> None:
    for forward, held in (FORWARDS["slots"], FORWARDS["deep"]):
        module: Any = type("OddNorm", (Norm,), {"forward": forward})(held())
        patch(nn.Sequential(module))
    assert module.held == {"a": {"b": {"c": {"d": [0]}}}}
    looped: Any = Norm([])
    looped.held.append(looped.held)
    assert patch(nn.Sequential(looped)).swapped == 1


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_a_data_type_is_proven_in_every_mode(dtype: Any) -> None:
    class HalfNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.normed(x) * (0.5 if not self.training and x.dtype == self.held else 1.0)

    module = HalfNorm(dtype)
    patch(nn.Sequential(module))
    x = torch.randn(3, WIDTH).to(dtype)
    assert count(module) == 1
    with torch.no_grad():
        assert torch.equal(module.to(dtype).eval()(x), HalfNorm.forward(module, x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.register_buffer("seen", None)
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(self.act(self.gate(x)) * up)  # type: ignore[no-any-return]


class Seeing(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return super().forward(x)


act = F.silu


class GlobalGated(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class PropertyNorm(Norm):
    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * self.gain


def test_what_a_buffer_is_given_counts() -> None:
    (row,) = patch(nn.Sequential(Seeing())).rows
    assert not row.is_swapped and "changes what the module holds" in row.reason


def test_projections_are_called_in_their_order() -> None:
    module, calls = Gated(), []
    assert patch(module).swapped == 1
    for name in ("gate", "up", "down"):
        module.get_submodule(name).register_forward_pre_hook(lambda *given, name=name: calls.append(name))
    module(torch.randn(2, WIDTH))
    assert calls == ["up", "gate", "down"]


def rows() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def _by_three(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    return x * 3


def _of_functional(name: str) -> Callable[[Any, Any], None]:
    return lambda module, to: to.setattr(F, name, _by_three)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None]]] = {
    "partial": (Gated, lambda m, to: setattr(m, "act", functools.partial(F.gelu, approximate="none"))),
    "partial's argument": (Gated, lambda m, to: m.act.keywords.update(approximate="none")),
    "global of PyTorch's": (GlobalGated, lambda m, to: to.setitem(HERE, "act", F.gelu)),
    "property": (PropertyNorm, lambda m, to: to.setattr(PropertyNorm, "gain", property(lambda self: 2.0))),
    "F.gelu": (nn.GELU, _of_functional("gelu")),
    "F.softmax": (lambda: nn.Softmax(-1), _of_functional("softmax")),
    "F.layer_norm": (lambda: nn.LayerNorm(WIDTH), _of_functional("layer_norm")),
    "F.linear": (lambda: nn.Linear(WIDTH, 7), _of_functional("linear")),
}


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has changed since sublight.patch")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_behind_a_module_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = CHANGES[name]
    module = make()
    assert patch(module).swapped == 1
    before = module(rows())
    change(module, monkeypatch)
    after = module(rows())
    assert torch.equal(after, type(module).forward(module, rows()))
    assert after.shape != before.shape or not torch.equal(after, before)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Eager(Layer):
    """What its norm gets is written to before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return torch.relu_(x) * self.norm(x)  # type: ignore[no-any-return]


class Reloaded(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return self.norm(x)  # type: ignore[no-any-return]


def test_a_call_before_the_norm_comes_before_it() -> None:
    module, x = Eager(), rows()
    patch(module)
    with torch.no_grad():
        torch.testing.assert_close(module(x), Eager.forward(module, x))


@pytest.mark.usefixtures("quiet")
def test_a_rebuilt_forward_whose_code_is_replaced() -> None:
    module = Reloaded()
    assert patch(module).swapped == 2
    Reloaded.forward.__code__ = (lambda self, x: x * 3).__code__
    assert torch.equal(module(rows()), rows() * 3)


@pytest.mark.usefixtures("quiet")
def test_who_replaces_the_call_of_all_modules_hears_each(monkeypatch: pytest.MonkeyPatch) -> None:
    module, heard, own = Layer(), [], nn.Module.__call__
    patch(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        heard.append(type(self).__name__)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    module(rows())
    assert heard == ["Layer", "Linear", "RMSNorm"]


class Doubling(torch.overrides.TorchFunctionMode):
    __module__ = "theirs"

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") == "layer_norm" else result


def test_a_mode_hears_the_functions_that_a_module_calls() -> None:
    module = nn.LayerNorm(WIDTH)
    patch(module)
    with Doubling():
        ours = module(rows())
    torch.testing.assert_close(ours, 2 * module(rows()))


class Casting(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids.long(), self.weight)


class Padded(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight, 3)


class Frozen(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            return F.embedding(ids, self.weight)


def test_embeddings_of_their_own() -> None:
    module = Casting(9, 4)
    assert patch(module).swapped == 1
    ids = torch.tensor([1.0, 2.0])
    assert torch.equal(module(ids), Casting.forward(module, ids))
    for kind in (Padded, Frozen):
        (row,) = patch(nn.Sequential(kind(9, 4))).rows
        assert not row.is_swapped


@pytest.mark.parametrize("batch_first", (True, False))
def test_attention_lies_in_memory_as_pytorchs(batch_first: bool) -> None:
    module = nn.MultiheadAttention(32, 2, batch_first=batch_first)
    x = torch.randn(3, 5, 32)
    plain, _ = module(x, x, x, need_weights=False)
    assert patch(module).swapped == 1
    ours, _ = module(x, x, x, need_weights=False)
    assert ours.is_contiguous() >= plain.is_contiguous()
    torch.testing.assert_close(ours, plain)
