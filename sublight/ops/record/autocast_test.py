"""Under autocast a result has one data type, whoever computes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import sublight
from sublight.op import Plan
from sublight.ops.record.autocast import as_ours, under_autocast
from sublight.ops.record.call import run_of


def test_pytorchs_ops_leave_tensors_as_they_are(device: str) -> None:
    """By a product, which autocast changes on a CPU, too."""
    x = torch.randn(4, 4, device=device)
    run = run_of(SimpleNamespace(reference=torch.matmul), Plan(provider="torch", reason="small"), [x, x])
    with torch.autocast(device, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert run(x, x).dtype == torch.float32
        y = x.bfloat16()
        assert as_ours(torch.matmul, [x, y])(x, y).dtype == torch.bfloat16  # unlike ones it makes alike
    assert as_ours(torch.matmul, []) is torch.matmul


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_an_ops_result_does_not_depend_on_autocast(kind: torch.dtype, device: str) -> None:
    hidden, weight = torch.randn(6, 16, device=device, dtype=kind), torch.randn(9, 16, device=device, dtype=kind)
    target = torch.arange(6, device=device)
    plain = sublight.linear_cross_entropy(hidden, weight, target)
    compiled = torch.compile(sublight.linear_cross_entropy, backend="eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(sublight.linear_cross_entropy(hidden, weight, target), plain)
        for large in (1, 600):  # small ones are PyTorch's on a GPU, larger ones ours
            x = torch.randn(large, 512, device=device, dtype=kind)
            assert {sublight.softmax(x).dtype, sublight.cumsum(x).dtype} == {kind}
        assert compiled(hidden, weight, target).dtype == plain.dtype


def test_products_take_autocasts_data_type(device: str) -> None:
    a, b, bias = (torch.randn(shape, device=device) for shape in ((4, 8), (8, 8), (8,)))
    double = a.double()
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(sublight.matmul(a, b.T, bias), torch.nn.functional.linear(a, b, bias))
        assert sublight.einsum("ij,jk->ik", a, b).dtype == torch.bfloat16
        kinds = [None if x is None else x.dtype for x in under_autocast(a, None, double)]
    assert kinds == [torch.bfloat16, None, torch.float64]
    assert under_autocast(a, None) == (a, None)
