"""Exercises from the first copy to attention, each judged by correctness and by the fraction of a GPU's limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sublight.learn.notebook import check, hint, show, solution

__all__ = ["check", "hint", "show", "solution"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sublight.learn' has no attribute {name!r}")
    from sublight.learn import notebook

    return getattr(notebook, name)
