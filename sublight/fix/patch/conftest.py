"""For all tests of patching."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def always_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where ours wins for every shape."""
    from sublight.fix.patch import model as patching

    monkeypatch.setattr(patching, "asked", lambda model, found, batch: found)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one, without a port; PyTorch sets an excepthook that names the rank, and leaves it there."""
    import torch.distributed as distributed

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
