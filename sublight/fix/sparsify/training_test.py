"""Training with two of four: the zeros are the same both ways, the dense weight learns, and all can be undone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import sublight
from sublight import correct
from sublight.fix.sparsify import training
from sublight.fix.sparsify.model import sparsify
from sublight.fix.sparsify.training import SparseTrainingLinear, both_ways
from sublight.ops.sparse.sparsify_24 import reference


@pytest.fixture(autouse=True)
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op has tests of its own, and the interpreter takes seconds a step."""
    monkeypatch.setattr(training, "sparsify_24", reference)


def test_a_product_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.nn.Parameter(torch.randn(*size)) for size in ((24, 16), (24,)))
    layer, x = SparseTrainingLinear(weight, bias), torch.randn(2, 3, 16, requires_grad=True)
    sparse = both_ways(weight)
    kept = sparse != 0
    assert (kept.view(24, 4, 4).sum(-1) == 2).all() and (kept.T.reshape(16, 6, 4).sum(-1) == 2).all()
    assert torch.equal(sparse[kept], weight[kept])
    y, dy = layer(x), torch.randn(2, 3, 24)
    torch.testing.assert_close(y, F.linear(x, sparse, bias))
    assert y.is_contiguous()
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), dy)
    torch.testing.assert_close(dx, dy @ sparse)
    torch.testing.assert_close(dw, dy.flatten(0, 1).T @ x.detach().flatten(0, 1))  # the dense one: a zero learns, too
    torch.testing.assert_close(db, dy.sum((0, 1)))
    assert dx.is_contiguous() and layer.nbytes == 2 * weight.nbytes
    monkeypatch.setattr(training, "why_not_both", lambda weight: "")
    assert layer.nbytes == weight.nbytes * 17 // 8


def test_a_penalty_on_its_gradient_is_refused() -> None:
    layer = SparseTrainingLinear(torch.nn.Parameter(torch.randn(8, 8)), None)
    x = torch.randn(2, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_model_learns_and_comes_back_with_what_it_learned() -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    parameters = list(model.parameters())
    done = sparsify(model, training=True)
    assert [row.is_changed for row in done.rows] == [True, False] and "6 outputs do not come in fours" in done.rows[
        1
    ].reason
    assert "anew in every step, multiplied dense: no sparse" in done.rows[0].reason
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    zeros = both_ways(model[0].weight) == 0
    x, y = torch.randn(64, 16), torch.randint(0, 6, (64,))
    losses = []
    for _ in range(15):
        losses.append(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(both_ways(model[0].weight) == 0, zeros)  # chosen anew
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](x).dtype == torch.bfloat16
    assert sublight.unpatch(model) == 1 and type(model[0]) is torch.nn.Linear
    assert next(model.parameters()) is parameters[0] and parameters[0].device.type == "cpu"


@pytest.mark.parametrize(("capability", "why"), [((8, 6), ""), ((9, 0), "this is sm_90"), ((10, 0), "this is sm_100")])
def test_only_gpus_whose_form_is_known_multiply_both_ways(
    capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 products with what PyTorch's pass writes were those of other weights."""
    monkeypatch.setattr(training, "why_dense", lambda weight: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = training.why_not_both(torch.empty(256, 384, dtype=torch.bfloat16))
    assert why in reason and bool(reason) == bool(why)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_multiplies_both_ways_with_the_same_zeros(dtype: Any) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(256, 384, device="cuda", dtype=dtype))
    layer, x = SparseTrainingLinear(weight, None), torch.randn(64, 384, device="cuda", dtype=dtype, requires_grad=True)
    assert bool(layer.why) == (torch.cuda.get_device_capability()[0] != training.CAPABILITY)
    eye = torch.eye(384, device="cuda", dtype=dtype)
    sparse = layer(eye).detach().T
    kept = sparse != 0
    assert (kept.reshape(256, 96, 4).sum(-1) <= 2).all() and torch.equal(sparse[kept], weight[kept])
    y, dy = layer(x), torch.randn(64, 256, device="cuda", dtype=dtype)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    for ours, (a, b) in ((y, (x, sparse.T)), (dx, (dy, sparse)), (dw, (dy.T, x))):
        assert ours.is_contiguous()
        error = correct.error("product", ours.detach(), (a @ b).detach(), a.detach().double() @ b.detach().double())
        assert error.ok, error
