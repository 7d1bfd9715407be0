"""What makes two calls the same: everything that the launches of a call depend on, except the values in its tensors.

Tensors count by shape, strides, data type, device and alignment; numbers, strings and None by value; containers by
their kind and contents; any other object (a key-value cache, say) by its identity, for what it holds is read in place.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from sublight.backend import private
from sublight.backend.private import pytree

PLAIN = (torch.Tensor, torch.nn.Parameter)
ALIGNMENT = 16  # bytes: kernels that read four words at once choose by it, and may add in another order
_BY_VALUE = (
    bool,
    int,
    str,
    bytes,
    complex,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.Size,
    enum.Enum,
)
_BY_VALUE_EXACT = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device))


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call, taken apart."""

    key: Hashable
    tensors: list[torch.Tensor]  # on the device, in the order in which `substitute` meets them
    objects: list[Any]  # what counts by identity
    reason: str = ""  # why no graph can take such arguments

    @property
    def device(self) -> torch.device | None:
        return self.tensors[0].device if self.tensors else None


class Identity:
    """An object as a part of a key: equal only to itself, and to nothing once it is gone."""

    __slots__ = ("__weakref__", "_hash", "_ref")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # no weak reference to it: hold it, or another object may get its address
            self._ref = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, Identity) and mine is not None and mine is other._ref()

    @property
    def is_gone(self) -> bool:
        return self._ref() is None


def describe(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str = "cuda") -> Call:
    """Take the arguments apart; a tensor elsewhere than on the device counts by value, if it is one number."""
    call = Call(key=None, tensors=[], objects=[])
    parts = [_part(value, call, device_type) for value in args]
    if kwargs:
        parts.append(tuple((name, _part(value, call, device_type)) for name, value in kwargs.items()))
    call.key = (len(args), tuple(parts), modes(device_type), _shared(call.tensors))
    if not call.reason and len({x.device for x in call.tensors}) > 1:
        call.reason = "its arguments are on several GPUs"
    return call


def _shared(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Which tensors share memory, by the first of each; nothing where none do. A graph copies each by itself."""
    storages = [x.untyped_storage()._cdata for x in tensors] if len(tensors) > 1 else []
    return tuple(map(storages.index, storages)) if len(set(storages)) < len(storages) else ()


def _part(value: Any, call: Call, device_type: str) -> Hashable:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _tensor_part(value, call, device_type)
    if kind in _BY_VALUE_EXACT:
        return kind, value
    if kind is float:
        return str(value.hex())  # apart: -0.0 and 0.0; alike: a NaN and itself
    if kind is tuple or kind is list:
        return kind, tuple([_part(item, call, device_type) for item in value])
    if kind is dict:
        return kind, tuple(value), tuple([_part(item, call, device_type) for item in value.values()])
    if (taken := _apart(value)) is not None:
        children, context = taken
        shape = context if _is_hashable(context) else repr(context)
        return kind, shape, tuple([_part(item, call, device_type) for item in children])
    if isinstance(value, _BY_VALUE):
        return kind, value
    call.objects.append(value)
    return Identity(value)


def _tensor_part(x: torch.Tensor, call: Call, device_type: str) -> Hashable:
    if type(x) not in PLAIN or x.layout != torch.strided:
        call.reason = call.reason or f"an argument is a {type(x).__name__} of layout {x.layout}, not a plain tensor"
        return "tensor", type(x)
    if x.device.type != device_type:
        if x.numel() != 1:
            call.reason = call.reason or f"an argument of shape {tuple(x.shape)} is on the {x.device.type.upper()}"
            return "tensor", x.device.type
        return "number", x.dtype, tuple(x.shape), repr(x.item())
    call.tensors.append(x)
    return x.shape, x.dtype, x.stride(), x.device, x.requires_grad, x.data_ptr() % ALIGNMENT


def is_tensor_part(part: Any) -> bool:
    """Whether this part of a key tells of a tensor on the device."""
    return type(part) is tuple and len(part) == 6 and type(part[0]) is torch.Size


def modes(device_type: str = "cuda") -> Hashable:
    """What is switched on around a call and chooses other kernels, or other numbers."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        private.matmul_precision(),
        private.flash_sdp(),
        private.efficient_sdp(),
        private.math_sdp(),
    )


def _apart(value: Any) -> tuple[list[Any], Any] | None:
    """The children of a container and what puts them together again, of kinds that PyTorch knows and of dataclasses."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None and isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), None
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), context
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        names = [field.name for field in dataclasses.fields(value)]
        return [getattr(value, name) for name in names], tuple(names)
    return None


def substitute(value: Any, put: Callable[[torch.Tensor], Any]) -> Any:
    """The same containers with another thing for each tensor; objects that are no containers stay themselves."""
    if isinstance(value, torch.Tensor):
        return put(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([substitute(item, put) for item in value])
    if kind is dict:
        return {key: substitute(item, put) for key, item in value.items()}
    taken = None if kind in _BY_VALUE_EXACT or kind is float else _apart(value)
    if taken is None:
        return value
    children, context = taken
    changed = [substitute(item, put) for item in children]
    if all(one is other for one, other in zip(children, changed, strict=True)):
        return value  # holds no tensor: an object with a life of its own stays itself
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return node.unflatten_fn(changed, context)
    if isinstance(value, tuple):
        return kind(*changed)
    copied = object.__new__(kind)  # a dataclass: no __init__, which may want other arguments
    for name, item in zip(context, changed, strict=True):
        object.__setattr__(copied, name, item)
    return copied


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def put(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    substitute(value, put)
    return found


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def gone_objects(key: Hashable) -> bool:
    """Whether a key can never be met again, for an object in it is no more."""
    if isinstance(key, Identity):
        return key.is_gone
    return isinstance(key, tuple) and any(gone_objects(part) for part in key)


def shapes_text(call: Call) -> str:
    """Its tensors as a line of a report says them.

    >>> shapes_text(describe((torch.ones(2, 3), 4), {}, "cpu"))
    '2×3 float32'
    """
    shapes = ["×".join(map(str, x.shape)) + f" {str(x.dtype).removeprefix('torch.')}" for x in call.tensors[:3]]
    return ", ".join([*shapes, "…"] if len(call.tensors) > 3 else shapes) or "no tensors"
