"""The gradient that a forward pass of cross_entropy has finished: handed over once, scaled, differentiated again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.cross_entropy import finished
from sublight.ops.cross_entropy.cross_entropy import CROSS_ENTROPY, cross_entropy, reference
from sublight.ops.cross_entropy.cross_entropy_test import EACH_OPTION, OPTIONS, gradient, scale
from sublight.ops.cross_entropy.options import Options


def test_a_gradient_of_one_costs_no_pass_and_another_scales(device: str) -> None:
    d = torch.randn(7, 5000, device=device)
    for dloss in (1.0, 0.5, 0.0):
        result = d.clone()
        scale(result, torch.tensor(dloss, device=device), torch.empty(0, device=device), late=False)
        assert torch.equal(result, d * dloss)
    each = torch.tensor([1.0, 2.0, 0.0, 1.0, -1.0, 3.0, 0.5], device=device)
    result = d.clone()
    scale(result, each, torch.empty(0, device=device), late=False)
    assert torch.equal(result, d * each[:, None])


def library(x: Any, labels: Any, with_gradient: bool = True, **options: Any) -> Any:
    return torch.ops.sublight.cross_entropy(x, labels, *Options(**options), with_gradient)[0]


@EACH_OPTION
@pytest.mark.parametrize("call", ["cross_entropy", "library"])
def test_gradients_through_autograd_are_as_right_as_pytorchs(options: dict[str, Any], call: str, device: str) -> None:
    ours = {"cross_entropy": cross_entropy, "library": library}[call]
    errors = []
    for seed in range(3):
        x, labels = CROSS_ENTROPY.inputs({"rows": 40, "cols": 130}, "float32", device, seed)
        labels = labels.where(labels >= 0, options.get("ignore_index", -100))
        truth = partial(reference, labels=labels, **options)
        grads = correct.random_grads(truth, (x,), seed=seed)
        errors.append(
            correct.backward_errors(
                lambda dloss, x, labels=labels: correct.gradients(partial(ours, labels=labels, **options), (x,), dloss),
                truth, (x,), grads,
            )
        )  # fmt: skip
    assert correct.pooled(errors).ok, correct.pooled(errors)


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=["plain", "all"])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_second_backward_pass_is_as_right_as_the_first(
    with_gradient: bool, options: dict[str, Any], device: str
) -> None:
    x, labels = CROSS_ENTROPY.inputs({"rows": 6, "cols": 40}, "float32", device, 0)
    labels = labels.where(labels >= 0, options.get("ignore_index", -100))
    x.requires_grad_()
    with watching() as steps:
        y = cross_entropy(x, labels, **options) if with_gradient else library(x, labels, with_gradient=False, **options)
        zeros, ones = torch.zeros_like(y), torch.ones_like(y)
        (first,) = torch.autograd.grad(y, x, zeros, retain_graph=True)
        (second,) = torch.autograd.grad(y, x, 4 * ones, retain_graph=True)
        (third,) = torch.autograd.grad(y, x, ones, retain_graph=True)
    names = [step.name for step in steps]
    if names:  # a small call on a GPU may be PyTorch's, for the host's time
        assert names.count("_tile_kernel") == 3 + (not with_gradient) and names.count("_scale_kernel") == 3
    assert not first.any()
    assert torch.equal(second, 4 * third)  # a power of two costs no rounding
    assert torch.equal(third, gradient(options)(ones, x.detach(), labels)[0])


@EACH_OPTION
@pytest.mark.parametrize("call", ["cross_entropy", "in place", "library"])
def test_a_second_derivative_is_as_right_as_pytorchs_or_refused(
    options: dict[str, Any], call: str, device: str
) -> None:
    def second(loss_of: Any, x: Any, labels: Any) -> Any:
        x = x.detach().requires_grad_()
        y = loss_of(x * 1, labels, **options)  # no leaf: in_place is refused for one
        (slope,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    ours = {
        "cross_entropy": cross_entropy, "library": library, "in place": partial(cross_entropy, in_place=True),
    }[call]  # fmt: skip
    errors = []
    for seed in range(3):
        x, labels = CROSS_ENTROPY.inputs({"rows": 24, "cols": 60}, "float32", device, seed)
        labels = labels.where(labels >= 0, options.get("ignore_index", -100))
        if call == "in place":
            with pytest.raises(BadInput, match="no second derivative: leave in_place away"):
                second(ours, x, labels)
            return
        results = second(ours, x, labels), second(reference, x, labels), second(reference, x.double(), labels)
        errors.append([correct.error("second derivative", *results)])
        assert results[-1].abs().max() > 0
    assert correct.pooled(errors).ok, correct.pooled(errors)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_through_autograd(reduction: Any, device: str) -> None:
    rows, classes, dtype = (300, 4096, torch.bfloat16) if HAS_GPU else (8, 528, torch.float16)
    hidden = torch.randn(rows, 64, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, 64, device=device, dtype=dtype)
    labels = torch.randint(classes, (rows,), device=device)
    grads = []
    for in_place in (False, True):
        logits = hidden @ weight.T
        kept = logits.detach().clone()
        y = cross_entropy(logits, labels, reduction=reduction, in_place=in_place)
        y.sum().backward()
        grads.append(hidden.grad)
        hidden.grad = None
        assert torch.equal(logits, kept) != in_place
        if in_place:
            with pytest.raises(BadInput, match="second backward pass"):
                y.sum().backward()
    assert torch.equal(*grads)
    with pytest.raises(BadInput, match="leaf"):
        cross_entropy(torch.randn(4, 9, device=device, requires_grad=True), labels[:4] % 9, in_place=True)


def test_whoever_saved_the_logits_hears_that_they_are_gone(device: str) -> None:
    x = torch.randn(8, 600, device=device, requires_grad=True)
    logits = x.exp()  # its backward pass needs them
    y = cross_entropy(logits, torch.arange(8, device=device), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_traced_gradient_is_left_as_it_was(device: str) -> None:
    """A compiler holds it to be an output of the forward pass: the scaled one is another tensor."""
    d, count = torch.randn(6, 40, device=device), torch.tensor(4.0, device=device)
    dloss, before = torch.tensor(3.0, device=device), d.clone()
    copy = torch.ops.sublight.cross_entropy_scaled(d, dloss, count, True, 2.0)
    assert torch.equal(d, before) and not torch.equal(copy, before)
    assert torch.equal(finished.scaled(d, dloss, count, True, 2.0), copy) and torch.equal(d, copy)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiler_gets_the_same_gradient(reduction: str, device: str) -> None:
    torch._dynamo.reset()
    x, labels = CROSS_ENTROPY.inputs({"rows": 6, "cols": 40}, "float32", device, 0)

    def call(x: Any) -> Any:
        return cross_entropy(x * 1, labels, reduction=reduction, in_place=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    dloss = torch.randn(6 if reduction == "none" else (), device=device)
    eager, traced = (correct.gradients(each, (x,), dloss)[0] for each in (call, compiled))
    assert torch.equal(eager, traced)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_the_loss_in_any_layout(reduction: str, device: str) -> None:
    x, labels = CROSS_ENTROPY.inputs({"rows": 6, "cols": 40}, "float32", device, 0)
    x, labels = x.view(2, 3, 40), labels.view(2, 3)
    shape = () if reduction == "mean" else (2, 3)
    z = torch.randn(shape, dtype=torch.complex64, device=device).conj()
    layouts = [z.imag, torch.randn((), device=device).expand(shape)]
    if reduction == "none":
        layouts += [torch.randn(3, 2, device=device).T, torch.randn(2, 6, device=device)[:, ::2]]
    assert layouts[0].is_neg()
    for dloss in layouts:
        plain = torch.empty(shape, device=device).copy_(dloss)
        call = partial(cross_entropy, labels=labels, reduction=reduction)
        given, expected = (correct.gradients(call, (x,), grad)[0] for grad in (dloss, plain))
        assert torch.equal(given, expected)
