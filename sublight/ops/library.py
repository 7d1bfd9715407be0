"""Registers our ops with PyTorch, so that autograd, torch.compile and CUDA graphs know them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch


class Library:
    """The namespace torch.ops.sublight."""

    def __init__(self) -> None:
        self._library = torch.library.Library("sublight", "DEF")

    def op(
        self,
        schema: str,
        *,
        cpu: Callable[..., Any],
        cuda: Callable[..., Any],
        fake: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
    ) -> None:
        """One op: what runs on each device, the shapes it gives, and how its gradient is found."""
        name = f"sublight::{schema.split('(')[0]}"
        self._library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._library.impl(name, cpu, "CPU")
        self._library.impl(name, cuda, "CUDA")
        torch.library.register_fake(name, fake, lib=self._library)
        if backward is not None:
            torch.library.register_autograd(name, backward, setup_context=setup_context, lib=self._library)


LIBRARY = Library()


@functools.cache
def peer(module: str, name: str) -> Any:
    """Somebody else's implementation; ImportError where it is not installed."""
    return getattr(importlib.import_module(module), name)
