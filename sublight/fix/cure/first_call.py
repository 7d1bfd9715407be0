"""Act once on a script's models, when the first of them is called: they are whole then, and nothing is compiled yet.

A hook on all modules would cost every call and be compiled into the model: it removes itself before the first one runs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def at_first_call(act: Callable[[list[torch.nn.Module]], None]) -> Iterator[None]:
    """`act` gets the models that live then: modules that are no part of another."""
    from torch.compiler import is_compiling
    from torch.nn.modules.module import register_module_forward_pre_hook

    def hook(module: Any, args: Any) -> None:
        if is_compiling():  # inside a compiled function: what is traced must hold nothing of ours
            return
        handle.remove()
        act(models(module))

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def models(called: torch.nn.Module) -> list[torch.nn.Module]:
    """All that live in this process, the one that is called first."""
    from torch.nn import Module

    every = [thing for thing in gc.get_objects() if issubclass(type(thing), Module)]
    parts = {id(child) for module in every for child in module.__dict__.get("_modules", {}).values()}
    roots = [module for module in every if id(module) not in parts and "_modules" in module.__dict__]
    return sorted(roots, key=lambda module: all(part is not called for part in module.modules()))


def precision(model: torch.nn.Module) -> str:
    """What a model runs in where it is called now, in words: "float32", "float32 with TF32 products"."""
    import torch

    device = next((p.device.type for p in model.parameters()), "cpu")
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point())
    words = " and ".join(dtypes) or "no data type of its own"
    if torch.is_autocast_enabled(device):
        return f"{words}, products in {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
    has_tf32 = device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return f"{words} with TF32 products" if has_tf32 and "float32" in dtypes else words


def has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None
