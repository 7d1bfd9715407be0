"""A GPT-2 step on our kernels alone against PyTorch's: losses, every gradient, every parameter after AdamW.

AdamW's first step is rate * g / (|g| + eps); its derivative by g is rate * eps / (|g| + eps)^2, at most rate / eps.
With PyTorch's eps of 1e-8 that is 1e6: the key's biases, whose gradient is zero but for rounding, move by half of the
rate in a direction of luck, and one gradient of 4e-7 decides how far a whole matrix is off. Two gradients, each as
right as the other, then give steps of any ratio, and more draws do not settle it. So the whole step is held with
eps = rate, where a parameter is off by no more than its gradient is; AdamW with PyTorch's own eps is held by itself, on
given gradients.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sublight.correct import Error, error, settled
from sublight.errors import BadInput
from sublight.extensions import build
from sublight.extensions.transformer import step
from sublight.extensions.transformer.step import Config, Rates

SMALL = Config(layers=1, heads=2, channels=12, vocabulary=21, context=6)
LARGE = Config(layers=3, heads=4, channels=128, vocabulary=515, context=96)
RATES = Rates(rate=1e-2, eps=1e-2)
OWN = Rates(rate=1e-2)  # with PyTorch's own eps


def reference(
    config: Config, given: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """PyTorch's losses, gradients and updated parameters, in the parameters' own data type."""
    functional = torch.nn.functional
    p = {name: each.detach().clone().requires_grad_() for name, each in given.items()}
    width = (config.channels,)
    with torch.enable_grad():
        x = functional.embedding(tokens, p["wte"]) + p["wpe"][: tokens.shape[1]]
        for i in range(config.layers):
            at = f"h.{i}."
            y = functional.layer_norm(x, width, p[at + "ln_1.weight"], p[at + "ln_1.bias"])
            qkv = functional.linear(y, p[at + "attn.weight"], p[at + "attn.bias"])
            q, k, v = qkv.unflatten(-1, (3, config.heads, -1)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            y = (torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v).transpose(1, 2).flatten(2)
            x = x + functional.linear(y, p[at + "proj.weight"], p[at + "proj.bias"])
            y = functional.layer_norm(x, width, p[at + "ln_2.weight"], p[at + "ln_2.bias"])
            y = functional.gelu(functional.linear(y, p[at + "fc.weight"], p[at + "fc.bias"]), approximate="tanh")
            x = x + functional.linear(y, p[at + "out.weight"], p[at + "out.bias"])
        logits = functional.linear(functional.layer_norm(x, width, p["ln_f.weight"], p["ln_f.bias"]), p["wte"])
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.mean().backward()
    after = [updated(each.detach(), each.grad, RATES)[0] for each in p.values()]
    return losses.detach(), *(each.grad for each in p.values()), *after


def updated(parameter: torch.Tensor, gradient: torch.Tensor, rates: Rates, steps: int = 1) -> tuple[torch.Tensor, ...]:
    """Parameter and moments after steps of torch.optim.AdamW, by the operations that it makes (importing it takes 2 s);
    every step after the first has the gradient of the one before, halved."""
    beta1, beta2 = rates.betas
    first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
    for at in range(1, steps + 1):
        first = first.lerp(gradient, 1 - beta1)
        second = (second * beta2).addcmul(gradient, gradient, value=1 - beta2)
        kept = parameter * (1 - rates.rate * rates.decay * (parameter.dim() == 2))
        down = (second.sqrt() / (1 - beta2**at) ** 0.5).add_(rates.eps)
        parameter = kept.addcdiv(first, down, value=-rates.rate / (1 - beta1**at))
        gradient = gradient / 2
    return parameter, first, second


def ours(
    config: Config, given: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    p = {name: each.clone() for name, each in given.items()}
    losses, gradients = step.loss_and_gradients(config, p, tokens, targets)
    assert list(gradients.keys()) != [] and set(gradients) == set(p)
    first, second = ({name: torch.zeros_like(each) for name, each in p.items()} for _ in range(2))
    step.update(p, gradients, first, second, 1, RATES)
    return losses, *(gradients[name] for name in p), *p.values()


def ours_updated(given: torch.Tensor, gradient: torch.Tensor, rates: Rates, steps: int) -> tuple[torch.Tensor, ...]:
    parameter, first, second = given.clone(), torch.zeros_like(given), torch.zeros_like(given)
    for at in range(1, steps + 1):
        step.update({"wte": parameter}, {"wte": gradient}, {"wte": first}, {"wte": second}, at, rates)
        gradient = gradient / 2
    return parameter, first, second


def drawn(config: Config, batch: int, time: int, device: str, seed: int) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights larger than GPT-2's first ones, and no zero biases: every term of every gradient is there."""
    generator = torch.Generator(device).manual_seed(seed)
    given = {
        name: each + 0.2 * torch.randn(each.shape, device=device, generator=generator)
        for name, each in step.initial(config, device, seed).items()
    }
    tokens, targets = torch.randint(config.vocabulary, (2, batch, time), device=device, generator=generator)
    return given, tokens, targets


