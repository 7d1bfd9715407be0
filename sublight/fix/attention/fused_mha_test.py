"""The drop-in: PyTorch's state dict, values and gradients by the rule, PyTorch's forward where ours does not fit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.fix.attention.fused_mha import FusedMHA


def pair(device: str, **options: Any) -> tuple[torch.nn.MultiheadAttention, FusedMHA]:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(32, 2, **options).to(device)
    torch.nn.init.normal_(theirs.out_proj.bias)
    if theirs.in_proj_bias is not None:
        torch.nn.init.normal_(theirs.in_proj_bias)
    return theirs, FusedMHA.of(theirs, provider="flash")


def causal(length: int, device: str) -> torch.Tensor:
    return torch.nn.Transformer.generate_square_subsequent_mask(length, device=torch.device(device))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{"batch_first": True}, {"kdim": 24, "vdim": 40}])
def test_values_and_gradients_are_right_by_the_rule(options: dict[str, Any], is_causal: bool, device: str) -> None:
    theirs, ours = pair(device, **options)
    wide = torch.nn.MultiheadAttention(32, 2, **options).to(device).double()
    wide.load_state_dict(theirs.state_dict())
    mask = causal(5, device) if is_causal else None
    sizes = (32, options.get("kdim", 32), options.get("vdim", 32))
    names = [name for name, _ in theirs.named_parameters()]

    def run(module: torch.nn.Module, *x: torch.Tensor) -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in x]
        args = leaves if options.get("kdim") else [leaves[0]] * 3
        out, weights = module(*args, need_weights=False, is_causal=is_causal, attn_mask=mask)
        assert weights is None
        wanted = [leaves[0], *(dict(module.named_parameters())[name] for name in names)]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]

    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (2, 5) if options.get("batch_first") else (5, 2)
        x = [torch.randn(*shape, size, generator=generator, device=device) for size in sizes]
        results = zip(run(ours, *x), run(theirs, *x), run(wide, *(each.double() for each in x)), strict=True)
        return [correct.error(f"result {i}", *each) for i, each in enumerate(results)]

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_the_state_dict_is_pytorchs_and_parameters_are_shared(device: str) -> None:
    theirs, ours = pair(device)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and ours.in_proj_weight is theirs.in_proj_weight
    fresh = FusedMHA(32, 2).to(device)
    fresh.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 2, 32, device=device)
    assert torch.equal(fresh(x, x, x, need_weights=False)[0], FusedMHA.of(theirs)(x, x, x, need_weights=False)[0])


def test_what_ours_does_not_take_goes_to_pytorch(device: str) -> None:
    theirs, ours = pair(device, batch_first=True)
    x, longer = torch.randn(2, 5, 32, device=device), torch.randn(2, 6, 32, device=device)
    hidden = torch.zeros(2, 5, dtype=torch.bool, device=device)
    hidden[1, 3:] = True
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, x, x), {}),
        ((x, x, x), {"need_weights": False, "key_padding_mask": hidden}),
        ((x, x, x), {"need_weights": False, "attn_mask": causal(5, device)}),
        ((x[0], x[0], x[0]), {"need_weights": False}),
    ]
    for args, options in calls:
        with watching() as steps:
            found = ours(*args, **options)
        expected = theirs(*args, **options)
        assert not steps and torch.equal(found[0], expected[0])
        assert (found[1] is None) == (expected[1] is None) and (found[1] is None or torch.equal(found[1], expected[1]))
    with watching() as steps:
        ours(x, longer, longer, need_weights=False)
    assert [step.name for step in steps] == ["_flash_kernel"]


def test_dropout_is_taken_in_training_alone(device: str) -> None:
    theirs, ours = pair(device, dropout=0.5)
    x = torch.randn(5, 2, 32, device=device)
    first, second = (ours(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    ours.eval()
    theirs.eval()
    assert torch.equal(*(ours(x, x, x, need_weights=False)[0] for _ in range(2)))


def test_an_encoder_layer_takes_it(device: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 16, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 5, 32, device=device)
    expected = layer(x)
    layer.self_attn = FusedMHA.of(layer.self_attn, provider="flash")
    with watching() as steps:
        found = layer(x)
    assert steps and (found - expected).abs().max() < 1e-5  # the rule is above: here only that it is called
