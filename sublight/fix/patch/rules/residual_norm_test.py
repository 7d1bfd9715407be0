"""A sum and the norm after it are taken together, wherever a forward writes them, and only there."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.fix.patch.model import apply, is_patched, undo
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import residual_norm

WIDTH = 16


class Part(torch.nn.Module):
    def __init__(self, norm: Any = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(WIDTH, WIDTH), norm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)


class Llama(Part):
    def forward(self, x: Any) -> Any:
        residual = x
        x = self.first(x)
        x = residual + x

        # a comment
        residual = x
        x = self.norm(x)
        x = self.last(x)
        return residual + x


class Nano(Part):
    def forward(self, x: Any) -> Any:
        x = x + self.first(x)
        return x + self.last(self.norm(x))


class Added(Part):
    def forward(self, x: Any) -> Any:
        x = torch.add(x, self.first(x))
        y: Any = self.norm(x)
        return x + self.last(y)


class Bert(Part):
    def forward(self, x: Any) -> Any:
        return self.last(self.norm(x + self.first(x)))


class Gpt2(Part):
    def forward(self, x: Any, other: Any = None) -> Any:
        residual = x
        x = self.first(x) + residual
        if other is not None:
            residual = x
            x = residual + self.last(other)
        residual = x
        x = self.norm(x)
        return residual + self.last(x)


class Early(Part):
    def forward(self, x: Any) -> Any:
        if self.training:
            x = x + self.first(x)
            return self.norm(x)
        return x


class InPlace(Part):
    def forward(self, x: Any) -> Any:
        y = x * 1
        y += self.first(x)
        return y + self.norm(y)


class Changed(Part):
    def forward(self, x: Any) -> Any:
        x = x + self.first(x)
        x = x * 2
        return self.norm(x)


class Maybe(Part):
    def forward(self, x: Any) -> Any:
        x = x + self.first(x)
        return self.norm(x) if x.sum() > 0 else x


class Needed(Part):
    def forward(self, x: Any) -> Any:
        x = x + self.first(x)
        if x.sum() > 0:  # which needs the sum
            x = x * 2
        return self.norm(x)


class Strange(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return self.weight * x / x.abs().amax(-1, keepdim=True)


FUSED = (Llama, Nano, Added, Bert, Gpt2, Early)
NOT_FUSED = (InPlace, Changed, Maybe, Needed)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused ops that ran."""
    ran: list[str] = []
    for name in ("add_layer_norm", "add_rms_norm"):
        own = getattr(residual_norm, name)
        monkeypatch.setattr(residual_norm, name, lambda *args, own=own, name=name: (ran.append(name), own(*args))[1])
    return ran


def built(kind: Any, norm: Any = torch.nn.LayerNorm) -> Any:
    module = kind(norm)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def found(module: Any) -> Any:
    return residual_norm.find(module, module)


