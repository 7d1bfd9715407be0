"""What PyTorch is doing while a call of ours comes in: tracing, transforming, capturing.

Calls on plain CUDA tensors in eager mode skip PyTorch's dispatcher, whose Python ops cost 5 µs and more. That is right
only while nobody else has to hear of the call: these functions tell. They read private names of PyTorch, all of which
are here; `doctor` runs `check`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd import forward_ad

PLAIN = (torch.Tensor, torch.nn.Parameter)
Who = Literal["", "compiler", "transform", "mode"]

dispatch_modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack
jit_trace = torch._C._get_tracing_state


def who_listens() -> Who:
    """Who else must hear of a call: a compiler that traces it, a transform that computes with it, or a mode.

    A transform (torch.func, forward-mode AD, torch.jit.trace) gets PyTorch's own ops, which all of them know. Modes
    (fake tensors, counters of FLOPs) and compilers get the op that is registered with PyTorch.
    """
    if torch.compiler.is_compiling():
        return "compiler"
    if transforms() is not None or forward_ad._current_level >= 0 or jit_trace() is not None:
        return "transform"
    return "mode" if dispatch_modes() > 0 else ""


def is_plain(tensors: list[torch.Tensor]) -> bool:
    """CUDA tensors of no class of their own, of which nobody else wants to hear."""
    return all(type(x) in PLAIN and x.is_cuda for x in tensors) and not who_listens()


def is_capturing() -> bool:
    """A CUDA graph is captured on the current stream."""
    return bool(torch.cuda.is_current_stream_capturing())


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its Python wrapper, which looks for functorch and default arguments each time."""
    base = getattr(torch._C, "_FunctionBase", None)
    direct = base.__dict__.get("apply") if base is not None else None
    return direct.__get__(None, function) if direct is not None else function.apply
