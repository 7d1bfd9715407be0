"""Modules of other tests live in this process, too: a cure acts on all that it sees, so it is shown a test's own."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sublight.fix.cure import first_call


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    others = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)}
    seen = SimpleNamespace(get_objects=lambda: [thing for thing in gc.get_objects() if id(thing) not in others])
    monkeypatch.setattr(first_call, "gc", seen)
