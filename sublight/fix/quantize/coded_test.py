"""Layers of 8-bit codes: the product of what the codes stand for, gradients, moves, files, what is left and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import sublight
from sublight.errors import BadInput
from sublight.fix.quantize import coded
from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.model import quantize
from sublight.ops.quantize.quantize import quantize_fp8, quantize_int8

KINDS = ("int8", "fp8")


def made(kind: Any, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48).to(dtype)
    return layer, CodedLinear.of(layer.weight, layer.bias, kind), torch.randn(3, 7, 64).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_what_the_codes_stand_for(kind: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further from float64 than twice PyTorch's product of the same numbers in fp32 and rounded once; the way
    without 8-bit products gives the same."""
    layer, new, x = made(kind, dtype)
    codes, scales = (quantize_int8 if kind == "int8" else quantize_fp8)(x.flatten(0, 1))
    rounded = (codes.double() * scales.double().view(-1, 1)).view(x.shape)
    truth = F.linear(rounded, new.codes.double() * new.scales.double()[:, None], layer.bias.double())
    yardstick = (F.linear(rounded.float(), new.weight).to(dtype) + layer.bias).double() - truth
    for reason in ("", "as if there were none"):
        monkeypatch.setattr(coded, "why_whole", lambda *_, reason=reason: reason)
        off = new(x).double() - truth
        assert off.abs().max() <= 2 * yardstick.abs().max() and off.norm() <= 2 * yardstick.norm(), reason
    assert (truth - F.linear(x, layer.weight, layer.bias)).norm() / truth.norm() < (0.02 if kind == "int8" else 0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_as_if_nothing_was_rounded(kind: Any) -> None:
    _, new, x = made(kind)
    x.requires_grad_()
    (found,) = torch.autograd.grad(new(x).square().sum(), x)
    (expected,) = torch.autograd.grad(F.linear(x, new.weight, new.bias).square().sum(), x)
    assert (found - expected).norm() / expected.norm() < 0.06
    assert new.bias.requires_grad and not new.codes.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_codes_survive_a_change_of_data_type(kind: Any) -> None:
    _, new, x = made(kind)
    codes, scales = new.codes.clone(), new.scales.clone()
    new.bfloat16()
    assert new.codes.dtype == codes.dtype and torch.equal(new.scales, scales) and new.scales.dtype == torch.float32
    assert torch.equal(new.codes.float(), codes.float())
    assert new(x.bfloat16()).dtype == torch.bfloat16
    assert new(x[:, :0].bfloat16()).shape == (3, 0, 48)


@pytest.mark.parametrize(("how", "kind"), [("w8a8", "int8"), ("fp8", "fp8")])
def test_a_model_there_and_back_and_a_file(how: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    x = torch.randn(5, 64)
    before = model(x)
    done = quantize(model, how, verify=x)
    by_name = {name: row for row in done.rows for name in row.names}
    assert by_name["0"].is_changed and "no " + kind + " product of ours" in by_name["0"].reason
    assert "multiples of 16" in by_name["2"].reason and done.change.startswith("outputs change by")
    assert by_name["0"].after_bytes < by_name["0"].before_bytes / 3
    pytest.importorskip("safetensors")
    sublight.save_quantized(model, tmp_path / "coded.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    assert sublight.load_quantized(other, tmp_path / "coded.safetensors") == 1
    assert torch.equal(other(x), model(x))
    assert sublight.unpatch(model) == 1 and torch.equal(model(x), before)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_a_gpu_multiplies_the_same(kind: Any, rows: int) -> None:
    _, new, _ = made(kind, torch.bfloat16)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    on_cpu = new(x).float()
    new.cuda()
    assert (new(x.cuda()).float().cpu() - on_cpu).norm() / on_cpu.norm() < 0.01


@pytest.mark.parametrize("kind", ("int8", "fp8"))
def test_a_layer_is_traced_without_gradients(kind: Any) -> None:
    model = torch.nn.Sequential(CodedLinear.of(torch.randn(32, 64), None, kind))
    x = torch.randn(16, 64)
    with torch.no_grad():
        traced = torch.jit.trace(model, (x,), check_trace=False)
    assert torch.equal(traced(2 * x), model(2 * x))
    with pytest.raises(BadInput, match=r"trace it under torch.no_grad\(\)"):
        torch.jit.trace(model, (x.requires_grad_(),), check_trace=False)
