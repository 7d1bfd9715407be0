"""AdamW's step by our kernels on PyTorch's own groups and state: values, state dicts, schedulers, hooks, undo."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.optim.optimizer import register_optimizer_step_post_hook

import sublight
from sublight import correct
from sublight.errors import BadInput
from sublight.fix.patch import optimizer as fix
from sublight.fix.patch.optimizer import is_patched, patch_optimizer, unpatch_optimizer

SIZES = ((1,), (7, 73), (513,), (33, 65))
STEPS = 5


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels take CPU tensors too: the interpreter runs them."""
    monkeypatch.setattr(fix, "why_torch", lambda tensors: "")


def params_like(dtype: Any = torch.float32, device: str = "cpu") -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) / 50 for size in SIZES]
    return [p.to(device, dtype).requires_grad_() for p in start]


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.3, "lr": 3e-3}, {"params": params[2:], "betas": (0.8, 0.9)}]


def train(optimizer: Any, *, steps: int = STEPS, done: int = 0, schedulers: tuple[Any, ...] = ()) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(done, done + steps):
        for i, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).mul_(0.01).to(p.device, p.dtype)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def as_right(ours: list[Any], theirs: list[Any], truth: list[Any]) -> bool:
    flat = [torch.cat([p.detach().flatten() for p in each]) for each in (ours, theirs, truth)]
    return correct.error("parameters", *flat).ok


def made(dtype: Any = torch.float32, kind: Any = None, **options: Any) -> tuple[list[Any], Any]:
    params = params_like(dtype)
    return params, (kind or torch.optim.AdamW)(groups_of(params), **options)


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"fused": True}, {"foreach": False}, {"lr": torch.tensor(1e-3)}], ids=str
)
def test_five_steps_are_as_right_as_pytorchs(options: dict[str, Any], kernels: None) -> None:
    ours, optimizer = made(**options)
    theirs, other = made(**options)
    truth, exact = made(torch.float64, **{k: v for k, v in options.items() if k != "fused"})
    assert patch_optimizer(optimizer).swapped == 1 and is_patched(optimizer)
    for each in (optimizer, other, exact):
        train(each)
    assert as_right(ours, theirs, truth)
    assert not torch.equal(ours[1], params_like()[1])
    for p, q in zip(ours, theirs, strict=True):
        assert optimizer.state[p]["step"] == other.state[q]["step"] == STEPS
        assert optimizer.state[p]["step"].device == other.state[q]["step"].device
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])


def test_it_is_our_kernel_that_steps(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = made()
    heard: list[Any] = []
    monkeypatch.setattr(fix.AdamW, "_by_ours", lambda self, work: heard.append(work))
    patch_optimizer(optimizer)
    train(optimizer, steps=2)
    assert len(heard) == 2
    unpatch_optimizer(optimizer)
    train(optimizer, steps=1)
    assert len(heard) == 2


@pytest.mark.parametrize("ours_first", [True, False])
def test_states_travel_both_ways(ours_first: bool, kernels: None) -> None:
    first_params, first = made()
    second_params, second = made()
    patch_optimizer(first if ours_first else second)
    train(first, steps=2)
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(saved)
    with torch.no_grad():
        for p, q in zip(second_params, first_params, strict=True):
            p.copy_(q)
    train(second, steps=3, done=2)
    params, whole = made()
    train(whole)
    for p, q in zip(second_params, params, strict=True):
        torch.testing.assert_close(p, q)
    assert second.state_dict()["param_groups"] == whole.state_dict()["param_groups"]
    assert second.state_dict()["state"].keys() == whole.state_dict()["state"].keys()


def test_undone_in_the_middle(kernels: None) -> None:
    ours, optimizer = made()
    theirs, other = made()
    patch_optimizer(optimizer)
    train(optimizer, steps=2)
    assert unpatch_optimizer(optimizer) and not is_patched(optimizer) and "step" not in vars(optimizer)
    train(optimizer, steps=1, done=2)
    assert not unpatch_optimizer(optimizer)
    patch_optimizer(optimizer)
    train(optimizer, steps=2, done=3)
    train(other)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_and_after(when: str, kernels: None) -> None:
    ours, optimizer = made()
    theirs, other = made()
    if when == "after":
        patch_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns where it does not see the steps
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.1) for each in (optimizer, other)]
        if when == "before":
            patch_optimizer(optimizer)
        assert is_patched(optimizer)
        train(optimizer, steps=3, schedulers=(schedulers[0],))
        unpatch_optimizer(optimizer)
        assert not is_patched(optimizer)
        train(optimizer, steps=2, done=3, schedulers=(schedulers[0],))
        train(other, schedulers=(schedulers[1],))
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_hooks_run_once_a_step(kernels: None) -> None:
    _, optimizer = made()
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *arguments: heard.append("pre"))
    optimizer.register_step_post_hook(lambda *arguments: heard.append("post"))
    patch_optimizer(optimizer)
    train(optimizer, steps=2)
    optimizer.step(lambda: None)  # a closure: PyTorch's own step
    assert heard == ["pre", "post"] * 3


