"""How tests call a graph: until it is warm, or until it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sublight.fix.graph.callable import Graph


def warm(g: Graph, *args: Any, **kwargs: Any) -> Any:
    for _ in range(3):
        out = g(*args, **kwargs)
    return out


def refused(g: Graph, *args: Any) -> str:
    """The reason that a function's calls are refused for, and its line."""
    with pytest.warns(UserWarning, match="sublight.graph"):
        for _ in range(12):
            g(*args)
    (row,) = g.report().eager
    assert g.report().graphs == ()
    return f"{row.reason} | {row.line}"
