"""Sparse layers in a model: what is taken, what is left, there and back; what is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import sublight
from sublight.errors import BadInput
from sublight.fix.sparsify import linear
from sublight.fix.sparsify.linear import SparseLinear
from sublight.fix.sparsify.model import sparsify


def made() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 30), torch.nn.Linear(30, 8)
    )


def test_two_of_four_stay_and_all_come_back() -> None:
    model, x = made(), torch.randn(3, 5, 32)
    before, state = model(x), copy.deepcopy(model.state_dict())
    first = model[0].weight
    done = sparsify(model, verify=x)
    by_name = {name: row for row in done.rows for name in row.names}
    assert by_name["0"].is_changed and by_name["2"].is_changed and "sparse tensor cores" in by_name["0"].reason
    assert "30 inputs do not come in fours" in by_name["3"].reason and not by_name["3"].is_changed
    assert done.change.startswith("outputs change by") and "0.00%" not in done.change
    dense = model[0].dense
    assert ((dense.view(64, 8, 4) != 0).sum(-1) == 2).all()
    assert torch.equal(dense[dense != 0], first[dense != 0])
    torch.testing.assert_close(model[0](x), F.linear(x, dense, model[0].bias))
    assert sublight.unpatch(model) == 2
    assert model[0].weight is first and torch.equal(model(x), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_model_that_is_moved_chooses_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the compressed form, which needs a GPU."""
    model, x = made(), torch.randn(4, 32)
    sparsify(model)
    dense, expected = model[0].dense.clone(), model(x)
    compressed = []

    class Stand(torch.Tensor):
        """Refuses what PyTorch's compressed tensors refuse: to be differentiated through."""

        def to_dense(self) -> Any:
            return self.as_subclass(torch.Tensor)

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            if function is F.linear and isinstance(args[1], cls) and args[0].requires_grad:
                raise NotImplementedError
            return super().__torch_function__(function, types, args, options)

    def compress(weight: Any) -> Any:
        compressed.append(tuple(weight.shape))
        return weight.as_subclass(Stand)

    with monkeypatch.context() as patch:
        patch.setattr(linear, "why_dense", lambda weight: "")
        patch.setattr(linear, "_compressed", compress)
        model.to(torch.float32)
        assert compressed == [(64, 32), (30, 64)] and isinstance(model[0].weight, Stand)
        torch.testing.assert_close(model(x), expected)
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    model.double()
    assert model[0].why and torch.equal(model[0].dense, dense.double())
    assert model(x.double()).dtype == torch.float64


def test_what_keeps_a_weight_dense() -> None:
    assert linear.why_dense(torch.ones(32, 64)) == "no sparse tensor cores on this device (cpu)"


@pytest.mark.gpu
def test_sparse_tensor_cores_multiply() -> None:
    layer = torch.nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    sparse = SparseLinear(layer.weight, layer.bias)
    assert not sparse.why and 16 * sparse.nbytes == 9 * layer.weight.nbytes
    with torch.no_grad():
        for rows in (1, 7, 64):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            truth = F.linear(x.double(), sparse.dense.double(), layer.bias.double())
            theirs = F.linear(x, sparse.dense, layer.bias)
            off, yardstick = ((y.double() - truth).abs().max() for y in (sparse(x), theirs))
            assert off <= 2 * yardstick


def test_bad_input_and_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for call, words in (
        (lambda: sparsify(3), "sparsify takes a torch.nn.Module, not int"),
        (lambda: sparsify(made(), "1:4"), "unknown way '1:4'"),
        (lambda: sparsify(made(), skip=("head",)), "names no module"),
        (lambda: sparsify(torch.nn.Linear(8, 8)), "wrap it"),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    sublight.sparsify(made(), "2:4", verify=torch.randn(2, 32))
    out = capsys.readouterr().out
    assert "2 layers made sparse" in out and "sublight.unpatch(model) undoes it" in out and "verified:" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_file_brings_them_back(tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    model, x = made(), torch.randn(4, 32)
    sparsify(model, skip=("3",))
    expected = model(x)
    sublight.save_quantized(model, tmp_path / "sparse.safetensors")
    other = made()
    torch.nn.init.ones_(other[0].weight)
    assert sublight.load_quantized(other, tmp_path / "sparse.safetensors") == 2
    assert isinstance(other[0], SparseLinear) and torch.equal(other(x), expected)
    dense_bytes = sum(layer.weight.nbytes for layer in (model[0], model[2]))
    assert (tmp_path / "sparse.safetensors").stat().st_size < 0.75 * dense_bytes + 4 * 30 * 8 + 2000
