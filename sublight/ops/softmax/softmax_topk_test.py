"""Every place of the k largest, ties and strange values, and both ways of ending a row."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.device import Facts
from sublight.backend.launch import watching
from sublight.errors import BadInput
from sublight.op import Plan
from sublight.ops.record.run import runner
from sublight.ops.softmax import softmax_topk as topk


def stable(x: Any, k: int) -> Any:
    """The right order: by logit, of equal ones the first before the others."""
    return torch.sort(x.double(), dim=-1, descending=True, stable=True).indices[..., :k]


def error_of(x: Any, k: int) -> correct.Error:
    """Of the probabilities, as PyTorch has them at the right places; wrong places count as misplaced."""
    index = stable(x, k)
    return correct.worst(
        correct.forward_errors(
            lambda x: topk.launch(x, k), lambda x: (torch.softmax(x, -1).gather(-1, index), index), (x,)
        )
    )


def pooled(errors: list[correct.Error]) -> correct.Error:
    return functools.reduce(correct.Error.merge, errors)


def ties(rows: int, cols: int, device: str) -> Any:
    """Six values: everything is a tie. Both zeros are one."""
    x = torch.randint(-3, 3, (rows, cols), device=device).half()
    x[:, ::3] *= -0.0
    return x


@pytest.mark.parametrize(("cols", "k"), [(1, 1), (8, 8), (65, 3), (300, 33), (2049, 8), (70_000, 2)])
def test_of_equal_logits_the_first_comes_first(cols: int, k: int, device: str) -> None:
    rows = 1 if cols > 3000 else 3
    error = pooled([error_of(ties(rows, cols, device), k) for _ in range(3)])
    assert error.ok, error


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_gradient_is_as_right_as_pytorchs(dtype: str, device: str) -> None:
    errors = []
    for seed in range(3):
        (x,) = topk.inputs({"rows": 4, "cols": 300}, dtype, device, seed)
        grads = correct.random_grads(topk.reference, (x,), seed=seed)
        errors += correct.backward_errors(
            lambda dvalues, x: correct.gradients(topk.softmax_topk, (x,), (dvalues,)), topk.reference, (x,), grads
        )
    assert pooled(errors).ok, pooled(errors)


def test_of_equal_logits_the_first_have_the_gradient(device: str) -> None:
    x = torch.zeros(1, 40, device=device).requires_grad_()
    values, index = topk.softmax_topk(x, 3)
    assert index.tolist() == [[0, 1, 2]] and values.requires_grad and not index.requires_grad
    values.sum().backward()
    assert (x.grad[0, :3] > 0).all() and (x.grad[0, 3:] < 0).all()


@pytest.mark.parametrize("probability", [True, False])
def test_the_plan_names_what_is_launched(probability: bool, device: str) -> None:
    (x,) = topk.inputs({"rows": 2, "cols": 1000}, "float16", device, 0)
    turned = x.T.contiguous().T
    assert topk.plan(turned, 4).copies == ("x",) and topk.plan(x, 4).copies == ()
    with watching() as steps:
        whole = topk.softmax_topk(x, 4) if probability else largest_logits(x, 4)
    assert topk.plan(x, 4).kernel == ", ".join(step.name for step in steps) == "_groups_kernel, _finish_kernel"
    others = topk.softmax_topk(turned, 4) if probability else largest_logits(turned.contiguous(), 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("order", ["rising", "falling", "constant"])
def test_there_is_no_bad_order(order: str, dtype: Any, device: str) -> None:
    x = torch.linspace(-8, 8, 5000, device=device).to(dtype)[None]
    x = {"rising": x, "falling": x.flip(-1), "constant": torch.ones_like(x)}[order]
    assert torch.equal(topk.launch(x, 8)[1], stable(x, 8))


def test_masked_logits_come_last_and_in_order(device: str) -> None:
    x = torch.full((1, 1000), -math.inf, device=device)
    x[0, 500], x[0, 7] = 2.0, 1.0
    values, index = topk.launch(x, 5)
    assert index.tolist() == [[500, 7, 0, 1, 2]]
    assert values[0, 2:].tolist() == [0, 0, 0]
    assert error_of(x, 5).ok, error_of(x, 5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_probabilities_has_none_and_valid_places(value: float, device: str) -> None:
    x = torch.randn(1, 3000, device=device)
    x[0, 1234] = value
    values, index = topk.launch(x, 8)
    assert torch.isnan(values).all()
    assert set(index[0].tolist()) <= set(range(3000))
    assert len(set(index[0].tolist())) == 8


def largest_logits(x: Any, k: int) -> Any:
    """As `sample` takes them: no probabilities."""
    steps, buffers = topk.find_largest(x, "x", k, probability=False, values="values", index="index")
    plan = Plan(provider="sublight", reason="", buffers=buffers, steps=steps, outputs=("values", "index"))
    return runner(plan, ("x",))(x)


def test_the_logits_themselves(device: str) -> None:
    x = topk.inputs({"rows": 2, "cols": 1000}, "float16", device, 0)[0]
    values, index = largest_logits(x, 4)
    assert torch.equal(values, x.gather(-1, index))
    assert torch.equal(index, stable(x, 4))


def test_inputs_have_one_answer(device: str) -> None:
    for cols in (8, 127, 128, 5000):
        for dtype in ("float32", "float16", "bfloat16"):
            (x,) = topk.inputs({"rows": 3, "cols": cols}, dtype, device, 0)
            best = x.topk(min(cols, 2 * topk.MAX_K)).values
            assert (best[:, 1:] < best[:, :-1]).all()


@pytest.mark.parametrize(("shape", "k"), [((3, 100), 0), ((3, 100), 65), ((3, 7), 8), ((), 1)])
def test_a_wrong_k_is_refused(shape: tuple[int, ...], k: int) -> None:
    with pytest.raises(BadInput, match=f"k is {k}"):
        topk.softmax_topk(torch.randn(shape), k)


def test_few_rows_are_shared_out() -> None:
    gpu = Facts()
    assert topk.tile_of(1024, 131072, 2, gpu).block == 8192
    assert topk.tile_of(1, 131072, 2, gpu).block == 1024
    assert topk.tile_of(10_000, 100, 2, gpu).block < 1024


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 8, 50, 64])
def test_many_rows_at_once(k: int) -> None:
    x = torch.randn(700, 128_256, device="cuda").bfloat16()  # full of ties
    for _ in range(3):
        assert error_of(x, k).ok, error_of(x, k)
