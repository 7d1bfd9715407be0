"""One step of a model on a batch: its loss, its outputs, every parameter's gradient; and nothing else is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.jit import ScriptModule

from sublight.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step gave, by name."""

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"gradient of {name}": tensor for name, tensor in self.gradients.items()}
        return {**self.outputs, **named}


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The model on a batch: a tensor, positional arguments in a tuple or list, or named ones in a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model gives; else the mean square of what it gives, which every parameter has a part in."""
    named = outputs_of(output)
    for name in ("loss", "output"):
        if name in named and named[name].numel() == 1:
            return named[name].reshape(())
    values = [tensor for tensor in named.values() if tensor.is_floating_point()]
    if not values:
        raise BadInput("the model gives no tensor of floating point for this batch: nothing to compare")
    return sum((tensor.double().square().mean() for tensor in values), torch.zeros((), dtype=torch.float64))


def outputs_of(output: Any) -> dict[str, torch.Tensor]:
    """Loss and logits of a Hugging Face model, else the tensors that it gives."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
    if isinstance(output, tuple | list):
        tensors = [value for value in output if isinstance(value, torch.Tensor)]
        return {f"output {number}": tensor for number, tensor in enumerate(tensors)}
    return {}


def step(model: torch.nn.Module, batch: Any) -> Step:
    """Forward and backward in evaluation mode (no dropout); gradients, modes and random numbers are put back after."""
    with as_it_was(model), torch.enable_grad():
        model.eval()
        output = call(model, batch)
        outputs = {name: tensor.detach() for name, tensor in outputs_of(output).items()}
        loss = loss_of(output)
        if loss.requires_grad:
            loss.backward()
        gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Step(outputs=outputs, gradients=gradients)


@contextlib.contextmanager
def as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Gradients, buffers, counts, modes and random numbers are put back after; inside there are no gradients yet."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    modes = {module: module.training for module in model.modules()}
    held = {} if is_shared(model) else {each: _held(each) for each in modes if not isinstance(each, ScriptModule)}
    on_gpu = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=on_gpu):
        try:
            for parameter in kept:
                parameter.grad = None
            yield
        finally:
            for module, before in held.items():
                _put_back(module, before)
            for parameter, grad in kept.items():
                parameter.grad = grad
            for buffer, value in buffers.items():
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():  # else it may not be written to
                    buffer.copy_(value)
            for module, mode in modes.items():
                module.training = mode


def is_shared(model: torch.nn.Module) -> bool:
    """Whether several processes have a part in the model: DDP, FSDP, fully_shard, tensor parallel."""
    wrappers = any("parallel" in type(module).__module__ for module in model.modules())
    return wrappers or any(hasattr(parameter, "placements") for parameter in model.parameters())


def _held(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What a forward may put something else in the place of: parameters, buffers, a count, a loss beside."""
    own = {name: value for name, value in vars(module).items() if _is_value(value)}
    return {"": own, "_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}


def _put_back(module: torch.nn.Module, before: dict[str, dict[str, Any]]) -> None:
    """What it has made anew stays: it may count on that."""
    for name, values in before.items():
        (vars(module)[name] if name else vars(module)).update(values)


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | torch.Tensor)


def is_inert(value: Any) -> bool:
    """Whether a call cannot leave traces in this argument; a cache of keys would grow."""
    if isinstance(value, Mapping):
        return all(is_inert(item) for item in value.values())
    if isinstance(value, tuple | list):
        return all(is_inert(item) for item in value)
    return isinstance(value, torch.Tensor | bool | int | float | str | None)
