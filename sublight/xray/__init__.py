"""A kernel's compiled self: registers, occupancy, instructions, transactions, bank conflicts; no GPU is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sublight.xray.examine import examine as page
    from sublight.xray.expect import Unexpected, check
    from sublight.xray.inputs.load import load_kernel

__all__ = ["Unexpected", "check", "load_kernel", "page"]
_HOMES = {
    "Unexpected": ("expect", "Unexpected"),
    "check": ("expect", "check"),
    "load_kernel": ("inputs.load", "load_kernel"),
    "page": ("examine", "examine"),
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'sublight.xray' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"sublight.xray.{module}"), attribute)
