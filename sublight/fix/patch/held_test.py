"""Forwards whose result depends on more than a trial shows: left alone, or compared at each call."""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sublight.fix.patch.conftest import error_of_all
from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.trials import count

WIDTH = 16
X = torch.linspace(-2, 2, 4 * WIDTH).view(1, 4, WIDTH)
FLAGS = [1.0]


class Norm(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.held = held

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class Schedule:
    def __init__(self) -> None:
        self.now = 1.0

    def value(self) -> float:
        return self.now

    @property
    def computed(self) -> float:
        return self.now


class Computing:
    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return FLAGS[0]


class CallableForward:
    factor = 1.0

    def __get__(self, module: Any, kind: Any) -> Any:
        return self if module is None else functools.partial(self, module)

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.scaled(x) * self.factor  # type: ignore[no-any-return]


class Counting(Norm):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.scaled(x)


class Named(Norm):
    def __getattr__(self, name: str) -> Any:
        return FLAGS[0] if name == "bonus" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.bonus  # type: ignore[no-any-return]


def _around() -> type:
    factor = 1.0

    class AroundNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x) * factor

        def change(self) -> None:
            nonlocal factor
            factor = 2.0

    return AroundNorm


def _of(forward: Any, held: Callable[[], Any] = lambda: None) -> Callable[[], nn.Module]:
    """A norm with this forward, which holds this."""
    kind: Any = type("OddNorm", (Norm,), {"forward": forward})
    return lambda: kind(held())


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "method": (
        _of(lambda self, x: self.scaled(x) * self.held.value(), Schedule),
        "calls held.value",
    ),
    "property": (_of(lambda self, x: self.scaled(x) * self.held.computed, Schedule), "reads held.computed"),
    "computed": (_of(lambda self, x: self.scaled(x) * self.held.any_name, Computing), "reads held, which computes"),
    "list": (_of(lambda self, x: self.scaled(x) * self.held[0].now, lambda: [Schedule()]), "reads held, which holds"),
    "parent": (_of(lambda self, x: self.scaled(x) * self.held[0].p, lambda: [nn.Dropout()]), "reads held, which holds"),
    "bound method": (
        _of(lambda self, x: self.scaled(x) * self.held(), lambda: Schedule().value),
        "calls a method of an",
    ),
    "partial": (
        _of(lambda self, x: self.held(self.scaled(x)), lambda: functools.partial(lambda by, x: x * by[0], [1.0])),
        "reads a variable from outside (held)",
    ),
    "iterator": (_of(lambda self, x: self.scaled(x) * next(self.held), lambda: itertools.repeat(1.0)), "calls next"),
    "default": (_of(lambda self, x, by=[1.0]: self.scaled(x) * by[0]), "reads a variable from outside (the default"),
    "closure": (lambda: _around()(), "reads a variable of a function around it (factor)"),
    "class attribute": (Counting, "sets an attribute (calls)"),
    "__getattr__": (Named, "reads a variable from outside (FLAGS)"),
    "callable": (_of(CallableForward()), "reads a variable from outside (forward)"),
    "tensor's attribute": (_of(lambda self, x: self.scaled(x) * x.factor), "reads factor, which is neither"),
    "asked of a tensor": (
        _of(lambda self, x: self.scaled(x) * getattr(x, "factor", 1.0)),
        "reads factor, which is neith",
    ),
    "a setting": (
        _of(lambda self, x: self.scaled(x) * (1 + torch.is_anomaly_enabled())),
        "asks for a setting of PyTorch",
    ),
    "a fixed place": (_of(lambda self, x: self.scaled(x[:, :3000])), "cuts at a fixed place"),
    "pieces of a fixed length": (_of(lambda self, x: self.scaled(x.split(2000, 1)[0])), "cuts at a fixed place"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_compared_is_left(name: str) -> None:
    make, why = LEFT[name]
    (row,) = patch(nn.Sequential(make())).rows
    assert not row.is_swapped and f"its forward {why}" in row.reason and not Counting.calls


class Doubled(nn.Parameter):
    """As quantized weights are: what a product sees is not what lies there."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            seen = [2 * x.data if isinstance(x, Doubled) and func is not torch.Tensor.detach else x for x in args]
            return func(*seen, **(kwargs or {}))


MODULES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "norm": (Norm, X),
    "embedding": (lambda: nn.Embedding(8, WIDTH), torch.tensor([1, 2])),
    "linear": (lambda: nn.Linear(7, 33), torch.ones(3, 7)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_weight_with_ops_of_its_own_goes_to_the_modules_forward(name: str, when: str) -> None:
    make, x = MODULES[name]
    module: Any = make()

    def quantize() -> None:
        module._parameters["weight"] = Doubled(module.weight.data)

    if when == "before":
        quantize()
    found = patch(nn.Sequential(module))
    if when == "before":
        assert not found.swapped and found.rows[0].reason == "its weight is a Doubled, whose ops may be its own"
        return
    quantize()
    with pytest.warns(UserWarning, match="has changed since sublight.patch \\(weight\\)"):
        assert torch.equal(module(x), type(module).forward(module, x))


class Tagged(torch.Tensor):
    """A subclass with no ops of its own; its results are of its class."""


@pytest.mark.parametrize("make", [Norm, nn.GELU, lambda: nn.Softmax(-1), lambda: nn.RMSNorm(WIDTH)])
def test_a_tensor_of_a_users_class_comes_back_as_one(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make())
    patch(model)
    assert count(model) == 1 and type(model(X.as_subclass(Tagged))) is Tagged


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_a_dimension_by_its_place_is_the_last_one_of_some_inputs_only(rank: int) -> None:
    module = _of(lambda self, x: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6) * self.weight)()
    patch(nn.Sequential(module))
    assert count(module) == 1
    x = torch.randn([3] * (rank - 1) + [WIDTH], generator=torch.Generator().manual_seed(rank))
    if rank < 3:
        with pytest.raises(IndexError):
            module(x)
    else:
        forward, exact = type(module).forward, copy.deepcopy(module).double()
        assert (error := error_of_all([module(x)], [forward(module, x)], [forward(exact, x.double())])).ok, error


def test_code_that_is_loaded_again_counts() -> None:
    """As an editor's reload does it: the function stays, its code is another."""

    class ReloadedNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x)

    model = nn.Sequential(ReloadedNorm())
    patch(model)
    ReloadedNorm.forward.__code__ = (lambda self, x: 3 * self.scaled(x)).__code__
    with pytest.warns(UserWarning, match="the code of forward"):
        assert torch.equal(model(X), 3 * model[0].scaled(X))


