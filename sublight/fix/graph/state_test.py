"""Training steps, what lies outside a call, and what cannot be captured; on the CPU's stand-in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sublight.fix.graph.callable import graph
from sublight.fix.graph.fake import Fake
from sublight.fix.graph.trials import refused
from sublight.ops.adamw.optimizer import AdamW


def make_step(model: torch.nn.Module, optimizer: Any, *, none: bool, at_end: bool) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        if not at_end:
            optimizer.zero_grad(set_to_none=none)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if at_end:
            optimizer.zero_grad(set_to_none=none)
        return loss

    return step


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_training_step(kind: str, none: bool, at_end: bool) -> None:
    """Two shapes in turn, with dropout and momentum: losses, parameters, gradients and what the optimizer tells."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    pair = [model, copy.deepcopy(model)]
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: AdamW(p, lr=0.1, stochastic_rounding=False),
    }[kind]
    optimizers = [make(m.parameters()) for m in pair]
    steps = [make_step(m, o, none=none, at_end=at_end) for m, o in zip(pair, optimizers, strict=True)]
    fake = Fake()
    g = graph(steps[0], backend=fake)
    for i in range(16):
        x = torch.randn(5 if i % 3 else 2, 4)
        torch.manual_seed(i)
        got = g(x)
        torch.manual_seed(i)
        want = steps[1](x)
        assert torch.equal(got, want)
        for p, q in zip(*(m.parameters() for m in pair), strict=True):
            assert torch.equal(p, q)
            assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
    assert fake.captures == 2 and fake.replays >= 6


def test_gradients_zeroed_outside_are_looked_at() -> None:
    w = torch.nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> None:
        (w * x).sum().backward()

    g = graph(step, backend=Fake())
    for i in range(12):
        x = torch.full((3,), float(i))
        w.grad = None
        g(x)
        assert torch.equal(w.grad, x)
    g(x)  # not zeroed: adds
    assert torch.equal(w.grad, 2 * x)


def test_a_learning_rate_that_changes_is_refused_as_a_number() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([w], lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (x * w).sum().backward()
        optimizer.step()

    g = graph(step, backend=Fake())
    with pytest.warns(UserWarning, match=r"optimizer.param_groups\[0\]\['lr'\] is another in each call.*on the GPU"):
        for _ in range(30):
            g(torch.ones(2))
            if g.report().graphs:
                optimizer.param_groups[0]["lr"] *= 0.9


def test_a_number_that_is_another_in_each_call_is_named() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (x * w).sum().backward()
        optimizer.step()

    g = graph(step, backend=Fake())
    with pytest.warns(UserWarning, match=r"optimizer.param_groups\[0\]\['lr'\] is another"):
        for _ in range(10):
            g(torch.ones(2))
            optimizer.param_groups[0]["lr"] *= 0.9


def test_a_learning_rate_that_changes_works_as_a_tensor() -> None:
    w, v, lr = torch.nn.Parameter(torch.ones(2)), torch.ones(2), torch.tensor(0.1)

    def step(x: torch.Tensor) -> None:
        w.grad = None
        (x * w).sum().backward()
        with torch.no_grad():
            w.sub_(lr * w.grad)

    fake = Fake()
    g = graph(step, backend=fake)
    for _ in range(9):
        x = torch.randn(2)
        g(x)
        v -= lr * x
        assert torch.equal(w, v)
        lr.mul_(0.9)
    assert fake.captures == 1


@pytest.mark.parametrize("how", ["data", "to", "assign", "submodule", "training"])
def test_a_module_that_changed_is_captured_again(how: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.0)).eval().requires_grad_(False)
    fake = Fake()
    g, x = graph(model, backend=fake), torch.randn(2, 3)
    for _ in range(5):
        g(x)
    if how == "data":
        model[0].weight.data = torch.randn(3, 3)
    elif how == "to":
        model.double().float()
    elif how == "assign":
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
    elif how == "submodule":
        model[0] = torch.nn.Linear(3, 3).requires_grad_(False)
    else:
        model.train()
    for _ in range(4):
        x = torch.randn(2, 3)
        assert torch.equal(g(x), model(x))
    assert fake.captures == 2
    assert len(g.report().graphs) == (2 if how == "training" else 1)
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})  # in place
    assert torch.equal(g(x), model(x)) and fake.captures == 2


COUNT = {"n": 0}
LEFT: list[Any] = []


