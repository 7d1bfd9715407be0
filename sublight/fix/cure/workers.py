"""Batches made by workers beside the step, where the script's loader has none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from sublight.fix.cure import place
from sublight.fix.cure.record import Cure, Edit, Told

NAME = "loader workers"
MOST = 8
LINE = "DataLoader(dataset, batch_size=..., num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)"


def short_epochs(loader: Any) -> str:
    """What to know where an epoch is over before its workers have got ahead: each begins with a wait."""
    try:
        batches = len(loader)
    except TypeError:  # a dataset or sampler without a length
        return ""
    if batches > 4 * loader.num_workers:
        return ""
    return f"; an epoch has {batches} batches, and waits for its first: longer ones would save more"


@contextlib.contextmanager
def install(told: Told) -> Iterator[None]:
    from torch.utils.data import DataLoader, IterableDataset

    own = DataLoader.__init__
    count = max(1, min(MOST, (os.cpu_count() or 1) - 1))

    def loader(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        lacks = len(args) < 5 and not kwargs.get("num_workers")  # the sixth argument is num_workers
        if lacks and isinstance(dataset, IterableDataset):
            told.left[NAME] = "an IterableDataset must share its items among workers itself"
        elif lacks:
            own(self, dataset, *args, **{**kwargs, "num_workers": count, "persistent_workers": True})
            told.left.pop(NAME, None)
            told.did[NAME] = f"{count} worker{'s' * (count > 1)} for each loader that had none{short_epochs(self)}"
            if where := place.calling():
                text = f"num_workers={count}, persistent_workers=True"
                told.edit(Edit(kind="argument", file=where[0], line=where[1], text=text, call="DataLoader"))
            return
        own(self, dataset, *args, **kwargs)

    told.left[NAME] = "the script makes no DataLoader without workers"
    DataLoader.__init__ = loader  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataLoader.__init__ = own  # type: ignore[method-assign]


@contextlib.contextmanager
def shuffled_alike() -> Iterator[None]:
    """In every run, so that runs can be compared: a loader whose workers stay shuffles as one without workers does.

    Workers that stay draw no seed in later epochs: it is drawn for them.
    """
    import torch
    from torch.utils.data import DataLoader

    own = DataLoader.__iter__

    def iterate(self: Any) -> Any:
        if self.persistent_workers and self._iterator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return own(self)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = own  # type: ignore[method-assign]


WORKERS = Cure(
    name=NAME,
    treats=("data-loading",),
    line=LINE,
    where="where the loader is made",
    install=install,
)
