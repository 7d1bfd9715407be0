"""Experts without a token, with all of them, indices that are no expert; the order of rows; the layer; bad input."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
F = torch.nn.functional

import sublight
from sublight import correct
from sublight.errors import BadInput
from sublight.ops.moe import moe_experts as op
from sublight.ops.moe.layer import route
from sublight.ops.moe.sorting import CHUNK

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 45, 20, 12, 6, 3  # 135 pairs: more than a chunk


def made(index: Any, seed: int, device: str) -> tuple[Any, ...]:
    shape = {"tokens": TOKENS, "hidden": HIDDEN, "inner": INNER, "experts": EXPERTS, "top_k": TOP_K}
    x, _, *others = op.inputs(shape, "float32", "cpu", seed)
    return tuple(each.to(device) for each in (x, index, *others))


def nobody_beside_two() -> Any:
    return torch.tensor([4, 1]).repeat((TOKENS * TOP_K + 1) // 2)[: TOKENS * TOP_K].view(TOKENS, TOP_K)


def all_to_one() -> Any:
    return torch.full((TOKENS, TOP_K), EXPERTS - 1)


def some_to_none() -> Any:
    index = torch.randint(EXPERTS, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(0))
    index[::3, 0], index[5], index[7, 2] = EXPERTS, -1, 2**40
    return index


@pytest.mark.parametrize("choice", [nobody_beside_two, all_to_one, some_to_none])
def test_choices_of_every_kind(choice: Any, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        inputs = made(choice(), seed + 1, device)
        grad = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device)
        return [
            *correct.forward_errors(op.launch, op.reference, inputs),
            *correct.backward_errors(op.launch_backward, op.reference, inputs, grad, wrt=(0, 2, 3, 4)),
        ]

    error = correct.settled(draw)
    assert error.ok, error


def test_rows_are_sorted_by_expert_and_keep_their_order(device: str) -> None:
    index = some_to_none()
    inputs = made(index, 0, device)
    _, _, place, source, ends = op._experts.by_kernels(*op.arguments(*inputs))
    flat = index.flatten()
    assert flat.numel() > CHUNK
    is_expert = (flat >= 0) & (flat < EXPERTS)
    expected = torch.where(is_expert, flat, EXPERTS).sort(stable=True).indices[: int(is_expert.sum())]
    assert torch.equal(source[: expected.numel()].cpu().long(), expected)
    assert torch.equal(place.cpu().long()[expected], torch.arange(expected.numel()))
    assert (place.cpu()[~is_expert] == -1).all()
    assert torch.equal(ends.cpu().long(), torch.bincount(flat[is_expert], minlength=EXPERTS).cumsum(0))


@pytest.mark.parametrize("wanted", [0, 2, 3, 4])
def test_only_the_gradient_that_is_wanted(wanted: int, device: str) -> None:
    """It has the bits that it has among all of them, which other tests hold to the rule."""
    tensors = made(all_to_one(), 0, device)
    alone, together = (correct.leaves_of(tensors, each) for each in ((wanted,), (0, 2, 3, 4)))
    (found,) = torch.autograd.grad(op.moe_experts(*alone).square().sum(), alone[wanted])
    (expected,) = torch.autograd.grad(op.moe_experts(*together).square().sum(), together[wanted])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_layer_is_its_composition(normalize: bool, device: str) -> None:
    """Forward and every gradient, with leading dimensions, against Mixtral's and Qwen's routing in float64."""
    module = sublight.MoE(16, 8, 5, 2, normalize=normalize, device=device)

    def layer(x: Any, *parameters: Any) -> Any:
        named = dict(zip(("router", "gate_up", "down"), parameters, strict=True))
        return torch.func.functional_call(module, named, (x,))

    def composition(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        values, index = F.softmax(F.linear(x, router), -1).topk(module.top_k)
        if normalize:
            values = values / values.sum(-1, keepdim=True)
        flat = (each.flatten(0, 1) for each in (x, index, values))
        return op.reference(*flat, gate_up, down).view(x.shape)

    def gradients(grad: Any, *inputs: Any) -> Any:
        return correct.gradients(layer, inputs, grad)

    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator().manual_seed(seed)
        x, grad = (torch.randn(3, 8, 16, generator=generator).to(device) for _ in range(2))
        inputs = (x, *(each.detach() for each in (module.router, module.gate_up, module.down)))
        return [
            *correct.forward_errors(layer, composition, inputs),
            *correct.backward_errors(gradients, composition, inputs, grad),
        ]

    error = correct.settled(draw)
    assert error.ok, error


def test_routing_in_sixteen_bits_is_in_fp32() -> None:
    logits = torch.randn(4, 9, dtype=torch.bfloat16)
    index, weights = route(logits, 3)
    values, expected = torch.softmax(logits.float(), -1).topk(3)
    assert weights.dtype == torch.float32 and torch.equal(index, expected)
    torch.testing.assert_close(weights, values / values.sum(-1, keepdim=True))


def test_autocast_takes_its_data_type() -> None:
    module = sublight.MoE(16, 8, 4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(5, 16)).dtype == torch.bfloat16


def test_bad_input_is_refused_in_one_line() -> None:
    x, index, weights, gate_up, down = made(all_to_one(), 0, "cpu")
    for call, words in (
        (lambda: sublight.moe_experts(x, index.float(), weights, gate_up, down), "whole index"),
        (lambda: sublight.moe_experts(x, index, weights, gate_up, down[:, 1:]), "x, gate_up and down do not fit"),
        (lambda: sublight.moe_experts(x, index, weights, gate_up[:, 1:], down), "x, gate_up and down do not fit"),
        (lambda: sublight.moe_experts(x, index[1:], weights, gate_up, down), "x, index and weights do not fit"),
        (lambda: sublight.MoE(16, 8, 4, 5), "give 1 to 4, for 4 experts"),
        (lambda: sublight.MoE(0, 8, 4, 2), "each is at least 1"),
    ):
        with pytest.raises(BadInput, match=words) as error:
            call()
        assert "\n" not in str(error.value)
    empty = sublight.moe_experts(x[:0], index[:0], weights[:0], gate_up, down)
    assert empty.shape == (0, HIDDEN)
