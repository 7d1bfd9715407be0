"""Masked rows (of log_softmax too), and gradients through one output alone."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.ops.softmax import log_softmax, online_softmax


@pytest.mark.parametrize("cols", [100, 3000, 40_000])
def test_masked_rows(cols: int, device: str) -> None:
    x = torch.randn(4, cols, device=device)
    x[0, : cols // 2] = -math.inf
    x[1, 1:] = -math.inf
    x[2] = -math.inf
    for rows in (x, x[2:3]):  # several rows, and one that is shared out
        y, lse = online_softmax.launch(rows)
        wanted = online_softmax.reference(rows)
        torch.testing.assert_close(y, wanted[0], equal_nan=True, rtol=1e-5, atol=1e-7)  # digits: see ops_test
        torch.testing.assert_close(lse, wanted[1], rtol=1e-5, atol=1e-6)
    logs = log_softmax.launch(x)
    torch.testing.assert_close(logs, torch.log_softmax(x, -1), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_an_infinite_row_has_an_infinite_log(device: str) -> None:
    x = torch.randn(2, 300, device=device)
    x[0, 7] = math.inf
    assert online_softmax.launch(x)[1][0] == math.inf


@pytest.mark.parametrize("used", [0, 1])
def test_a_gradient_through_one_output(used: int, device: str) -> None:
    x = torch.randn(3, 200, device=device, dtype=torch.float32, requires_grad=True)
    call = torch.ops.sublight.online_softmax
    grads = [torch.autograd.grad(f(x)[used].square().sum(), x)[0] for f in (call, online_softmax.reference)]
    torch.testing.assert_close(*grads)