def items(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def masked(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def counts(x: torch.Tensor) -> torch.Tensor:
    COUNT["n"] += 1
    return x * COUNT["n"]


def leaves(x: torch.Tensor) -> torch.Tensor:
    LEFT.append(x * 2)
    return x + 1


def needs_gradients(x: torch.Tensor, w: Any = torch.nn.Parameter(torch.ones(3))) -> torch.Tensor:  # noqa: B008
    return x * w


WRONG = [
    (items, "read back to the host", True),
    (masked, "hangs on values", True),
    (branches, "read back to the host", True),
    (counts, "counted on", False),
    (leaves, "beside its result", True),
    (needs_gradients, "needs gradients", False),
]


@pytest.mark.parametrize(("fn", "reason", "has_line"), WRONG, ids=[fn.__name__ for fn, _, _ in WRONG])
def test_what_cannot_be_captured_says_why_and_where(fn: Any, reason: str, has_line: bool) -> None:
    said = refused(graph(fn, backend=Fake()), torch.randn(3) + 0.1)
    assert reason in said
    assert (f"state_test.py:{fn.__code__.co_firstlineno + 1}" in said) == has_line


def test_a_refused_function_still_works_and_warns_once() -> None:
    g = graph(items, backend=Fake())
    with pytest.warns(UserWarning) as said:
        for n in (2, 3, 2, 3, 3):
            x = torch.randn(n)
            assert torch.equal(g(x), x * x.sum().item())
    assert len(said) == 1


def test_work_that_differs_from_call_to_call_is_refused() -> None:
    numbers = iter(range(100))
    assert "other numbers from call to call" in refused(
        graph(lambda x: x * next(numbers), backend=Fake()), torch.ones(2)
    )


def test_an_exception_is_the_callers_and_leaves_nothing_behind() -> None:
    fails = [False]
    w = torch.nn.Parameter(torch.ones(2))

    def fn(x: torch.Tensor, fails: list[bool]) -> torch.Tensor:
        w.grad = None
        (w * x).sum().backward()
        if fails[0]:
            raise KeyError("mine")
        return x * 2

    g = graph(lambda x: fn(x, fails), backend=Fake())
    x = torch.randn(2)
    fails[0] = True
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            g(x)
    assert "raised KeyError" in g.report().eager[0].reason
    fails[0] = False
    for _ in range(6):
        assert torch.equal(g(x), x * 2) and torch.equal(w.grad, x)
    assert len(g.report().graphs) == 1


def test_a_failed_capture_runs_eagerly_with_gradients_as_they_were() -> None:
    fake = Fake()
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = torch.zeros(2)

    def last(x: torch.Tensor) -> torch.Tensor:
        assert w.grad is not None
        before, w.grad = w.grad, None
        (w * x).sum().backward()
        if fake.is_capturing():
            raise RuntimeError("only while capturing")
        return before * 1

    g = graph(last, backend=fake)
    for i in range(3):
        assert torch.equal(g(torch.full((2,), i + 1.0)), torch.full((2,), float(i)))
    with pytest.warns(UserWarning, match="capture failed: RuntimeError: only while capturing .*state_test.py"):
        assert torch.equal(g(torch.full((2,), 4.0)), torch.full((2,), 3.0))
    assert torch.equal(g(torch.full((2,), 5.0)), torch.full((2,), 4.0))


@pytest.mark.parametrize(("family", "reason"), [("Llama", ""), ("Mistral", "cumulative_length_int is counted on")])
def test_decode_with_a_static_cache(family: str, reason: str) -> None:
    """Llama's cache counts on the device; one with a sliding window counts in Python too, which no graph can."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"sliding_window": 8} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    try:
        caches = [transformers.StaticCache(config=config, max_cache_len=32) for _ in range(2)]
    except TypeError:
        pytest.skip("an earlier StaticCache")

    def decode(step: Any, cache: Any) -> torch.Tensor:
        logits = []
        with torch.inference_mode():
            out = model(torch.arange(5)[None], past_key_values=cache, use_cache=True)
            for _ in range(7):
                out = step(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
                assert out.past_key_values is cache
                logits.append(out.logits)
        return torch.cat(logits, 1)

    g = graph(model, backend=Fake())
    with pytest.warns(UserWarning, match=reason) if reason else warnings.catch_warnings():
        assert torch.equal(decode(g, caches[0]), decode(model, caches[1]))
    assert len(g.report().graphs) == (0 if reason else 1)


def test_a_parameter_that_is_frozen_after_the_capture_is_not_trained() -> None:
    def losses(as_graph: bool) -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call: Any = graph(step, backend=Fake()) if as_graph else step
        found = []
        for at in range(10):
            if at == 6:
                net.weight.requires_grad_(False)
            found.append(float(call(torch.ones(2, 4))))
        return found

    assert losses(as_graph=True) == pytest.approx(losses(as_graph=False))


def test_a_result_that_is_kept_as_well_is_refused() -> None:
    """The tensor that a capture makes is the graph's own: the next call would read it there."""
    total = [torch.zeros(3)]

    def add(x: torch.Tensor) -> torch.Tensor:
        total[0] = total[0] + x
        return total[0]

    assert "total[0] is bound to a new tensor in each call" in refused(graph(add, backend=Fake()), torch.ones(3))
    assert torch.equal(total[0], torch.full((3,), 12.0))


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_arguments_that_come_to_share_memory(is_elsewhere: bool) -> None:
    """What is written through one is read through the other."""
    g = graph(_add, backend=Fake())
    pair = [[torch.arange(4.0), torch.arange(4.0) + 5] for _ in range(2)]
    for call in range(14):
        ours, theirs = ([x, x] for x, _ in pair) if call > 5 else pair
        assert torch.equal(g(*ours), _add(*theirs)), call
        if is_elsewhere and call == 5:
            pair = [[torch.ones(4), torch.ones(4)] for _ in range(2)]


def test_an_argument_that_comes_to_lie_in_what_is_written() -> None:
    states = [torch.arange(4.0) for _ in range(2)]

    def make(state: torch.Tensor) -> Callable[..., torch.Tensor]:
        def count(x: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return x * 2

        return count

    calls = [graph(make(states[0]), backend=Fake()), make(states[1])]
    for number in range(12):
        one, other = (
            call(torch.ones(2) if number < 8 else state[:2]) for call, state in zip(calls, states, strict=True)
        )
        assert torch.equal(one, other), number


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class OfClass:
    factor = 1.0


@pytest.mark.parametrize("kind", [Slotted, OfClass])
@pytest.mark.parametrize("is_argument", [True, False])
def test_a_number_in_a_slot_or_of_a_class(kind: type, is_argument: bool) -> None:
    holder: Any = kind()

    def scale(x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return x * (given if is_argument else holder).factor  # type: ignore[no-any-return]

    g, more = graph(scale, backend=Fake()), (holder,) * is_argument
    for number in range(12):
        holder.factor = 1.0 if number < 8 else 2.0
        assert torch.equal(g(torch.ones(2), *more), torch.ones(2) * holder.factor), number
    assert g.report().captures