def test_nobody_hears_of_the_step_that_compiles(kernels: None) -> None:
    """Who counts steps counts those of every optimizer."""
    heard: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *arguments: heard.append(arguments))
    try:
        fix._step_alike(made()[1])
    finally:
        handle.remove()
    assert not heard


def test_what_one_step_leaves_to_pytorch(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fix.AdamW, "_by_ours", lambda self, work: pytest.fail("ours"))
    params, optimizer = made(fused=True)
    patch_optimizer(optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    assert optimizer.step(lambda: 5.0) == 5.0
    before = params[1].clone()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())  # as a GradScaler does
    optimizer.step()
    assert torch.equal(before, params[1])  # an infinity was found: nothing moves
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.param_groups[0]["amsgrad"] = True
    assert fix._why_not_now(optimizer)


def test_parameters_that_come_later_or_have_no_gradient(kernels: None) -> None:
    params, optimizer = made()
    patch_optimizer(optimizer)
    late = torch.randn(3, requires_grad=True)
    start = late.detach().clone()
    optimizer.add_param_group({"params": [late]})
    params[0].grad = torch.ones(1)
    optimizer.step()
    assert torch.equal(late, start) and late not in optimizer.state
    late.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(late, start)
    assert optimizer.state[late]["step"] == 1 and optimizer.state[params[0]]["step"] == 2


class Sam(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "no kernel of ours for SGD"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
        (torch.optim.AdamW, {"differentiable": True}, "differentiable"),
        (torch.optim.Adam, {}, "weight decay"),
        (Sam, {}, "step of its own"),
        (fix.AdamW, {}, "ours already"),
    ],
)
def test_what_is_left(kind: Any, options: dict[str, Any], reason: str, kernels: None) -> None:
    _, optimizer = made(kind=kind, **options)
    found = patch_optimizer(optimizer)
    assert not found.swapped and reason in found.rows[0].reason
    assert not is_patched(optimizer)


def test_what_is_adamw_by_another_name(kernels: None) -> None:
    assert patch_optimizer(torch.optim.Adam(params_like())).swapped == 1  # without decay it is the same
    assert patch_optimizer(Renamed(params_like())).swapped == 1


def test_on_a_cpu_nothing_pays_and_bad_input() -> None:
    _, optimizer = made()
    found = patch_optimizer(optimizer)
    assert not found.swapped and "step" not in vars(optimizer) and found.rows[0].reason
    with pytest.raises(BadInput, match="Module or an optimizer"):
        patch_optimizer([1])  # type: ignore[arg-type]
    for given in ({"verify": torch.ones(2)}, {"only": ["norm"]}):
        with pytest.raises(BadInput, match="are for a model"):
            sublight.patch(optimizer, **given)
    with pytest.raises(BadInput, match="a list of rules"):
        sublight.patch(torch.nn.Linear(2, 2), only=3)  # type: ignore[arg-type]


def test_a_copy_is_pytorchs(kernels: None) -> None:
    _, optimizer = made()
    patch_optimizer(optimizer)
    assert not is_patched(copy.deepcopy(optimizer))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_on_the_gpu(options: dict[str, Any]) -> None:
    ours, theirs, truth = params_like(device="cuda"), params_like(device="cuda"), params_like(torch.float64, "cuda")
    optimizer, other = (torch.optim.AdamW(groups_of(each), **options) for each in (ours, theirs))
    exact = torch.optim.AdamW(groups_of(truth))
    assert patch_optimizer(optimizer).swapped == 1
    for each in (optimizer, other, exact):
        train(each)
    assert as_right(ours, theirs, truth)
    for p, q in zip(ours, theirs, strict=True):
        assert optimizer.state[p]["step"].device == other.state[q]["step"].device
        assert optimizer.state[p]["step"] == STEPS


def test_a_group_that_was_taken_out_makes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.AdamW(groups_of(params_like(device="meta")))  # steps lie on the host, parameters elsewhere
    fused = fix.Fused(None)
    monkeypatch.setattr(fused.ours, "_by_ours", lambda work: None)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.zeros_like(p)
    fused.step(optimizer)
    optimizer.param_groups.pop()
    fused.step(optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2, 1, 1]
