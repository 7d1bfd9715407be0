"""Where an allocation was made, read off its stack: the user's line, the modules around it, the part of the step.

All of it is a heuristic: a stack holds function names and files, never the class of a module or what a tensor is for.
The frame nearest to the allocation that tells a part of the step decides it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sublight.trace.memory.snapshot import Frame, Stack

Phase = Literal["build", "forward", "backward", "optimizer", "other", "before"]
NOWHERE = "not recorded"

_LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages)/|/lib/python3[^/]*/|^<(frozen|string|eval)|torchinductor_")
_TORCH_PARTS = "nn|optim|autograd|utils|cuda|_dynamo|_inductor|_functorch|distributed|amp|fx|_ops|_tensor|functional"
_TORCH = re.compile(rf"(^|/)torch/({_TORCH_PARTS})[/.]")
_BUILD = frozenset(("__init__", "reset_parameters", "_apply", "load_state_dict", "from_pretrained", "to_empty"))
_FORWARD = frozenset(("forward", "_call_impl", "_wrapped_call_impl"))
_LOSS = re.compile(r"cross_entropy|log_softmax|nll_loss|(^|_)logits|lm_head|(^|_)loss", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place that allocates."""

    name: str  # the function or the op
    source: str = ""  # "train.py:41"
    module: str = ""  # "gpt.py:88 › gpt.py:41 › linear", or as the trace names them
    phase: Phase = "other"
    loss: bool = False  # a loss or its logits, by the names around it


def site(stack: Stack, *, empty: Phase = "other") -> Site:
    """The place that a stack stands for; `empty` is the part of the step where there is none."""
    if not stack:
        name = "backward (no Python stack)" if empty == "backward" else NOWHERE
        return Site(name=name, phase=empty)
    frame = user_frame(stack)
    where = phase_of(stack)
    return Site(
        name=_short_name(frame),
        source=f"{_base(frame.filename)}:{frame.line}" if _is_python(frame) else "",
        module=module_path(stack) if where in ("forward", "backward") else "",
        phase=where,
        loss=where == "forward" and is_loss(frame.name for frame in stack if _is_python(frame)),
    )


def is_loss(names: Iterable[str]) -> bool:
    """
    >>> is_loss(["aten::log_softmax"]), is_loss(["forward", "glossary"])
    (True, False)
    """
    return any(_LOSS.search(name.removeprefix("aten::")) for name in names)


def user_frame(stack: Sequence[Frame]) -> Frame:
    """The innermost frame of the user's own code; else of a library, else of torch, else whatever there is.

    >>> user_frame((Frame("??", 0, "at::empty"), Frame("/x/site-packages/torch/nn/functional.py", 3, "linear"),
    ...             Frame("/home/me/gpt.py", 41, "forward"))).line
    41
    """
    python = [frame for frame in stack if _is_python(frame)]
    for chosen in (_is_users, _is_other_library):
        for frame in python:
            if chosen(frame.filename):
                return frame
    return python[0] if python else stack[0]


def phase_of(stack: Sequence[Frame]) -> Phase:
    """The part of a training step, from the frame nearest to the allocation that tells one.

    >>> phase_of((Frame("/x/torch/optim/adamw.py", 90, "_init_group"), Frame("train.py", 9, "<module>")))
    'optimizer'
    >>> phase_of((Frame("Engine.cpp", 0, "torch::autograd::Engine::evaluate_function(...)"),))
    'backward'
    >>> phase_of((Frame("gpt.py", 41, "forward"), Frame("/x/torch/_tensor.py", 5, "backward")))  # checkpointing
    'forward'
    >>> phase_of((Frame("/x/torch/nn/modules/module.py", 900, "_apply"), Frame("train.py", 3, "<module>")))
    'build'
    """
    for frame in stack:
        if (found := _phase(frame.filename, _short_name(frame))) is not None:
            return found
    return "other"


@functools.lru_cache(maxsize=100_000)
def _phase(filename: str, name: str) -> Phase | None:
    filename = filename.replace("\\", "/")
    if "autograd::Engine" in name or "autograd::AccumulateGrad" in name or name in ("backward", "_engine_run_backward"):
        return "backward"
    if not filename.endswith((".py", ">")):  # what else is C++ tells nothing
        return None
    if re.search(r"(^|/)torch/optim/", filename) or (name == "step" and "optim" in filename.lower()):
        return "optimizer"
    if re.search(r"(^|/)torch/nn/init\.py$", filename) or name in _BUILD:
        return "build"
    if name in _FORWARD or re.search(r"(^|/)torch/nn/functional\.py$", filename):
        return "forward"
    return None


def module_path(stack: Sequence[Frame]) -> str:
    """The modules around an allocation, outermost first, by the lines of their `forward`.

    >>> module_path((Frame("/x/torch/nn/modules/linear.py", 125, "forward"), Frame("/me/gpt.py", 41, "forward"),
    ...              Frame("/x/torch/nn/modules/module.py", 1, "_call_impl"), Frame("/me/gpt.py", 88, "forward")))
    'gpt.py:88 › gpt.py:41 › linear'
    """
    labels = []
    for frame in reversed(stack):
        if _short_name(frame) != "forward" or not _is_python(frame):
            continue
        if _TORCH.search(frame.filename.replace("\\", "/")):
            label = _base(frame.filename).removesuffix(".py")
            if label == "container":  # Sequential and its like add nothing
                continue
        else:
            owner = frame.name.rpartition(".")[0]
            label = owner or f"{_base(frame.filename)}:{frame.line}"
        labels.append(label)
    return " › ".join(labels)


def _short_name(frame: Frame) -> str:
    """
    >>> _short_name(Frame("gpt.py", 3, "Block.forward")), _short_name(Frame("a.cpp", 1, "at::empty(int)"))
    ('forward', 'at::empty(int)')
    """
    return frame.name if "::" in frame.name or "<" in frame.name else frame.name.rpartition(".")[2]


def _base(filename: str) -> str:
    return re.split(r"[\\/]", filename)[-1]


def _is_python(frame: Frame) -> bool:
    return frame.filename.endswith(".py") or (frame.filename.startswith("<") and "::" not in frame.name)


def _is_users(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return not _LIBRARY.search(path) and not _TORCH.search(path)


def _is_other_library(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return not path.startswith("<") and not _TORCH.search(path) and "torchinductor_" not in path
