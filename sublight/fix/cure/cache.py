"""PyTorch's cached memory is kept, whatever the script asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sublight.fix.cure import place
from sublight.fix.cure.record import Cure, Edit, Told

NAME = "keep the cache"
CALL = "torch.cuda.empty_cache()"


@contextlib.contextmanager
def install(told: Told) -> Iterator[None]:
    import torch

    own = torch.cuda.empty_cache

    def empty_cache() -> None:
        if NAME in told.left:
            del told.left[NAME]
            told.did[NAME] = f"{CALL} does nothing"
        if len(told.edits) < 8 and (where := place.calling()):
            told.edit(Edit(kind="instead", file=where[0], line=where[1], text="pass", call="empty_cache"))

    told.left[NAME] = f"the script does not call {CALL}"
    torch.cuda.empty_cache = empty_cache
    try:
        yield
    finally:
        torch.cuda.empty_cache = own


CACHE = Cure(
    name=NAME,
    treats=("allocator-thrash",),
    line=f"# no {CALL} in the loop",
    where="in the step",
    install=install,
    needs_gpu=True,
)
