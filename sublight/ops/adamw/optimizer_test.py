"""AdamW the optimizer: as right as torch.optim's by the twice-PyTorch's-error rule; its state, clipping, rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.errors import BadInput
from sublight.ops.adamw import optimizer as adamw_optimizer
from sublight.ops.adamw import tables as adam_tables
from sublight.ops.adamw import update as adam_update
from sublight.ops.adamw.optimizer import AdamW

SIZES = ((1,), (7, 73), (512,), (513,), (33, 65), (3000,))
STEPS = 5


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels take CPU tensors too: the interpreter runs them (of bf16's arithmetic, which it gets wrong, they use
    none)."""
    monkeypatch.setattr(adamw_optimizer, "why_torch", lambda tensors: "")


@pytest.fixture
def pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_optimizer, "why_torch", lambda tensors: "as where there is no GPU")


def params_like(device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, generator=generator) / 50).to(device, dtype).requires_grad_() for size in SIZES
    ]  # rounded before it is widened: every optimizer starts from the same numbers


def copies(params: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [p.detach().to(dtype).clone().requires_grad_() for p in params]


def groups_of(params: list[torch.Tensor]) -> list[dict[str, object]]:
    return [{"params": params[:2], "weight_decay": 0.3, "lr": 3e-3}, {"params": params[2:], "betas": (0.8, 0.9)}]


def train(
    optimizer: torch.optim.Optimizer,
    params: list[torch.Tensor],
    *,
    steps: int = STEPS,
    clip: float = 0.0,
    done: int = 0,
) -> None:
    for step in range(done, done + steps):
        for i, p in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).mul_(0.01).to(p.device, p.dtype)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()


def errors(ours: list[torch.Tensor], theirs: list[torch.Tensor], truth: list[torch.Tensor]) -> correct.Error:
    flat = [torch.cat([p.detach().flatten() for p in each]) for each in (ours, theirs, truth)]
    return correct.error("parameters", *flat)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"lr": 0.1, "eps": 1e-3}, {"weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize("run_by", ["kernels", "pytorch"])
def test_it_is_as_right_as_pytorchs(
    run_by: str, options: dict[str, object], device: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(run_by)
    start = params_like(device)
    ours, theirs, truth = copies(start, torch.float32), copies(start, torch.float32), copies(start, torch.float64)
    with watching() as steps:
        train(AdamW(groups_of(ours), **options), ours)
    assert bool(steps) == (run_by == "kernels")
    train(torch.optim.AdamW(groups_of(theirs), **options), theirs)
    train(torch.optim.AdamW(groups_of(truth), **options), truth)
    error = errors(ours, theirs, truth)
    assert error.ok, error
    assert not torch.equal(ours[0], start[0])


@pytest.mark.parametrize("joined", [4096, 2])  # at once, and two by two first
@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipping_is_clip_grad_norm(
    kernels: None, max_norm: float, joined: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam_update, "JOINED", joined)
    adam_update.plan_tasks.cache_clear()
    start = params_like(device)
    ours, theirs, truth = copies(start, torch.float32), copies(start, torch.float32), copies(start, torch.float64)
    optimizer = AdamW(groups_of(ours), max_norm=max_norm)
    train(optimizer, ours)
    train(torch.optim.AdamW(groups_of(theirs)), theirs, clip=max_norm)
    train(torch.optim.AdamW(groups_of(truth)), truth, clip=max_norm)
    adam_update.plan_tasks.cache_clear()
    error = errors(ours, theirs, truth)
    assert error.ok, error


def test_the_norm_is_as_right_as_pytorchs(kernels: None, device: str) -> None:
    params = params_like(device)
    optimizer = AdamW(params, max_norm=1.0)
    ours, theirs, truth = [], [], []
    for step in range(24):  # of one number PyTorch's error may be small by luck
        train(optimizer, params, steps=1, done=step)
        grads = [p.grad for p in params]
        ours.append(optimizer.grad_norm)
        theirs.append(torch.nn.utils.get_total_norm(grads))
        truth.append(torch.nn.utils.get_total_norm([g.double() for g in grads]))
    error = correct.error("norm", *(torch.stack(each) for each in (ours, theirs, truth)))
    assert error.ok, error


def test_a_norm_that_is_not_a_number_reaches_every_parameter(kernels: None, device: str) -> None:
    params = params_like(device)
    optimizer = AdamW(params, max_norm=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    params[3].grad[5] = torch.nan
    optimizer.step()
    assert all(torch.isnan(p).all() for p in params), "as with torch.nn.utils.clip_grad_norm_"


def test_torchs_state_goes_on_here_and_ours_there(kernels: None, device: str) -> None:
    """PyTorch's steps, then ours, then PyTorch's again are as right as PyTorch's throughout."""
    start = params_like(device)
    ours, theirs, truth = copies(start, torch.float32), copies(start, torch.float32), copies(start, torch.float64)
    for params in (theirs, truth):
        train(torch.optim.AdamW(groups_of(params)), params, steps=3 * STEPS)
    first, second, third = (kind(groups_of(ours)) for kind in (torch.optim.AdamW, AdamW, torch.optim.AdamW))
    train(first, ours)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, ours, done=STEPS)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    assert float(third.state[ours[0]]["step"]) == 2 * STEPS
    train(third, ours, done=2 * STEPS)
    error = errors(ours, theirs, truth)
    assert error.ok, error


def test_averages_keep_their_data_type_through_a_state_dict(kernels: None, device: str) -> None:
    params = params_like(device, torch.float16)
    optimizer = AdamW(params, state_dtype=torch.float32)
    train(optimizer, params, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    again = AdamW(copies(params, torch.float16), state_dtype=torch.float32)
    again.load_state_dict(saved)
    for i, p in enumerate(again.param_groups[0]["params"]):
        assert torch.equal(again.state[p]["exp_avg"], saved["state"][i]["exp_avg"])
        assert again.state[p]["exp_avg_sq"].dtype == torch.float32
        assert float(again.state[p]["step"]) == 2


def test_a_parameter_without_a_gradient_waits(kernels: None, device: str) -> None:
    params = params_like(device)
    optimizer = AdamW(params)
    train(optimizer, params, steps=1)
    before = params[1].detach().clone()
    for p in params:
        p.grad = torch.ones_like(p) if p is not params[1] else None
    optimizer.step()
    assert torch.equal(params[1], before)
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 1, 2, 2, 2, 2]


def test_gradients_that_move_are_found(kernels: None, device: str) -> None:
    """A table of old addresses would read freed memory."""
    start = params_like(device)
    ours, same = copies(start, torch.float32), copies(start, torch.float32)
    optimizer, fresh = AdamW(ours), AdamW(same)
    kept = []
    for step in range(3):
        for p, q in zip(ours, same, strict=True):
            p.grad = torch.full_like(p, 0.1 * (step + 1))
            q.grad = p.grad.clone()
        kept.append([p.grad for p in ours])  # so that the next ones lie elsewhere
        optimizer.step()
        fresh._tables.clear()
        fresh.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, same, strict=True))


