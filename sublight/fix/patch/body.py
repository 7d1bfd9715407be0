"""A stand-in for a language model's body, under a head that is tried out: it notes what it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sublight.fix.patch.trace import as_one_op
from sublight.fix.patch.twin import random

FEATURES, BATCH, TOKENS = 8, 2, 5


@dataclass(frozen=True, slots=True)
class Named:
    """An argument or a result that can be told from all others wherever it turns up."""

    name: str


class Results:
    """The body's: random hidden states, and any other field by its name."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


class Body(torch.nn.Module):
    """Stands in for what lies under the head."""

    def __init__(self) -> None:
        super().__init__()
        self.called: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.hidden = hidden_states()

    def forward(self, *args: Any, **kwargs: Any) -> Results:
        self.called = args, kwargs
        with as_one_op("body"):
            return Results(self.hidden)


def hidden_states(scale: float = 1.0) -> torch.Tensor:
    return random(BATCH, TOKENS, FEATURES) * scale
