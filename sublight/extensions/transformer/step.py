"""A GPT-2 training step on our CUDA C++ alone: forward, backward and AdamW, with PyTorch as the owner of memory only.

The order is llm.c's: what the way back needs is kept by the way there, every gradient is written once (the token
table's is added to: by the classifier and by the encoder), and the loss is the mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sublight.errors import BadInput
from sublight.extensions.ladder import Runner, on_cpu, on_gpu
from sublight.extensions.transformer import launch

if TYPE_CHECKING:
    from torch import Tensor

Parameters = dict[str, "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    layers: int
    heads: int
    channels: int
    vocabulary: int
    context: int


GPT2 = Config(layers=12, heads=12, channels=768, vocabulary=50257, context=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """AdamW's, as PyTorch names their values by default; `decay` is for matrices only."""

    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.01


def runner_for(x: Tensor) -> Runner:
    """A GPU through its driver, or the CPU, which plays the kernels."""
    return on_gpu(launch.SOURCE, x.get_device()) if x.is_cuda else on_cpu(launch.SOURCE, launch.KERNELS, False)


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of every parameter by GPT-2's own names; the classifier shares wte."""
    c = config.channels
    by_name: dict[str, tuple[int, ...]] = {"wte": (config.vocabulary, c), "wpe": (config.context, c)}
    for i in range(config.layers):
        for name, shape in (
            *(("ln_1.weight", (c,)), ("ln_1.bias", (c,)), ("attn.weight", (3 * c, c)), ("attn.bias", (3 * c,))),
            *(("proj.weight", (c, c)), ("proj.bias", (c,)), ("ln_2.weight", (c,)), ("ln_2.bias", (c,))),
            *(("fc.weight", (4 * c, c)), ("fc.bias", (4 * c,)), ("out.weight", (c, 4 * c)), ("out.bias", (c,))),
        ):
            by_name[f"h.{i}.{name}"] = shape
    return by_name | {"ln_f.weight": (c,), "ln_f.bias": (c,)}


def initial(config: Config, device: str, seed: int) -> Parameters:
    """GPT-2's own: 0.02 for matrices, ones for the norms' weights, zeros for biases."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for name, shape in shapes(config).items():
        if len(shape) == 2:
            made[name] = 0.02 * torch.randn(shape, device=device, generator=generator)
        else:
            made[name] = torch.full(shape, 1.0 if name.endswith("weight") else 0.0, device=device)
    return made


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a block's way there leaves for its way back."""

    x: Tensor
    norm_1: tuple[Tensor, Tensor, Tensor]
    qkv: Tensor
    attended: Tensor
    lse: Tensor
    middle: Tensor
    norm_2: tuple[Tensor, Tensor, Tensor]
    wide: Tensor
    bent: Tensor


def loss_and_gradients(
    config: Config, parameters: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Parameters]:
    """The loss of each token, and the gradient of their mean by every parameter."""
    _check(config, parameters, tokens, targets)
    runner = runner_for(parameters["wte"])
    zero_bias = parameters["wte"].new_zeros(config.vocabulary)
    x = launch.encoder(runner, tokens, parameters["wte"], parameters["wpe"])
    kept = []
    for i in range(config.layers):
        x, block = _block(runner, config, parameters, f"h.{i}.", x)
        kept.append(block)
    final = launch.norm(runner, x, parameters["ln_f.weight"], parameters["ln_f.bias"])
    logits = launch.linear(runner, final[0], parameters["wte"], zero_bias)
    losses = launch.classifier(
        runner, logits, targets, logits, vocabulary=config.vocabulary, d_loss=1.0 / targets.numel()
    )  # from here on logits holds its gradient
    gradients: Parameters = {}
    d_final, gradients["wte"], _ = launch.linear_backward(runner, logits, final[0], parameters["wte"])
    d_x, gradients["ln_f.weight"], gradients["ln_f.bias"] = launch.norm_backward(
        runner, d_final, x, parameters["ln_f.weight"], *final[1:]
    )
    for i in reversed(range(config.layers)):
        d_x = _block_backward(runner, parameters, f"h.{i}.", d_x, kept[i], gradients)
    gradients["wpe"] = parameters["wpe"].new_zeros(parameters["wpe"].shape)  # positions behind the sequence have none
    launch.encoder_backward(runner, d_x, tokens, gradients["wte"], gradients["wpe"])
    return losses, gradients