def test_a_gradient_that_changes_where_it_lies_is_noticed(kernels: None, device: str) -> None:
    """The same address, and from step to step another order of elements or another sign."""
    start = torch.randn(33, 65, device=device)
    room = torch.randn(33 * 65, device=device)
    ours, same = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizer, fresh = AdamW([ours]), AdamW([same])
    for grad in (room.view(33, 65), room.view(65, 33).T, torch._neg_view(room.view(33, 65)), room.view(33, 65)):
        assert grad.data_ptr() == room.data_ptr()
        ours.grad, same.grad = grad, grad.resolve_neg().contiguous()
        optimizer.step()
        fresh._tables.clear()
        fresh.step()
        assert torch.equal(ours, same)


def test_tables_are_kept_while_nothing_moves(kernels: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_like(device)
    optimizer = AdamW(groups_of(params))
    made = []
    monkeypatch.setattr(
        adamw_optimizer, "batches_of", lambda fives: made.append(len(fives)) or adam_tables.batches_of(fives)
    )
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    assert made == [2, 4]  # of each group once
    monkeypatch.setattr(adamw_optimizer, "why_torch", lambda tensors: pytest.fail("asked again"))
    optimizer.step()


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def gapped(x: torch.Tensor) -> torch.Tensor:
    room = torch.full((x.shape[0], 2 * x.shape[1] + 1), torch.nan, device=x.device)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def offset(x: torch.Tensor) -> torch.Tensor:
    room = torch.full((x.numel() + 1,), torch.nan, device=x.device)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


@pytest.mark.parametrize("moved", [turned, gapped, offset])
def test_tensors_may_lie_anyhow(kernels: None, moved: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    x, g = torch.randn(2, 33, 65, device=device)
    plain, other = x.clone().requires_grad_(), moved(x).requires_grad_()
    first, second = AdamW([plain]), AdamW([other])
    for _ in range(2):
        plain.grad, other.grad = g.clone(), moved(g)
        first.step()
        second.step()
    other.grad = g.clone()  # laid out otherwise than its parameter
    second.step()
    first.step()
    assert torch.equal(plain, other)
    if moved is gapped:
        assert torch.isnan(other._base[:, 65:]).all(), "what lies between is not ours"


def test_rounding_by_chance_is_right_on_average(kernels: None, device: str) -> None:
    """An update of an eighth of a bf16 digit is taken every eighth time; by rounding to nearest, never."""
    n = 1 << 14
    digit = 2.0**-7  # of bf16 at one
    options = {"lr": digit / 8, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    moved = {}
    for stochastic in (True, False):
        p = torch.ones(n, device=device, dtype=torch.bfloat16).requires_grad_()
        optimizer = AdamW([p], stochastic_rounding=stochastic, state_dtype=torch.float32, maximize=True, **options)
        p.grad = torch.ones_like(p)
        optimizer.step()
        moved[stochastic] = p.detach().float() - 1
    assert torch.equal(moved[False], torch.zeros(n, device=device))
    assert set(moved[True].unique().tolist()) == {0.0, digit}
    ups = (moved[True] > 0).double()
    assert is_share(ups, 1 / 8)
    assert is_share(ups.view(-1, 2).prod(1), 1 / 64), "neighbours differ"


def is_share(hits: torch.Tensor, share: float) -> bool:
    """Whether so many are ones as of throws with this chance, within four standard deviations: a false alarm in 16,000
    choices of the seed."""
    return bool(abs(float(hits.double().mean()) - share) < 4 * math.sqrt(share * (1 - share) / len(hits)))


def test_chance_differs_by_step_tensor_and_seed(kernels: None, device: str) -> None:
    def places(seed: int, steps: int) -> list[torch.Tensor]:
        params = [torch.ones(4096, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
        options = {"lr": 2.0**-8, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "maximize": True}
        optimizer = AdamW(params, stochastic_rounding=True, state_dtype=torch.float32, seed=seed, **options)
        for _ in range(steps):
            for p in params:
                p.data.fill_(1.0)
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [p.detach() > 1 for p in params]

    first = places(0, 1)
    assert all(map(torch.equal, first, places(0, 1))), "the same seed gives the same bits"
    for other in (first[1], places(0, 2)[0], places(1, 1)[0]):
        assert is_share(first[0] == other, 1 / 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"lr": -1.0}, "lr"), ({"betas": (1.0, 0.9)}, "betas"), ({"eps": -1e-8}, "eps"), ({"max_norm": -1.0}, "max_norm")],
)
def test_bad_settings_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        AdamW([torch.zeros(2, requires_grad=True)], **options)


def test_what_it_cannot_do_is_refused() -> None:
    p = torch.zeros(3, 2, requires_grad=True)
    p.grad = torch.zeros(3, 2).to_sparse()
    with pytest.raises(BadInput, match="sparse"):
        AdamW([p]).step()
    theirs = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(BadInput, match="amsgrad"):
        AdamW([p]).load_state_dict(theirs.state_dict())


@pytest.mark.gpu
def test_a_graph_holds_the_whole_step() -> None:
    """With gradients that the captured backward pass makes: their addresses are new to the table."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(64, 129), torch.nn.Linear(129, 3)).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [AdamW(model.parameters(), max_norm=0.1) for model in models]
    x = torch.randn(16, 64, device="cuda")

    def step(i: int) -> None:
        optimizers[i].zero_grad(set_to_none=True)
        models[i](x).square().mean().backward()
        optimizers[i].step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        models[0](x).square().mean().backward()
        optimizers[0].step()
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        step(1)
    torch.cuda.synchronize()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert float(next(iter(optimizers[0].state.values()))["step"]) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [("float32", None), ("bfloat16", "float32"), ("bfloat16", None), ("float16", None)])
def test_every_data_type(kinds: tuple[str, str | None]) -> None:
    dtype = getattr(torch, kinds[0])
    start = params_like("cuda", dtype)
    ours, theirs, truth = copies(start, dtype), copies(start, dtype), copies(start, torch.float64)
    eps = {"eps": 1e-4}  # fp16 has no 1e-8
    train(AdamW(ours, state_dtype=getattr(torch, kinds[1]) if kinds[1] else None, **eps), ours, steps=1)
    train(torch.optim.AdamW(theirs, **eps), theirs, steps=1)
    train(torch.optim.AdamW(truth, **eps), truth, steps=1)
    error = errors(ours, theirs, truth)
    assert error.ok, error


def test_a_group_without_gradients_waits_for_them(device: str, kernels: None) -> None:
    params = params_like(device)
    optimizer = AdamW(groups_of(params))
    before = [p.detach().clone() for p in params]
    for p in params[2:]:
        p.grad = torch.ones_like(p)
    optimizer.step()  # the first group has none at its very first step
    assert all(torch.equal(p, old) for p, old in zip(params[:2], before[:2], strict=True))
    assert not any(torch.equal(p, old) for p, old in zip(params[2:], before[2:], strict=True))


def test_copies_give_gradients_and_are_written(kernels: None, device: str) -> None:
    """As if the parameter had had the gradient, widened; what has one of its own keeps to it."""
    start = params_like(device)
    ours, theirs = copies(start, torch.float32), copies(start, torch.float32)
    narrow = {p: p.detach().half().requires_grad_() for p in ours[:-1]}
    optimizer, plain = AdamW(ours, max_norm=0.05, copies=narrow), AdamW(theirs, max_norm=0.05)
    for step in range(3):
        for i, (p, other) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(p.device).half()
            other.grad = grad.float()
            if p in narrow and not (step == 1 and i == 0):
                narrow[p].grad = grad
            else:
                p.grad = grad.float()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in ours) and all(copy.grad is None for copy in narrow.values())
    assert all(torch.equal(p, other) for p, other in zip(ours, theirs, strict=True))
    assert all(torch.equal(copy, p.half()) for p, copy in narrow.items())
