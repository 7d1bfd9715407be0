"""Norms are known by what they do: the affine ones, Gemma's, strangers with names of their own; lookalikes are not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import norm

WIDTH = 24


class Stranger(nn.Module):
    """RMSNorm with other names; `eps` hidden where no attribute tells it."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shift = shift

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = hidden.float() if hidden.dtype.itemsize == 2 else hidden
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 3e-6)
        result = (self.gamma + self.shift) * normal.to(hidden.dtype)
        return result if gate is None else result * gate


class Swapped(nn.LayerNorm):
    """A subclass whose forward is its own: LayerNorm of the rows turned round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(-1))


class Fp32Out(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
        return nn.functional.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.bias.to(wide))


class NoisyNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Conditional(nn.LayerNorm):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.LayerNorm(WIDTH), norm.Norm(kind="LayerNorm", weight="weight", bias="bias", eps=1e-5)),
        (lambda: nn.LayerNorm(WIDTH, eps=1e-12), norm.Norm(kind="LayerNorm", weight="weight", bias="bias", eps=1e-12)),
        (lambda: nn.LayerNorm(WIDTH, bias=False), norm.Norm(kind="LayerNorm", weight="weight", eps=1e-5)),
        (lambda: nn.RMSNorm(WIDTH), norm.Norm(kind="RMSNorm", weight="weight", eps=None)),
        (lambda: nn.RMSNorm(WIDTH, eps=0.125), norm.Norm(kind="RMSNorm", weight="weight", eps=0.125)),
        (Stranger, norm.Norm(kind="RMSNorm", weight="gamma", eps=3e-6)),
        (lambda: Stranger(1.0), norm.Norm(kind="RMSNorm with 1 + weight", weight="gamma", eps=3e-6)),
    ],
)
def test_which_norm_it_is(make: Callable[[], Any], expected: norm.Norm) -> None:
    found = norm.known(make())
    assert isinstance(found, norm.Norm) and found.dtypes >= {torch.float32, torch.bfloat16, torch.float16}
    assert dataclasses.replace(found, dtypes=frozenset()) == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.LayerNorm((2, WIDTH)), "several dimensions"),
        (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "without a weight"),
        (lambda: nn.RMSNorm(WIDTH, elementwise_affine=False), "without a weight"),
        (lambda: Swapped(WIDTH), "neither"),
        (lambda: Fp32Out(WIDTH).bfloat16(), "another data type"),
        (lambda: NoisyNorm(WIDTH), "in training"),
        (lambda: Conditional(WIDTH), "one tensor"),
        (lambda: Stranger(1.0).bfloat16(), "in float32"),
    ],
)
def test_what_is_left(make: Callable[[], Any], reason: str) -> None:
    result = norm.known(make())
    assert isinstance(result, Left) and reason in result.reason


@pytest.mark.parametrize(
    "module",
    [nn.GroupNorm(1, WIDTH), nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True), nn.Linear(3, 3), nn.PReLU(WIDTH),
     nn.Identity(), nn.Dropout(), nn.GELU(), nn.Embedding(3, 3), nn.Sequential(nn.LayerNorm(WIDTH))],
    ids=str,
)  # fmt: skip
def test_others_are_no_norms(module: Any) -> None:
    assert norm.known(module) is None


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_values_gradients_and_other_calls(shift: float) -> None:
    model = nn.Sequential(Stranger(shift), nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH))
    other = copy.deepcopy(model)
    assert patch(model, rules=(norm.NORM,)).swapped == 3
    for shape in ((5, WIDTH), (2, 3, 4, WIDTH)):
        x = torch.randn(shape)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(ours).square().sum().backward()
        other(theirs).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    gate = torch.rand(WIDTH)
    torch.testing.assert_close(model[0](x, gate), other[0](x, gate))
    torch.testing.assert_close(model[0](hidden=x), other[0](hidden=x))
    assert model[0](x.bfloat16()).dtype == other[0](x.bfloat16()).dtype  # a float32 weight: its own promotion
    assert unpatch(model) == 3


def test_one_plus_a_weight_of_16_bits_is_its_own_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched in float32 and cast since."""
    calls: list[Any] = []
    monkeypatch.setattr(norm, "rms_norm", lambda x, *rest: calls.append(x) or x)
    model, x = Stranger(1.0), torch.randn(2, WIDTH)
    patch(model, rules=(norm.NORM,))
    model(x)
    assert len(calls) == 1
    model.bfloat16()(x.bfloat16())
    assert len(calls) == 1


def test_autocast_leaves_float32_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(norm, "layer_norm", lambda x, *rest: calls.append(x) or x)
    model = nn.LayerNorm(WIDTH)
    patch(model, rules=(norm.NORM,))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, WIDTH))
        assert len(calls) == 1
        model.bfloat16()(torch.randn(2, WIDTH, dtype=torch.bfloat16))
    assert len(calls) == 1


def test_it_is_traced_whole() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH))
    x = torch.randn(3, WIDTH)
    expected = model(x)
    patch(model, rules=(norm.NORM,))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


def test_a_module_on_no_device_is_known() -> None:
    assert isinstance(norm.find(nn.LayerNorm(WIDTH, device="meta"), nn.Module()), Swap)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(256), lambda: nn.LayerNorm(256, bias=False),
                                  lambda: nn.RMSNorm(256), lambda: nn.RMSNorm(256, eps=1e-5)])  # fmt: skip
def test_on_the_gpu(make: Callable[[], Any], dtype: str) -> None:
    model = make().to("cuda", getattr(torch, dtype))
    x = torch.randn(33, 7, 256, device="cuda", dtype=getattr(torch, dtype))
    expected = copy.deepcopy(model).double()(x.double())
    theirs = model(x)
    found = patch(model, x, rules=(norm.NORM,))
    assert found.swapped == 1, found
    error = (model(x).double() - expected).abs().max()
    assert error <= 2 * (theirs.double() - expected).abs().max()
