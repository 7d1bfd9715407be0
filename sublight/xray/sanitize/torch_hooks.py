"""Torch under watch: which memory has no value yet, who gives it one, who reads it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sublight.backend import private
from sublight.xray.pretend.replaced import replaced
from sublight.xray.pretend.torch_cuda import OnCpu, modes_in_threads
from sublight.xray.sanitize.memory import Memory

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_SIZES_ONLY = ("_like", "is_same_size", "size", "stride", "numel", "new_zeros", "new_ones", "new_full", "sym_size")


class Reads(private.TorchDispatchMode):
    """Tells the shadow of every operation that makes, writes or reads a tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads Dynamo at the first operation, which takes as long as all the rest

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _EMPTY:
            made = func(*args, **kwargs)
            self.memory.created_empty(made)
            return made
        if self.memory.storages and not name.endswith(_SIZES_ONLY):
            self._read(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.memory.storages and func._schema.is_mutable:
            for value, declared in _declared(func, args, kwargs):
                if declared.alias_info is not None and declared.alias_info.is_write:
                    for tensor in _tensors(value):
                        self.memory.torch_writes(tensor)
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> None:
        for value, declared in _declared(func, args, kwargs):
            if declared.alias_info is None:  # neither written nor only looked at from another side
                for tensor in _tensors(value):
                    self.memory.torch_reads(tensor)


def _declared(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for i, declared in enumerate(func._schema.arguments):
        if i < len(args) and not declared.kwarg_only:
            yield args[i], declared
        elif declared.name in kwargs:
            yield kwargs[declared.name], declared


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@contextlib.contextmanager
def plain_comparisons() -> Iterator[None]:
    """torch.testing loads torch.distributed.tensor to compare, which takes a second: not where nobody else has."""
    comparison = private.comparison
    name = "_unwrap_dtensor_for_comparison"
    original = getattr(comparison, name, None)

    def unwrapped(actual: Any, expected: Any) -> Any:
        is_loaded = "torch.distributed.tensor" in sys.modules
        return original(actual, expected) if original and is_loaded else (actual, expected)

    with replaced(comparison, {name: unwrapped} if original else {}):
        yield


@contextlib.contextmanager
def watching(memory: Memory) -> Iterator[None]:
    """Torch under watch, in every thread."""

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with OnCpu(memory.torch_reads), Reads(memory):
            yield

    with modes_in_threads(modes):
        yield
