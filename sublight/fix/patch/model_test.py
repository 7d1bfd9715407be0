"""A patched model computes what it did, keeps all that is not its forwards, and can be had back."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight import correct
from sublight.errors import BadInput
from sublight.fix.patch import ask
from sublight.fix.patch.model import is_patched, patch, patched, unpatch
from sublight.fix.patch.trials import Block, batch, count, model
from sublight.op import Plan
from sublight.report import patch as report


def gradients(found: Any, x: Any) -> list[Any]:
    found.zero_grad()
    found(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in found.parameters()]


def test_values_and_gradients_stay_as_they_were() -> None:
    plain, x = model(), batch()
    swapped = copy.deepcopy(plain)
    report = patch(swapped)
    assert report.swapped == count(swapped) == 3
    torch.testing.assert_close(plain(x), swapped(x))
    for mine, theirs in zip(gradients(swapped, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_our_forward_really_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    found = model()
    patch(found)
    monkeypatch.setattr("sublight.fix.patch.rules.norm.layer_norm", lambda x, *rest: calls.append(x) or x)
    found(batch())
    assert len(calls) == 3


def test_unpatching_gives_everything_back() -> None:
    found = model()
    before = {name: dict(module.__dict__) for name, module in found.named_modules()}
    patch(found)
    assert unpatch(found) == 3
    assert {name: dict(module.__dict__) for name, module in found.named_modules()} == before
    assert unpatch(found) == 0


def test_a_block_is_patched_only_inside() -> None:
    found = model()
    with patched(found) as report:
        assert report.swapped == count(found) == 3
    assert count(found) == 0
    with pytest.raises(ZeroDivisionError), patched(found):
        raise ZeroDivisionError
    assert count(found) == 0


def test_a_block_inside_a_patched_model_leaves_it_patched() -> None:
    found = model()
    patch(found)
    with patched(found) as report:
        assert report.rows == ()
    assert count(found) == 3


def test_patching_twice_changes_nothing_more() -> None:
    found = model()
    patch(found)
    assert patch(found).rows == ()
    assert unpatch(found) == 3 and count(found) == 0


def test_state_dicts_names_and_hooks_are_untouched() -> None:
    found, x = model(), batch()
    seen: list[str] = []
    found[2].register_forward_hook(lambda *_: seen.append("after"))
    found[2].register_forward_pre_hook(lambda *_: seen.append("before"))
    keys = list(found.state_dict())
    patch(found)
    assert list(found.state_dict()) == keys
    found(x)
    assert seen == ["before", "after"]
    other = model()
    other.load_state_dict(found.state_dict())


def test_what_does_not_require_a_gradient_gets_none() -> None:
    found = model()
    found[0].norm.weight.requires_grad_(False)
    patch(found)
    found(batch()).sum().backward()
    assert found[0].norm.weight.grad is None and found[0].norm.bias.grad is not None


def test_a_copy_is_patched_and_has_its_own_weights() -> None:
    found = model()
    patch(found)
    copied = copy.deepcopy(found)
    assert count(copied) == 3
    with torch.no_grad():
        copied[2].weight.zero_()
        copied[2].bias.zero_()
    assert not copied(batch()).any() and found(batch()).any()


def test_a_saved_model_comes_back_unpatched() -> None:
    found, x = model(), batch()
    patch(found)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert count(loaded) == 0
    torch.testing.assert_close(loaded(x), found(x))


def test_tied_modules_are_one() -> None:
    found = model()
    found[1].norm = found[0].norm
    report = patch(found)
    assert report.swapped == 2
    assert unpatch(found) == 2


def test_a_forward_that_somebody_else_set_is_left() -> None:
    found = model()
    own = found[2].forward
    found[2].forward = lambda x: own(x)
    report = patch(found)
    assert {row.reason for row in report.rows if not row.is_swapped} == {"somebody else has set its forward"}
    assert unpatch(found) == 2
    assert found[2].__dict__["forward"].__name__ == "<lambda>"


def test_autocast_keeps_its_own_rules() -> None:
    found, x = model(), batch()
    plain = copy.deepcopy(found)
    patch(found)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = found(x), plain(x)
    assert ours.dtype == theirs.dtype
    error = correct.error("y", ours, theirs, copy.deepcopy(plain).double()(x.double()))
    assert error.ok, error


def test_checkpointing_recomputes_with_ours() -> None:
    from torch.utils.checkpoint import checkpoint

    found, x = model(), batch()
    plain = gradients(found, x)
    patch(found)
    found.zero_grad()
    checkpoint(found, x, use_reentrant=False).square().mean().backward()
    for mine, theirs in zip((p.grad for p in found.parameters()), plain, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("is_patched_first", [True, False])
def test_compiled_as_one_graph(is_patched_first: bool) -> None:
    found, x = model(), batch()
    expected = found(x)
    if is_patched_first:
        patch(found)
    compiled = torch.compile(found, backend="eager", fullgraph=True)
    if not is_patched_first:
        patch(compiled)
    assert count(found) == 3
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("is_patched_first", [True, False])
def test_wrapped_for_data_parallel_training(one_process: None, is_patched_first: bool) -> None:
    found, x = model(), batch()
    plain = gradients(found, x)
    if is_patched_first:
        patch(found)
    wrapped = torch.nn.parallel.DistributedDataParallel(found)
    if not is_patched_first:
        patch(wrapped)
    assert count(found) == 3
    for mine, theirs in zip(gradients(wrapped, x), plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert unpatch(wrapped) == 3


@pytest.mark.parametrize("is_patched_first", [True, False])
def test_sharded(one_process: None, is_patched_first: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found, x = model(), batch()
    plain = gradients(found, x)
    mesh = init_device_mesh("cpu", (1,))
    if is_patched_first:
        patch(found)
    for block in found[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(found, mesh=mesh)
    if not is_patched_first:
        patch(found)
    assert count(found) == 3
    found.zero_grad()
    found(x).square().mean().backward()
    for parameter, theirs in zip(found.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), theirs)
    assert unpatch(found) == 3


# ------------------------------------------------------------------------------------------------ what pays


def test_on_a_cpu_nothing_pays_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = model()
    outcome = patch(found, batch())
    assert outcome.swapped == count(found) == 0
    assert {row.reason for row in outcome.rows} == {"our kernels are for GPUs, this is on the cpu"}
    assert report.sentence(outcome) == "nothing was swapped: our kernels are for GPUs, this is on the cpu"


def test_what_the_batch_does_not_reach_is_left() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Block(16), Block(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    report = patch(Half(), batch())
    assert [row.reason for row in report.rows if "unused.norm" in row.names] == ["the batch does not reach it"]


@pytest.mark.parametrize("given", [None, "model", torch.zeros(2), {}])
def test_what_is_no_model_gets_one_line(given: Any) -> None:
    with pytest.raises(BadInput, match="patch takes a torch"):
        patch(given)
    with pytest.raises(BadInput, match="unpatch takes a torch"):
        unpatch(3)
    with pytest.raises(BadInput, match=r"patched takes a torch.nn.Module, not"), patched(None):
        pass


class Picky(torch.nn.Module):
    """A norm that is also called with what is no tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return None if x is None else [self(each) for each in x]
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class Asks(torch.nn.Module):
    def __init__(self, width: int, first: Any) -> None:
        super().__init__()
        self.norm, self.first = Picky(width), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(self.first(x))
        return self.norm(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", (lambda x: None, lambda x: [x, x]), ids=("nothing", "a list"))
def test_what_is_no_tensor_goes_to_the_modules_own_forward(first: Any) -> None:
    found, x = Asks(16, first), batch()
    before = found(x)
    assert not patch(found, x).swapped  # and says so, rather than fail
    assert patch(found).swapped == 1
    torch.testing.assert_close(found(x), before)


def test_a_call_that_ours_loses_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(x: Any, *rest: Any) -> Plan:
        return Plan(provider="torch" if len(x) == 2 else "sublight", reason=f"{len(x)} rows")

    monkeypatch.setattr(ask.ops, "find", lambda name: SimpleNamespace(plan=plan))
    (row,) = patch(Asks(16, lambda x: x[:2]), batch()).rows
    assert not row.is_swapped and row.reason == "2 rows"


@pytest.mark.parametrize("error", (KeyboardInterrupt, RuntimeError, KeyError))
@pytest.mark.parametrize("asked", ("batch", "verify", "measure"))
def test_what_raises_leaves_the_model_as_it_was(monkeypatch: Any, always_wins: None, asked: str, error: Any) -> None:
    class Fails(torch.nn.Module):
        """Once it is patched; where a batch is only asked, at once."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_patched(self.norm) or asked == "batch":
                raise error("the user's own")
            return self.norm(x)  # type: ignore[no-any-return]

    if asked == "batch":
        monkeypatch.undo()
    found = Fails().train()
    found.norm.weight.grad = grad = torch.ones(16)
    before, state = copy.deepcopy(found.state_dict()), torch.get_rng_state()
    with pytest.raises(error, match="the user's own"):
        patch(found, **{asked: batch()})
    assert not count(found) and found.training and found.norm.weight.grad is grad
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and not any(m._forward_pre_hooks for m in found.modules())


def test_a_lazy_model_is_asked_to_be_called_first() -> None:
    with pytest.raises(BadInput, match="call the model once"):
        patch(torch.nn.Sequential(torch.nn.LazyLinear(4)))