def outcome(module: Any, *inputs: Any) -> list[Any]:
    """What it gives, and every gradient."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = module(*leaves)
    used = [*leaves, *module.parameters()]
    grads = torch.autograd.grad(y.square().mean(), used, allow_unused=True)
    return [y, *(torch.zeros(1) if grad is None else grad for grad in grads)]


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("norm", (torch.nn.LayerNorm, torch.nn.RMSNorm))
def test_a_fused_forward_gives_the_same(kind: Any, norm: Any, calls: list[str]) -> None:
    module, x = built(kind, norm), torch.randn(3, 5, WIDTH)
    expected = outcome(module, x)
    swap = found(module)
    assert isinstance(swap, Swap)
    apply(module, swap)
    for ours, theirs in zip(outcome(module, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert calls == ["add_layer_norm" if norm is torch.nn.LayerNorm else "add_rms_norm"]
    assert swap.op == calls[0]
    copied = copy.deepcopy(module)
    torch.testing.assert_close(copied(x), expected[0])
    assert is_patched(copied) and len(calls) == 2
    assert undo(module) and type(module).forward is kind.forward and not is_patched(module)


@pytest.mark.parametrize("kind", NOT_FUSED)
def test_where_the_two_do_not_meet_nothing_is_done(kind: Any) -> None:
    assert found(built(kind)) is None


def test_both_ways_through_a_test_give_the_same(calls: list[str]) -> None:
    module, x, other = built(Gpt2), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    expected = outcome(module, x, other)
    apply(module, found(module))
    for ours, theirs in zip(outcome(module, x, other), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert calls == ["add_layer_norm"]  # of the other sum


def test_hooks_dtypes_autocast_and_broadcasts_get_the_two_statements(calls: list[str]) -> None:
    module, x = built(Llama), torch.randn(4, WIDTH)
    expected = module(x)
    apply(module, found(module))
    seen: list[Any] = []
    handle = module.norm.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(x), expected) and seen == [1]
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        ours = module(x)
        undo(module)
        assert torch.equal(ours, module(x))
    wide = residual_norm.adding(residual_norm.norm.known(module.norm))
    normed, total = wide(module.norm, x, x[:1])
    assert torch.equal(total, x + x[:1]) and torch.equal(normed, module.norm(total))
    assert calls == []


def test_a_strange_norm_is_left_with_its_reason() -> None:
    left = found(built(Llama, Strange))
    assert isinstance(left, Left) and left.reason == "norm is no norm that we know"
    assert found(torch.nn.Sequential(torch.nn.LayerNorm(WIDTH))) is None
    assert found(torch.nn.LayerNorm(WIDTH)) is None


def test_the_choice_is_asked_for_what_the_norm_will_get() -> None:
    module, x = built(Llama), torch.randn(3, 5, WIDTH)
    arguments = found(module).arguments
    assert arguments(module, x)[0] is x and arguments(module, hidden=x)[1] is x
    assert arguments(module, torch.zeros(3, 5, dtype=torch.int64))[0].shape == (3, 5, WIDTH)
    assert arguments(module)[0].shape == (1, WIDTH)


def test_it_is_one_graph_and_its_lines_are_the_sources() -> None:
    module, x = built(Llama), torch.randn(4, WIDTH)
    expected = module(x)
    apply(module, found(module))
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), expected)
    first = inspect.getsourcelines(Llama.forward)[1]
    lines = {line for *_, line in module.forward.__func__.__wrapped__.__code__.co_lines() if line}
    assert first <= min(lines) and max(lines) <= first + len(inspect.getsourcelines(Llama.forward)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FUSED)
def test_on_a_gpu_the_kernel_gives_the_same(kind: Any, calls: list[str]) -> None:
    from sublight import correct

    module = built(kind, torch.nn.RMSNorm).cuda().bfloat16()
    x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    truth = outcome(copy.deepcopy(module).double(), x.double())
    plain = outcome(module, x)
    apply(module, found(module))
    for name, (ours, theirs, true) in enumerate(zip(outcome(module, x), plain, truth, strict=True)):
        assert correct.error(str(name), ours, theirs, true).ok
    assert calls == ["add_rms_norm"]


@pytest.mark.parametrize(("dtype", "fuses"), [(torch.float32, True), (torch.bfloat16, False)])
def test_one_plus_a_weight_of_16_bits_is_the_norms_own(
    dtype: Any, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(residual_norm, "add_rms_norm", lambda a, b, *rest: calls.append(a) or (a, b))
    kind = residual_norm.norm.Norm(
        kind="RMSNorm with 1 + weight", weight="weight", eps=1e-6, dtypes=frozenset((dtype,))
    )
    module, x = torch.nn.RMSNorm(WIDTH, dtype=dtype), torch.randn(2, WIDTH, dtype=dtype)
    _, total = residual_norm.adding(kind)(module, x, x)
    assert bool(calls) is fuses and (fuses or torch.equal(total, x + x))
