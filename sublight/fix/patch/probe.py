"""Recognition by behaviour: a module is what it does to a small random input, whatever its class is called.

A module's twin (`twin.py`) is tried in float64 on the CPU, beside what is suspected of it. Equal within what a
cast to float32 inside it costs, on values that tell formulas apart (rows so small that eps counts among them), is proof
enough for a swap that `verify` can still check on the user's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
CLOSE = 1e-5  # of the largest value: a cast to float32 leaves 1e-7, the wrong formula 1e-2
TIGHT = 1e-6  # likewise in float64, where a scale of 1.000005 is no cast
SEED = 0x5B11
NUMBERS = ("layer_idx", "layer_id", "layer_index")  # a layer's, by which it finds its cache
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
EVERY_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}


def fingerprint(module: torch.nn.Module) -> tuple[Hashable, Hashable]:
    """Modules with the same one behave the same but for their parameters' values: one probe tells of all.

    The second half is the numbers of layers, which most only hand on to a cache. A module without children has none
    there: a norm that is given a number computes with it.
    """
    settings, numbers = [], []
    for name, each in module.named_modules():
        given = {key: _plain(value) for key, value in vars(each).items() if key not in EVERY_MODULES}
        numbers.append(tuple(given.pop(key, "") for key in NUMBERS) if each._modules else ())
        tensors = tuple((key, *_kind(x)) for key, x in (*each._parameters.items(), *each._buffers.items()))
        hooks = tuple(bool(each.__dict__.get(hooks)) for hooks in HOOKS)
        settings.append((name, type(each), tuple(sorted(given.items())), tensors, len(each._parameters), hooks))
    return tuple(settings), tuple(numbers)


def _kind(x: torch.Tensor | None) -> tuple[Hashable, ...]:
    return () if x is None else (tuple(x.shape), x.dtype, type(x))


def is_plain_tensor(x: Any) -> bool:
    """No subclass, whose ops may be others: quantized, sharded, or a user's; but those that stand for plain ones."""
    return type(x) in PLAIN_TENSORS or type(x).__module__.startswith("torch._subclasses.")


def lies_in_order(x: torch.Tensor) -> bool:
    """Whether its dimensions lie in memory in their order, with or without gaps: an op by op result of it does, too."""
    if x.is_contiguous():
        return True
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and stride]
    return strides == sorted(strides, reverse=True)


def order_in_memory(x: torch.Tensor) -> list[int]:
    """Its dimensions, the one whose elements lie farthest apart first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda dim: -strides[dim])


def is_sharded(x: Any) -> bool:
    """A part of a tensor that others have the rest of: FSDP puts the whole one in its place before a forward runs."""
    return type(x).__module__.startswith("torch.distributed.")


def dtype_of(module: torch.nn.Module, model: torch.nn.Module) -> torch.dtype:
    """What a module runs in: its parameters' data type, else the model's."""
    for each in (module, model):
        for parameter in each.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.get_default_dtype()


def _plain(value: Any) -> str:
    """A setting as it is written; of anything else, which object it is."""
    return repr(value) if isinstance(value, bool | int | float | str | tuple | None) else f"{type(value)} {id(value)}"


def sample(*shape: int, seed: int = SEED) -> torch.Tensor:
    """Random values; of several rows, each a hundredth of the one before, so that a norm's eps shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5 + 0.25
    return x * 0.01 ** torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) if len(shape) > 1 else x


def same(one: Any, other: Any, size: float = 0.0, close: float = CLOSE) -> bool:
    """Tensors of one shape and dtype with the same values, as far as they count beside this size."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.shape != other.shape:
        return False
    scale = max(float(other.abs().max()), size, 1e-30) if other.numel() else 1.0
    return bool(((one - other).abs().max() if one.numel() else torch.zeros(())) <= close * scale)


def first_match(result: Any, candidates: Iterable[tuple[str, Callable[[], Any]]]) -> str | None:
    """The name of the first candidate that gives this result."""
    for name, candidate in candidates:
        if same(candidate(), result):
            return name
    return None
