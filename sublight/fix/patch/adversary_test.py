"""Modules that are almost what our ops compute: each must be left alone, with the missing proof named."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from sublight.fix.patch.model import patch
from sublight.fix.patch.record import Rule
from sublight.fix.patch.rules.activation import ACTIVATION
from sublight.fix.patch.rules.embedding import EMBEDDING
from sublight.fix.patch.rules.loss import LOSS
from sublight.fix.patch.rules.mlp import MLP
from sublight.fix.patch.rules.norm import NORM
from sublight.fix.patch.rules.softmax import SOFTMAX

WIDTH, HIDDEN = 16, 24


class Norm(nn.Module):
    """RMSNorm by hand, with something changed below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale(x) * self.weight


class DetachedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale(x).detach() * self.weight


class SilentlyDetachedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.scale(x)
        return x * scale * self.weight


class DataNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale(x.data) * self.weight


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.0000001


class OwnBackwardNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnBackward.apply(super().forward(x))


class ClampedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-1e6, 1e6)


class ClampedInHalfNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.clamp(-6e4, 6e4) if x.dtype == torch.float16 else y


class EpsByDtypeNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = 1e-3 if x.dtype == torch.bfloat16 else self.eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight


class LengthNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.shape[-2] < 100_000 else y * 0.5


class SizeNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.numel() < 10**9 else x


class BranchNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.abs().max() > 1e7 else y


class ListNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if max(x.flatten().tolist()) > 1e7 else y


class GpuNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.is_cuda else y


class DeviceNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.device.type == "cuda" else y


class WhereNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.where(x.abs() > 1e8, torch.zeros_like(y), y)


class HookedGradientNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e9, 1e9))
        return y


class CountingNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls > 100 else 1)


class InPlaceNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.scale(x)) * self.weight


class InferenceNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if torch.is_grad_enabled() else y.round(decimals=2)