def test_a_replica_has_its_own_weights() -> None:
    """As torch.nn.DataParallel makes them: the module's attributes, other tensors."""
    module = Norm()
    patch(nn.Sequential(module))
    replica = module._replicate_for_data_parallel()
    replica.weight = module.weight.detach() * 3
    assert torch.allclose(replica(X), 3 * Norm.forward(module, X)) and count(module) == 1
    unpatch(module)
    assert not {"forward", "_replicate_for_data_parallel"} & set(vars(module))


class Switched(Norm):
    modes: tuple[bool, ...] = ()

    def train(self, mode: bool = True) -> Any:
        Switched.modes += (mode,)
        return super().train(mode)


def test_a_trial_does_not_call_train() -> None:
    assert patch(nn.Sequential(Switched())).swapped == 1 and not Switched.modes


def _compiled() -> Iterator[tuple[nn.Module, bool]]:
    yield torch.jit.script(nn.GELU()), False
    yield torch.fx.symbolic_trace(nn.Sequential(nn.GELU())), True


@pytest.mark.parametrize("at", [0, 1])
def test_modules_that_torchscript_or_fx_made(at: int) -> None:
    module, is_swapped = list(_compiled())[at]
    model = nn.Sequential(module)
    assert bool(patch(model).swapped) == is_swapped
    assert (error := error_of_all([model(X)], [F.gelu(X)], [F.gelu(X.double())])).ok, error


class Called(Norm):
    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = Called(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.line(x)
        return self.norm(x)  # type: ignore[no-any-return]


def test_a_norm_that_is_called_in_its_own_way_is_called() -> None:
    model = Block()
    expected, truth = model(X), copy.deepcopy(model).double()(X.double())
    assert "residual_norm" not in {row.rule for row in patch(model).rows if row.is_swapped}
    assert (error := error_of_all([model(X)], [expected], [truth])).ok, error


def _plus(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.embedding(x, self.weight)
    return y if self.padding_idx is None else y * (x != self.padding_idx)[..., None]


def test_an_embedding_that_blanks_its_padding_is_no_lookup() -> None:
    kind: Any = type("Blanking", (nn.Embedding,), {"forward": _plus})
    (row,) = patch(nn.Sequential(kind(8, WIDTH, padding_idx=1))).rows
    assert not row.is_swapped and "no plain lookup" in row.reason


def test_pytorchs_forward_that_somebody_replaced_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * theirs(self, x))
    (row,) = patch(nn.Sequential(nn.Linear(7, 33))).rows
    assert not row.is_swapped and row.reason == "somebody has changed PyTorch's linear layers"


def test_one_weight_for_all_columns() -> None:
    class OneNorm(Norm):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    (row,) = patch(nn.Sequential(OneNorm())).rows
    assert not row.is_swapped and row.reason == "one weight for all columns"


def test_meta_tensors_go_through_a_patched_model() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.GELU()).to("meta")
    patch(model)
    assert model(torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 33)


def test_a_class_that_is_changed_to_a_partial() -> None:
    """A forward with arguments given beforehand: the arguments are read as well."""
    kind: Any = type("PartNorm", (Norm,), {"forward": functools.partialmethod(lambda self, x, by: x, by=[1.0])})
    assert not patch(nn.Sequential(kind())).swapped
    assert isinstance(kind.forward, types.FunctionType)
