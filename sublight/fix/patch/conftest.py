"""For all tests of patching."""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sublight import correct


def error_of_all(ours: Iterable[Any], theirs: Iterable[Any], truth: Iterable[Any]) -> correct.Error:
    """One error by the rule for many tensors, as a model's gradients are: each scaled to the size of its largest value
    (by a power of two, which is exact), then pooled. A tensor of few numbers has no error of its own: it is luck."""
    pooled: correct.Error | None = None
    for one, other, true in zip(ours, theirs, truth, strict=True):
        largest = float(true.detach().abs().max())
        scale = 2.0 ** -math.frexp(largest)[1] if largest else 1.0
        error = correct.error("all", *(x.detach() * scale for x in (one, other, true)))
        pooled = error if pooled is None else pooled.merge(error)
    assert pooled is not None, "nothing to compare"
    return pooled


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
