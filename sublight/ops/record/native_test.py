"""Calls in C++ give what calls in Python give, or go back to Python; without CUDA their launches are interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.autograd import forward_ad

from sublight import correct
from sublight.backend import native
from sublight.conftest import HAS_GPU
from sublight.ops.norm import add_rms_norm, layer_norm, rms_norm
from sublight.ops.record import call as calling
from sublight.ops.record.library import Registered

pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU the ops' own tests run natively")


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Built once, and kept beside pytest's other caches where it has any."""
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("native") if cache else tmp_path_factory.mktemp("native")
    file = folder / native.file_of(cuda=False).name
    if not file.exists():
        native.build(file, cuda=False)
    return native.load(file)


@pytest.fixture
def ops(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The norms once more, under other names, whose calls are native; those of other tests stay in Python."""
    waiting: list[Any] = []
    monkeypatch.setattr(calling.native, "when_ready", waiting.append)
    made = {}
    for name, op in (("rms", rms_norm.RMS), ("layer", layer_norm.LAYER), ("add_rms", add_rms_norm.ADD_RMS)):
        by = renamed(op.gradient.by)
        made[name] = renamed(op, gradient=replace(op.gradient, by=by))
    for begin in waiting:
        begin(module)
    monkeypatch.setattr(native.State, "module", module)
    yield SimpleNamespace(**made, known=lambda op: module.known(op.native.call), module=module)


def renamed(op: Registered, **changes: Any) -> Registered:
    renamed.count = getattr(renamed, "count", 0) + 1  # type: ignore[attr-defined]
    schema = op.schema.replace("(", f"_native{renamed.count}(", 1)  # type: ignore[attr-defined]
    return replace(op, schema=schema, **changes)


def inputs(seed: int = 0, rows: int = 6, cols: int = 64, **kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator).to(**kind)
    return x, torch.randn(cols, generator=generator).to(**kind)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["rms", "layer", "add_rms"])
def test_values_and_gradients_are_the_same_bits(ops: Any, name: str) -> None:
    op = getattr(ops, name)
    for seed in range(3):  # the first call is planned in Python, those after it are native
        x, weight = inputs(seed)
        extra = {"rms": (weight,), "layer": (weight, weight + 1), "add_rms": (x.flip(0), weight)}[name]
        args = (x, *extra, 1e-6)
        assert same(op.call(*args), op.mine(op.by_kernels(*args)))
        grads = tuple(torch.randn_like(x) for _ in range(op.results))
        ours = correct.gradients(lambda *a: op.call(*a, 1e-6), args[:-1], grads)
        outputs = dict(zip(op.outputs, op.by_kernels(*args), strict=True)) | dict(zip(op.arguments, args, strict=True))
        saved = [outputs[each] for each in op.gradient.saves]
        theirs = op.gradient._by_argument(op, op.gradient.by.by_kernels(*grads, *saved))
        assert same(ours, theirs[:-1])
    assert ops.known(op) == 2 and ops.known(op.gradient.by) == 1  # without and with a gradient


def test_what_differs_in_kind_is_planned_anew(ops: Any) -> None:
    x, weight = inputs()
    kinds = [
        (x, weight, 1e-6), (x, weight, 1e-3), (x[:3], weight, 1e-6), (x.view(2, 3, 64), weight, 1e-6),
        (x.half(), weight.half(), 1e-6), (torch.randn(6, 128)[:, :64], weight, 1e-6),
        (torch.randn(6 * 64 + 1)[1:].view(6, 64), weight, 1e-6),
    ]  # fmt: skip
    for count, args in enumerate(kinds, 1):
        for _ in range(2):
            assert same(ops.rms.call(*args), ops.rms.mine(ops.rms.by_kernels(*args)))
        assert ops.known(ops.rms) == count


def test_a_layout_that_is_copied_first_stays_in_python(ops: Any) -> None:
    x, weight = inputs()
    turned = x.T.contiguous().T
    for _ in range(2):
        assert same(ops.rms.call(turned, weight, 1e-6), ops.rms.call(x, weight, 1e-6))
    assert ops.known(ops.rms) == 1  # that of x


def test_a_derivative_of_the_derivative(ops: Any) -> None:
    def penalty(call: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        x, weight = (t.to(dtype).requires_grad_() for t in inputs(rows=64))
        (slope,) = torch.autograd.grad(call(x, weight, 1e-6).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, weight))

    theirs, truth = penalty(rms_norm.reference), penalty(rms_norm.reference, torch.float64)
    for _ in range(2):
        for triple in zip(penalty(ops.rms.call), theirs, truth, strict=True):
            error = correct.error("penalty", *triple)
            assert error.ok, error


def test_graphs_are_kept_and_released_as_pytorch_does(ops: Any) -> None:
    x, weight = (t.requires_grad_() for t in inputs())
    for _ in range(2):
        y = ops.rms.call(x, weight, 1e-6)
        first = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert same(first, torch.autograd.grad(y, x, torch.ones_like(y)))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, x, torch.ones_like(y))
    weight.data.add_(0)
    y = ops.rms.call(x, weight, 1e-6)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_result_that_nobody_uses(ops: Any) -> None:
    x, weight = inputs()
    leaves = [x.requires_grad_(), torch.randn(6, 64, requires_grad=True), weight.requires_grad_()]
    for used in ((0,), (1,), (0, 1)):
        for _ in range(2):
            found = []
            for call in (lambda *a: ops.add_rms.call(*a, 1e-6), add_rms_norm.reference):
                outputs = call(*leaves)
                loss = sum(outputs[i].square().sum() for i in used)
                found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
            for one, other in zip(*found, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other)


def test_checkpointing_and_hooks_of_saved_tensors(ops: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = (t.requires_grad_() for t in inputs())
    plain = torch.autograd.grad(ops.rms.call(x, weight, 1e-6).square().sum(), (x, weight))
    for _ in range(2):
        kept = checkpoint(lambda a: ops.rms.call(a, weight, 1e-6), x, use_reentrant=False)
        assert same(torch.autograd.grad(kept.square().sum(), (x, weight)), plain)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = ops.rms.call(x, weight, 1e-6)
    assert len(packed) == 3 and same(torch.autograd.grad(y.square().sum(), (x, weight)), plain)


def test_transforms_modes_and_classes_go_back_to_python(ops: Any) -> None:
    x, weight = inputs()
    for _ in range(2):
        ops.rms.call(x, weight, 1e-6)
    truth = rms_norm.reference(x, weight, 1e-6)
    assert torch.func.vmap(lambda row: ops.rms.call(row, weight, 1e-6))(x).shape == x.shape
    slope = torch.func.grad(lambda a: ops.rms.call(a, weight, 1e-6).sum())(x)
    torch.testing.assert_close(slope, torch.func.grad(lambda a: rms_norm.reference(a, weight, 1e-6).sum())(x))
    with forward_ad.dual_level():
        dual = ops.rms.call(forward_ad.make_dual(x, torch.ones_like(x)), weight, 1e-6)
        assert forward_ad.unpack_dual(dual).tangent is not None
    complex_ = torch.view_as_complex(torch.stack((x, -x), -1))
    negated = complex_.conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(ops.rms.call(negated, weight, 1e-6), truth)

    class Own(torch.Tensor):
        pass

    assert type(ops.rms.call(x.as_subclass(Own), weight, 1e-6)) is Own
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = ops.rms.call(mode.from_tensor(x), mode.from_tensor(weight), 1e-6)
        assert type(fake).__name__ == "FakeTensor"
    with torch.inference_mode():
        assert ops.rms.call(torch.randn(6, 64), torch.randn(64), 1e-6).is_inference()
    with pytest.raises(TypeError):
        ops.rms.call(x)


def test_whoever_wants_to_see_launches_sees_them(ops: Any) -> None:
    from sublight.backend.launch import watching

    x, weight = inputs()
    for _ in range(2):
        ops.rms.call(x, weight, 1e-6)
    with native.paused(), watching() as steps:
        ops.rms.call(x, weight, 1e-6)
    assert [step.name for step in steps] == ["_tile_kernel"]


def test_what_is_known_stays_bounded(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MOST_KNOWN", 3)
    weight = torch.randn(64)
    for rows in range(1, 8):
        assert ops.rms.call(torch.randn(rows, 64), weight, 1e-6).shape == (rows, 64)
    assert ops.known(ops.rms) == 3


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert "no C++ compiler" in native.why_not(cuda=False)
    monkeypatch.setenv("SUBLIGHT_NATIVE", "0")
    assert "SUBLIGHT_NATIVE=0" in native.why_not(cuda=False)


def test_a_build_that_fails_leaves_python_and_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    broken = tmp_path / "call.cpp"
    broken.write_text("this is no C++;")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "SOURCE", broken)
    monkeypatch.setattr(native.State, "thread", None)
    monkeypatch.setattr(native.State, "module", None)
    monkeypatch.setattr(native.State, "reason", "")
    thread = native.start(cuda=False)
    assert thread is not None
    thread.join()
    assert native.State.module is None and "failed" in native.State.reason
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.tmp"))
