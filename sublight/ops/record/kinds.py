"""Arguments of the wrong kind, told in one line: a list where a tensor belongs, a word where a number does.

An op looks at them where it makes a plan, once for each kind of call: a call that is right pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sublight.errors import BadInput

NUMBERS = {"float": ("__float__", "a number"), "int": ("__index__", "a whole number")}


def check(name: str, kinds: Mapping[str, str], args: tuple[Any, ...]) -> None:
    """Refuse arguments of other kinds than an op's schema says; None is left to the op itself to refuse."""
    for (argument, kind), value in zip(kinds.items(), args, strict=False):
        word = kind.removeprefix("Optional[").removesuffix("]")
        if wrong := "" if value is None and word != kind else _wrong(word, value):
            raise BadInput(f"{name} takes {wrong} for {argument}, not {_shown(value)}")


def check_devices(name: str, kinds: Mapping[str, str], args: tuple[Any, ...]) -> None:
    """Refuse tensors on different devices: a kernel cannot read another device's memory."""
    given = [(argument, x) for argument, x in zip(kinds, args, strict=False) if isinstance(x, torch.Tensor)]
    for argument, x in given[1:]:
        if x.device != given[0][1].device:
            raise BadInput(
                f"{name}: {argument} is on {x.device}, {given[0][0]} on {given[0][1].device}:"
                " they must be on one device"
            )


def _wrong(word: str, value: Any) -> str:
    """What belongs there instead; empty where the value fits, or the word says nothing here."""
    if word == "Tensor":
        return "" if isinstance(value, torch.Tensor) else "a torch.Tensor"
    method, wanted = NUMBERS.get(word, ("__class__", ""))
    return "" if hasattr(value, method) or isinstance(value, torch.dtype) else wanted  # which a schema has as "int"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | float | int | None) else type(value).__name__
