"""Draws follow the distribution, repeat with their seed, and are cut as asked."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.launch import watching
from sublight.errors import BadInput
from sublight.ops.softmax import sample as op

CANDIDATES = (2.0, 1.0, 0.5, 0.0, -1.0, -3.0)
FALSE_ALARM = 1e-6  # of a distribution test: so rarely does a right sampler fail one, were its seed drawn anew


def candidates(rows: int, device: str) -> tuple[Any, Any]:
    values = torch.tensor(CANDIDATES, device=device).expand(rows, -1).contiguous()
    return values, torch.arange(values.shape[1], device=device).expand(rows, -1).contiguous()


def seed_of(value: int, device: str) -> Any:
    return torch.tensor(value, device=device)


def draw(values: Any, index: Any, seed: Any, temperature: float, top_p: float) -> Any:
    """The second launch of `sample` alone: the first takes the interpreter a program a row."""
    tokens = torch.empty(len(values), dtype=torch.int64, device=values.device)
    op.draw_step(*values.shape)(values, index, seed, tokens, free=(1 / temperature, top_p))
    return tokens


def expected(temperature: float, top_p: float) -> Any:
    p = torch.softmax(torch.tensor(CANDIDATES).double() / temperature, 0)
    kept = p.cumsum(0) - p < top_p
    return torch.where(kept, p, 0.0) / p[kept].sum()


def chance(drawn: Any, p: Any) -> float:
    """The probability that draws of that distribution are at least as far from it (chi-square)."""
    seen, wanted = torch.bincount(drawn.cpu(), minlength=len(p)).double(), p * drawn.numel()
    assert not seen[p == 0].any()
    distance = ((seen - wanted).square() / wanted)[p > 0].sum()
    free = torch.tensor(int((p > 0).sum()) - 1.0).double()
    return float(torch.special.gammaincc(free / 2, distance / 2))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (3.0, 1.0), (1.0, 0.8), (2.0, 0.5)])
@pytest.mark.parametrize("kernel", [True, False])
def test_draws_follow_the_distribution(temperature: float, top_p: float, kernel: bool, device: str) -> None:
    values, index = candidates(20_000, device)
    seed = seed_of(11, device)
    if kernel:
        drawn = draw(values, index, seed, temperature, top_p)
    else:
        drawn = op.reference(values, seed, temperature, 64, top_p)
    assert chance(drawn, expected(temperature, top_p)) > FALSE_ALARM


def test_the_checker_finds_a_wrong_distribution(device: str) -> None:
    values, index = candidates(20_000, device)
    drawn = draw(values, index, seed_of(11, device), 1.1, 1.0)
    assert chance(drawn, expected(1.0, 1.0)) < FALSE_ALARM


def test_the_kernel_draws_what_pytorch_draws(device: str) -> None:
    values, index = candidates(3000, device)
    for number in (0, 1, -5, 2**40 + 3, -(2**63)):
        seed = seed_of(number, device)
        assert torch.equal(draw(values, index, seed, 1.0, 0.9), op.reference(values, seed, 1.0, 64, 0.9))


def test_one_plan_serves_every_temperature(device: str) -> None:
    """Temperature and top_p reach the kernel as numbers of the call, not of the plan."""
    logits, seed = op.inputs({"rows": 3, "vocab": 300}, "float32", device, 0)
    with watching() as steps:
        for temperature, top_p in ((1.0, 1.0), (0.7, 1.0), (30.0, 0.5), (0.7, 0.9)):
            drawn = op.sample(logits, seed, temperature, 8, top_p)
            assert torch.equal(drawn, op.reference(logits, seed, temperature, 8, top_p))
    assert op.plan(logits, seed, 0.7, 8).kernel == ", ".join(step.name for step in steps[:3])
    assert len({id(step) for step in steps}) == 3
    with watching() as steps:
        op.sample(logits, seed, 0.0)
    assert op.plan(logits, seed, 0.0).kernel == ", ".join(step.name for step in steps) and len(steps) == 2


def test_any_layout_gives_the_same_tokens(device: str) -> None:
    logits, seed = op.inputs({"rows": 4, "vocab": 300}, "float32", device, 0)
    whole = op.sample(logits, seed)
    gapped = torch.cat([logits, torch.full_like(logits, math.nan)], -1)[:, :300]
    assert op.plan(gapped, seed).copies == () and torch.equal(op.sample(gapped, seed), whole)
    turned = logits.T.contiguous().T
    assert op.plan(turned, seed).copies == ("logits",) and torch.equal(op.sample(turned, seed), whole)
    assert torch.equal(op.sample(logits.view(2, 2, 300), seed), whole.view(2, 2))
    assert torch.equal(op.sample(logits[0], seed), whole[0])


def test_a_seed_repeats_and_another_differs(device: str) -> None:
    values, index = candidates(1000, device)
    one, again, other = (draw(values, index, seed_of(seed, device), 1.0, 1.0) for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1e-3}, {"top_p": 1e-6}, {"top_k": 1}], ids=lambda o: next(iter(o))
)
def test_the_most_likely_token(options: dict[str, Any], device: str) -> None:
    logits, seed = op.inputs({"rows": 2, "vocab": 300}, "float32", device, 0)
    for run in (op.sample, op.launch, op.reference):
        assert torch.equal(run(logits, seed, **options), logits.argmax(-1))


def test_only_the_k_most_likely_are_drawn(device: str) -> None:
    logits = torch.arange(40.0, device=device).mul_(1e-3).expand(60, 40)
    drawn = op.sample(logits, 3, top_k=5)  # that one of five is missing: 5 * 0.8**60, one in 100,000
    assert set(drawn.tolist()) == {35, 36, 37, 38, 39}


def test_a_masked_token_is_never_drawn(device: str) -> None:
    values, index = candidates(2000, device)
    values[:, 2:] = -math.inf
    drawn = draw(values, index, seed_of(2, device), 5.0, 1.0)
    assert set(drawn.tolist()) == {0, 1}


def test_a_row_of_nan_gives_a_token_all_the_same(device: str) -> None:
    values, index = candidates(4, device)
    values[1] = math.nan
    clean = draw(*candidates(4, device), seed_of(2, device), 1.0, 1.0)
    drawn = draw(values, index, seed_of(2, device), 1.0, 1.0)
    assert drawn[1] == 0
    assert torch.equal(drawn[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 65}, "top_k is 65"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": torch.tensor(1.0)}, "seed is torch.float32"),
        ({"seed": torch.tensor([1, 2])}, "seed is torch.int64"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        op.sample(torch.randn(2, 100), **({"seed": 1} | options))


@pytest.mark.gpu
def test_a_graph_draws_anew_when_its_seed_changes() -> None:
    logits, seed = op.inputs({"rows": 64, "vocab": 32000}, "bfloat16", "cuda", 0)
    eager = [op.sample(logits, number, top_k=50, top_p=0.9) for number in (1, 2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = op.sample(logits, seed, top_k=50, top_p=0.9)
    for number, tokens in zip((1, 2), eager, strict=True):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(drawn, tokens)
