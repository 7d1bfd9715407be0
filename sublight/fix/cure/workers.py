"""Batches made by workers beside the step, where the script's loader has none.

They start anew in each epoch, from the dataset as it is then. Workers that stay would keep the dataset of the first
epoch, whatever the script changes in it later, and shuffle the later epochs otherwise: another run, not a faster one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from sublight.fix.cure import place
from sublight.fix.cure.record import Changes, Cure, Edit

NAME = "loader workers"
MOST = 8
LINE = "DataLoader(dataset, batch_size=..., num_workers=...)"


def short_epochs(loader: Any) -> str:
    """What to know where an epoch is over before its workers have got ahead: each starts them, and waits."""
    try:
        batches = len(loader)
    except TypeError:  # a dataset or sampler without a length
        return ""
    if batches > 4 * loader.num_workers:
        return ""
    return (
        f"; an epoch has {batches} batches, and starts its workers first: persistent_workers=True saves more, where "
        "the script changes nothing in the dataset from epoch to epoch (they keep it as it was; the order changes)"
    )


def workers_for(cores: int) -> int:
    """Workers for a script that may use so many cores: one is left to the steps."""
    return max(1, min(MOST, cores - 1))


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    from torch.utils.data import DataLoader, IterableDataset

    own = DataLoader.__init__
    count = workers_for(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    def loader(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        lacks = len(args) < 5 and not kwargs.get("num_workers")  # the sixth argument is num_workers
        if lacks and isinstance(dataset, IterableDataset):
            changes.left[NAME] = "an IterableDataset must share its items among workers itself"
        elif lacks:
            own(self, dataset, *args, **{**kwargs, "num_workers": count})
            changes.left.pop(NAME, None)
            changes.did[NAME] = f"{count} worker{'s' * (count > 1)} for each loader that had none{short_epochs(self)}"
            if where := place.calling():
                text = f"num_workers={count}"
                changes.edit(Edit(kind="argument", file=where[0], line=where[1], text=text, call="DataLoader"))
            return
        own(self, dataset, *args, **kwargs)

    changes.left[NAME] = "the script makes no DataLoader without workers"
    DataLoader.__init__ = loader  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataLoader.__init__ = own  # type: ignore[method-assign]


WORKERS = Cure(
    name=NAME,
    treats=("data-loading",),
    line=LINE,
    where="where the loader is made",
    install=install,
)