def _block(
    runner: Runner, config: Config, parameters: Mapping[str, Tensor], at: str, x: Tensor
) -> tuple[Tensor, _Kept]:
    def linear(name: str, given: Tensor) -> Tensor:
        return launch.linear(runner, given, parameters[f"{at}{name}.weight"], parameters[f"{at}{name}.bias"])

    def norm(name: str, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return launch.norm(runner, given, parameters[f"{at}{name}.weight"], parameters[f"{at}{name}.bias"])

    norm_1 = norm("ln_1", x)
    qkv = linear("attn", norm_1[0])
    attended, lse = launch.attention(runner, qkv, config.heads)
    middle = launch.residual(runner, x, linear("proj", attended))
    norm_2 = norm("ln_2", middle)
    wide = linear("fc", norm_2[0])
    bent = launch.gelu(runner, wide)
    out = launch.residual(runner, middle, linear("out", bent))
    return out, _Kept(x, norm_1, qkv, attended, lse, middle, norm_2, wide, bent)


def _block_backward(
    runner: Runner, parameters: Mapping[str, Tensor], at: str, d_out: Tensor, kept: _Kept, grads: Parameters
) -> Tensor:
    def linear(name: str, d: Tensor, given: Tensor) -> Tensor:
        weight, bias = f"{at}{name}.weight", f"{at}{name}.bias"
        d_given, grads[weight], grads[bias] = launch.linear_backward(runner, d, given, parameters[weight])
        return d_given

    def norm(name: str, d: Tensor, given: Tensor, saved: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        weight, bias = f"{at}{name}.weight", f"{at}{name}.bias"
        d_given, grads[weight], grads[bias] = launch.norm_backward(runner, d, given, parameters[weight], *saved[1:])
        return d_given

    d_wide = launch.gelu_backward(runner, linear("out", d_out, kept.bent), kept.wide)
    d_middle = launch.residual(
        runner, d_out, norm("ln_2", linear("fc", d_wide, kept.norm_2[0]), kept.middle, kept.norm_2)
    )
    d_attended = linear("proj", d_middle, kept.attended)
    d_qkv = launch.attention_backward(runner, d_attended, kept.qkv, kept.attended, kept.lse)
    return launch.residual(runner, d_middle, norm("ln_1", linear("attn", d_qkv, kept.norm_1[0]), kept.x, kept.norm_1))


def update(
    parameters: Parameters,
    gradients: Mapping[str, Tensor],
    first: Parameters,
    second: Parameters,
    step: int,
    rates: Rates,
) -> None:
    """AdamW in place; `step` counts from 1."""
    runner = runner_for(parameters["wte"])
    for name, parameter in parameters.items():
        moments = (first[name], second[name])
        launch.adamw(
            runner, (parameter, gradients[name], *moments), (parameter, *moments), step=step,
            rate=rates.rate, betas=rates.betas, eps=rates.eps, decay=rates.decay if parameter.dim() == 2 else 0.0,
        )  # fmt: skip


def _check(config: Config, parameters: Mapping[str, Tensor], tokens: Tensor, targets: Tensor) -> None:
    """Kernels look at no index: what is wrong must not reach them."""
    for name, shape in shapes(config).items():
        if name not in parameters or tuple(parameters[name].shape) != shape:
            raise BadInput(f"gpt2: {name} must be there, of shape {shape}")
        if not parameters[name].is_contiguous() or str(parameters[name].dtype) != "torch.float32":
            raise BadInput(f"gpt2: {name} must be contiguous float32")
    if config.channels % config.heads or config.channels // config.heads > launch.MOST_HEAD:
        raise BadInput(f"gpt2: heads must divide channels, and a head have at most {launch.MOST_HEAD}")
    if tokens.dim() != 2 or tokens.shape != targets.shape or not tokens.numel() or tokens.shape[1] > config.context:
        raise BadInput(f"gpt2: tokens and targets are (batch, time), time at most {config.context}")
    for ids in (tokens, targets):
        if str(ids.dtype) != "torch.int64" or not ids.is_contiguous() or ids.device != parameters["wte"].device:
            raise BadInput("gpt2: tokens and targets are contiguous int64 on the parameters' device")
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary:
            raise BadInput(f"gpt2: a token is not below {config.vocabulary}")
