"""What PyTorch is doing while a call of ours comes in: tracing, transforming, capturing.

Calls on plain CUDA tensors in eager mode skip PyTorch's dispatcher, whose Python ops cost 5 µs and more. That is right
only while no compiler, transform or mode has to see the call: these functions say whether one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch.autograd import forward_ad

from sublight.backend import private

PLAIN = (torch.Tensor, torch.nn.Parameter)
T = TypeVar("T")
Who = Literal["", "compiler", "transform", "mode"]

dispatch_modes, transforms, jit_trace = private.dispatch_modes, private.transforms, private.jit_trace


def constant_when_compiled(function: Callable[[], T]) -> Callable[[], T]:
    """To torch.compile, what the function returns is a constant. PyTorch's own decorator for that loads the compiler,
    which takes a second or more of every process's first call."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_forward_ad() -> bool:
    """Forward-mode AD is on: tensors may have tangents."""
    return bool(forward_ad._current_level >= 0)


def who_listens() -> Who:
    """Who else must see a call: a compiler that traces it, a transform that computes with it, a mode, or nobody.

    A transform (torch.func, forward-mode AD, torch.jit.trace) gets PyTorch's own ops, which all of them know. Modes
    (fake tensors, counters of FLOPs) and compilers get the op that is registered with PyTorch.
    """
    if torch.compiler.is_compiling():
        return "compiler"
    if transforms() is not None or is_forward_ad() or jit_trace() is not None:
        return "transform"
    return "mode" if dispatch_modes() > 0 else ""


def is_plain(tensors: list[torch.Tensor]) -> bool:
    """Whether all are plain CUDA tensors (no subclass), and no compiler, transform or mode must see the call."""
    return all(type(x) in PLAIN and x.is_cuda for x in tensors) and not who_listens()


def is_capturing() -> bool:
    """A CUDA graph is captured on the current stream."""
    return bool(torch.cuda.is_current_stream_capturing())


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its Python wrapper, which looks for functorch and default arguments each time."""
    try:
        return private.FunctionBase.__dict__["apply"].__get__(None, function)
    except (private.Missing, KeyError):
        return function.apply