def check(config: Config, batch: int, time: int, device: str, draws: int) -> None:
    names = ["losses", *step.shapes(config), *(f"new {name}" for name in step.shapes(config))]

    def draw(seed: int) -> list[Error]:
        given, tokens, targets = drawn(config, batch, time, device, seed)
        wide = {name: each.double() for name, each in given.items()}
        made = (ours(config, given, tokens, targets), reference(config, given, tokens, targets))
        truth = reference(config, wide, tokens, targets)
        return [error(name, *triple) for name, *triple in zip(names, *made, truth, strict=True)]

    worst = settled(draw, draws)
    assert worst.ok, worst


def check_adamw(device: str) -> None:
    """On given gradients from 1e-12 to 1, around eps: a step's error is AdamW's own."""

    def draw(seed: int) -> list[Error]:
        generator = torch.Generator(device).manual_seed(seed)
        parameter, gradient = torch.randn(2, 3, 257, device=device, generator=generator)
        gradient = gradient * 10.0 ** torch.linspace(-12, 0, 257, device=device)
        made = (ours_updated(parameter, gradient, OWN, 3), updated(parameter, gradient, OWN, 3))
        truth = updated(parameter.double(), gradient.double(), OWN, 3)
        names = ("parameter", "first moment", "second moment")
        return [error(name, *triple) for name, *triple in zip(names, *made, truth, strict=True)]

    worst = settled(draw, 2)
    assert worst.ok, worst


def needs_a_compiler() -> None:
    try:
        build.host_compiler()
    except BadInput as missing:
        pytest.skip(str(missing))


def test_a_step_is_pytorchs() -> None:
    needs_a_compiler()
    check(SMALL, 2, 5, "cpu", 2)
    check_adamw("cpu")


@pytest.mark.gpu
def test_a_step_is_pytorchs_on_a_gpu() -> None:
    check(SMALL, 2, 5, "cuda", 2)
    check(LARGE, 3, 77, "cuda", 2)
    check_adamw("cuda")


def test_what_kernels_would_not_notice_is_refused() -> None:
    given, tokens, targets = drawn(SMALL, 2, 5, "cpu", 0)
    for change, words in (
        ({"tokens": tokens + 21}, "a token is not below 21"),
        ({"tokens": tokens.int()}, "contiguous int64"),
        ({"targets": targets[:, :4]}, "tokens and targets are"),
        ({"parameters": given | {"wpe": given["wpe"][:3]}}, "wpe must be there, of shape"),
        ({"parameters": given | {"wte": given["wte"].double()}}, "wte must be contiguous float32"),
        ({"config": Config(layers=1, heads=5, channels=12, vocabulary=21, context=6)}, "heads must divide channels"),
    ):
        arguments = {"config": SMALL, "parameters": given, "tokens": tokens, "targets": targets} | change
        with pytest.raises(BadInput, match=words):
            step.loss_and_gradients(**arguments)
