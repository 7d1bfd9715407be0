"""The order in which the process that runs scripts loads things."""

from __future__ import annotations

import gc
import importlib
import sys
from types import SimpleNamespace

import pytest

from sublight.xray.sanitize import process


def test_torch_alone_is_loaded_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, bool]] = []

    def step(name: str) -> SimpleNamespace:
        steps.append((name, gc.isenabled()))
        return SimpleNamespace(main=step)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib, "import_module", step)
    monkeypatch.setattr(gc, "freeze", lambda: step("put aside"))
    process.main("order.json")
    assert steps == [
        *(("torch", False), ("put aside", False)),
        *(("sublight.xray.sanitize.script", True), ("order.json", True)),
    ]