class LooseNorm(Norm):
    """By a factor that somebody may set later."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class AbsoluteNorm(Norm):
    """As RMSNorm where eps counts; elsewhere the mean is of absolute values."""

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / (x.abs().mean(-1, keepdim=True) + self.eps)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.act = nn.Linear(HIDDEN, WIDTH), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.product(self.gate(x), self.up(x)))  # type: ignore[no-any-return]

    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.act(gate) * up  # type: ignore[no-any-return]


class ClampedGate(Gated):
    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.act(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)  # type: ignore[no-any-return]


class MinimumGate(Gated):
    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.act(torch.minimum(gate, gate.new_tensor(1e8))) * up  # type: ignore[no-any-return]


class DetachedUp(Gated):
    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.act(gate) * up.detach()  # type: ignore[no-any-return]


class TwiceGate(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) + 0 * self.gate(x).sum()  # type: ignore[no-any-return]


class NanGate(Gated):
    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(self.act(gate) * up)


class MaskedGate(Gated):
    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        h = self.act(gate) * up
        return h.masked_fill(h.isinf(), 0.0)  # type: ignore[no-any-return]


class ThroughGelu(nn.Module):
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Straight.apply(x)


class ThroughByDetach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (F.gelu(x) - x).detach()


class CappedGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x).clamp(max=1e5)


class HalfGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh" if x.dtype == torch.float16 else "none")


class NanSoftmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1).nan_to_num()


class CappedSoftmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.clamp(-1e6, 1e6), -1)


class FlooredSoftmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) + 1e-12


class ModuloEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids % self.num_embeddings)


class ClampedEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.clamp(0, self.num_embeddings - 1))


class ScaledGradientEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = super().forward(ids)
        return 0.1 * y + (0.9 * y).detach()


class HookedEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = super().forward(ids)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.1)
        return y


class MaskedEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (ids >= 0)[..., None]


class OwnLoss(nn.CrossEntropyLoss):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(logits, labels)


NORMS = (
    DetachedNorm, SilentlyDetachedNorm, DataNorm, OwnBackwardNorm, ClampedNorm, ClampedInHalfNorm, LengthNorm, SizeNorm,
    BranchNorm, ListNorm, GpuNorm, DeviceNorm, WhereNorm, HookedGradientNorm, CountingNorm, InPlaceNorm, InferenceNorm,
    AbsoluteNorm, LooseNorm,
)  # fmt: skip
GATES = (ClampedGate, MinimumGate, DetachedUp, TwiceGate, NanGate, MaskedGate)
TABLES = (ModuloEmbedding, ClampedEmbedding, ScaledGradientEmbedding, HookedEmbedding, MaskedEmbedding)
CASES: tuple[tuple[Any, Rule], ...] = (
    *((kind, NORM) for kind in NORMS),
    *((kind, MLP) for kind in GATES),
    *((kind, ACTIVATION) for kind in (ThroughGelu, ThroughByDetach, CappedGelu, HalfGelu)),
    *((kind, SOFTMAX) for kind in (NanSoftmax, CappedSoftmax, FlooredSoftmax)),
    *((lambda kind=kind: kind(9, 4), EMBEDDING) for kind in TABLES),
    (OwnLoss, LOSS),
    (lambda: nn.CrossEntropyLoss(weight=torch.ones(5)), LOSS),
)


@pytest.mark.parametrize(("make", "rule"), CASES, ids=lambda each: getattr(each, "__name__", getattr(each, "name", "")))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_is_only_almost_an_op_is_left(make: Any, rule: Rule, dtype: Any) -> None:
    module = make().to(dtype)
    report = patch(module, rules=(rule,))
    assert report.swapped == 0, report.rows


@pytest.mark.parametrize("kind", (Norm, Gated))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_is_one_is_swapped(kind: Any, dtype: Any) -> None:
    """Without what was changed above: else nothing is shown."""
    assert patch(kind().to(dtype), rules=(NORM, MLP)).swapped == 1


@pytest.mark.parametrize(
    ("kind", "proof"),
    [
        (DetachedNorm, "structure not proven: its forward detaches"),
        (ClampedNorm, "structure not proven: its forward calls clamp"),
        (OwnBackwardNorm, "not tried: its forward has a backward pass of its own (OwnBackward)"),
        (LengthNorm, "structure not proven: its forward compares sizes"),
        (BranchNorm, "structure not proven: its forward"),
        (SilentlyDetachedNorm, "values not proven: the gradient of its input"),
        (AbsoluteNorm, "values not proven"),
        (CountingNorm, "structure not proven: its forward changes what the module holds"),
    ],
)
def test_the_table_names_the_missing_proof(kind: Any, proof: str) -> None:
    (row,) = patch(kind(), rules=(NORM,)).rows
    assert row.reason.startswith(proof)


def test_eps_of_one_data_type_is_left_in_that_one_alone() -> None:
    assert not patch(EpsByDtypeNorm().bfloat16(), rules=(NORM,)).swapped
    module, plain = EpsByDtypeNorm(), EpsByDtypeNorm()
    assert patch(module, rules=(NORM,)).swapped == 1
    x = torch.full((2, WIDTH), 1e-3)
    torch.testing.assert_close(module(x), plain(x))
    module, plain = module.bfloat16(), plain.bfloat16()
    assert torch.equal(module(x.bfloat16()), plain(x.bfloat16()))


class Holding(Norm):
    """It holds things that a trial must not touch."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing, self.seen = thing, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape)
        return super().forward(x)


class Uncopyable:
    def __init__(self) -> None:
        self.calls = 0

    def __copy__(self) -> Any:
        raise TypeError("there is one of me")


def test_a_trial_touches_nothing_of_the_modules() -> None:
    heard: list[Any] = []
    model = nn.Sequential(Holding({"n": [1]}), Norm())
    model[1].register_forward_hook(lambda *arguments: heard.append(arguments))
    model[1].register_forward_pre_hook(lambda *arguments: heard.append(arguments))
    state = torch.get_rng_state()
    patch(model)
    assert model[0].seen == [] and model[0].thing == {"n": [1]} and not heard
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_copied_is_not_tried() -> None:
    module = Holding(Uncopyable())
    (row,) = patch(module, rules=(NORM,)).rows
    assert row.reason == "not tried: it holds a Uncopyable, which cannot be copied" and module.seen == []


def test_meta_tensors_are_patched_as_others() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Norm(), Gated(), nn.LayerNorm(WIDTH), nn.Embedding(9, 4))
    assert patch(model).swapped == 4
    assert all(parameter.is_meta for parameter in model.parameters())
