"""AdamW's kernels and their plan: what is launched, what a plan depends on, the factors that a step is made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.errors import BadInput
from sublight.ops.adamw import adamw, optimizer, tables, update
from sublight.ops.adamw.optimizer import AdamW
from sublight.ops.adamw.optimizer_test import copies, gapped, offset, params_like, train, turned


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer takes our kernels on a CPU too."""
    monkeypatch.setattr(optimizer, "why_torch", lambda tensors: "")


def test_shapes_that_differ_are_refused(device: str) -> None:
    x = torch.zeros(8, device=device)
    step = torch.ones((), device=device)
    with pytest.raises(BadInput, match="shape"):
        adamw.launch(x, x[:4], x.clone(), x.clone(), step)
    with pytest.raises(BadInput, match="tensors"):
        adamw.launch(x, x, x, step)


def test_bias_correction_keeps_its_digits(device: str) -> None:
    """As many as PyTorch's expm1 keeps, for the steps of a long training and forty betas."""
    steps = [float(round(10 ** (i / 10))) for i in range(61)]
    fives = [(*torch.zeros(4, 1, device=device).unbind(), torch.tensor(step, device=device)) for step in steps]
    (batch,) = tables.batches_of(fives)
    nothing = torch.zeros((), device=device)
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    pairs = [(0.5 + 0.49 * i / 40, 0.9 + 0.0999 * i / 40) for i in range(40)]
    for betas in pairs:
        settings = update.Settings(lr=1.0, beta1=betas[0], beta2=betas[1], weight_decay=0.25)
        plan = update.plan_tasks((update.task_of(batch.group, settings),), clips=False, increments=False)
        factors = torch.full((len(steps), update.FACTORS), math.nan, device=device)
        numbers = {f"0.{name}": number for name, number in update.numbers_of(settings).items()}
        tick = plan.steps[0]
        tick(batch.where[-1], factors, nothing, nothing, nothing, free=tuple(numbers[name] for name in tick.free))
        assert (factors[:, 2] == 0.75).all() and (factors[:, 3] == 1).all()
        for column in found:
            found[column].append(factors[:, column].cpu())
    for column, ours in found.items():
        theirs, truth = (
            torch.cat([correction(steps, betas[column], column, dtype) for betas in pairs])
            for dtype in (torch.float32, torch.float64)
        )
        error = correct.error("factors", torch.cat(ours), theirs, truth)
        assert error.ok, error


@pytest.mark.parametrize("beta", [0.0, 1e-30])
def test_a_beta_of_nothing_corrects_nothing(beta: float, device: str) -> None:
    p = torch.zeros(5, device=device, requires_grad=True)
    p.grad = torch.full_like(p, 3.0)
    AdamW([p], lr=0.5, betas=(beta, beta), eps=0.0, weight_decay=0.0).step()
    assert (p == -0.5).all()  # a step of the gradient's sign


def correction(steps: list[float], beta: float, column: int, dtype: torch.dtype) -> torch.Tensor:
    bias = -torch.expm1(torch.tensor(steps, dtype=dtype) * math.log(beta))
    return bias.rsqrt() if column else bias.reciprocal()


def test_steps_are_kept_while_settings_change(device: str) -> None:
    """A learning rate, a decay or a beta of every step's own: no plan and no compiled kernel depends on them."""
    params = params_like(device)
    adam = AdamW(params)
    with watching() as steps:
        for step in range(3):
            for group in adam.param_groups:
                group |= {"lr": 1e-3 * step, "weight_decay": 0.1 * step, "betas": (0.5 / (step + 1), 0.9), "eps": 1.0}
            train(adam, params, steps=1, done=step)
    assert len(steps) == 3 * len(set(steps)) > 0


def test_a_plan_is_of_one_kind(device: str) -> None:
    """fp32 and fp16 parameters, and one that begins at no boundary: a launch each."""
    fp32, fp16 = params_like(device), params_like(device, torch.float16)
    odd = torch.zeros(65, device=device)[1:].requires_grad_()
    params = [*fp32, *fp16, odd]
    with watching() as steps:
        train(AdamW(params, state_dtype=torch.float32), params, steps=1)
    updates = [step for step in steps if step.name == "_update_kernel"]
    assert [step.constants["ALIGNED"] for step in updates] == [True, True, False]
    assert len({step.constants["CHUNK"] for step in updates}) == 1  # the averages are fp32


def adrift(x: torch.Tensor) -> torch.Tensor:
    """Neither in one piece nor at a boundary."""
    return gapped(torch.cat([x[:, :1], x], 1))[:, 1:]


@pytest.mark.parametrize(("moved", "kinds"), [(turned, 1), (gapped, 1), (offset, 2), (adrift, 1)])
def test_why_names_what_is_launched(moved: Callable[[torch.Tensor], torch.Tensor], kinds: int, device: str) -> None:
    """What is copied first lies at a boundary; what is not, and does not, has a launch of its own."""
    for op in (adamw.ADAMW, adamw.ADAMW_CLIPPED):
        inputs = op.inputs({"tensors": 3, "numel": 3000}, "float32", device, 0)
        expected = op.launch(*(x.clone() for x in inputs))
        inputs = tuple(moved(x) if i == 1 else x for i, x in enumerate(inputs))
        plan = op.plan(*inputs)
        with watching() as steps:
            result = op.call(*inputs)
        assert plan.provider == "sublight" and steps == list(plan.steps)
        assert [step.name for step in steps].count("_update_kernel") == kinds
        assert all(map(torch.equal, result, expected))
        assert op.plan(*(x.double() for x in inputs)).provider == "torch"


def test_the_function_does_what_the_optimizer_does(device: str) -> None:
    start = params_like(device)
    ours, same = copies(start, torch.float32), [p.detach().clone() for p in start]
    train(AdamW(ours, max_norm=0.05), ours, steps=1)
    zeros = [[torch.zeros_like(p) for p in same] for _ in range(2)]
    adamw.adamw_clipped(
        *same, *(p.grad for p in ours), *zeros[0], *zeros[1], torch.ones((), device=device), max_norm=0.05
    )
    assert all(torch.equal(p, q) for p, q in zip(ours, same, strict=True))


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
def test_past_two_to_the_thirty_one_elements() -> None:
    n = 2**31 + 517
    p, g, m, v = (torch.full((n,), value, device="cuda", dtype=torch.bfloat16) for value in (1.0, 0.5, 0.25, 0.125))
    few = [x[-2000:].clone() for x in (p, g, m, v)]
    step = torch.full((), 3.0, device="cuda")
    adamw.launch(p, g, m, v, step)
    adamw.launch(*few, step)
    for large, small in zip((p, m, v), (few[0], few[2], few[3]), strict=True):
        assert torch.equal(large[-2000:], small)
        assert torch.equal(large[:2000], small)
