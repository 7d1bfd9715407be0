"""Exercises from the first copy to attention, each judged by correctness and by the fraction of a GPU's limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sublight.learn.notebook import check

__all__ = ["check"]


def __getattr__(name: str) -> Any:
    if name != "check":
        raise AttributeError(f"module 'sublight.learn' has no attribute {name!r}")
    from sublight.learn.notebook import check

    return check
