"""The fp8 layer: no further from the exact one than PyTorch's ops with such codes, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.matmul.fp8_linear import fp8_linear
from sublight.ops.quantize.codes import quantize

F = torch.nn.functional


def rounded(x: Any) -> Any:
    """As fp8 codes have it, by PyTorch's ops."""
    codes, scales = quantize(x, "fp8")
    return codes.float() * scales.float()


def test_values_and_gradients_are_as_far_off_as_pytorchs_with_such_codes(device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        x, weight = torch.randn(2, 9, 48, device=device), torch.randn(40, 48, device=device)
        bias, dy = torch.randn(40, device=device), torch.randn(2, 9, 40, device=device)
        given = [each.requires_grad_() for each in (x, weight, bias)]
        y = fp8_linear(*given)
        ours = (y.detach(), *torch.autograd.grad(y, given, dy))
        with torch.no_grad():
            flat, dflat = x.reshape(-1, 48), dy.reshape(-1, 40)
            theirs = (
                (rounded(flat) @ rounded(weight).T + bias).view(y.shape),
                (rounded(dflat) @ rounded(weight.T.contiguous()).T).view(x.shape),
                dflat.T @ flat,
                dflat.sum(0),
            )
        exact = [each.detach().double().requires_grad_() for each in given]
        truth_y = F.linear(*exact)
        truth = (truth_y.detach(), *torch.autograd.grad(truth_y, exact, dy.double()))
        return [correct.error(f"{i}", *triple) for i, triple in enumerate(zip(ours, theirs, truth, strict=True))]

    error = correct.settled(draw)
    assert error.ok, error


def test_only_what_is_wanted_and_no_tokens(device: str) -> None:
    x, weight = torch.randn(4, 32, device=device, requires_grad=True), torch.randn(16, 32, device=device)
    fp8_linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None
    assert fp8_linear(x[:0], weight).shape == (0, 16)


def test_bad_input_is_refused_in_one_line(device: str) -> None:
    x, weight = torch.randn(4, 32, device=device), torch.randn(16, 31, device=device)
    with pytest.raises(BadInput, match=r"x \(…, k\) and weight \(n, k\) of one data type"):
        fp8_linear(x, weight)
    with pytest.raises(BadInput, match="float64"):
        fp8_linear(x.double(), x.double())
