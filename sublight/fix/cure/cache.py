"""PyTorch's cached memory is kept, whatever the script asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sublight.fix.cure import place
from sublight.fix.cure.record import Changes, Cure, Edit

NAME = "keep the cache"
CALL = "torch.cuda.empty_cache()"


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    import torch

    own = torch.cuda.empty_cache

    def empty_cache() -> None:
        if NAME in changes.left:
            del changes.left[NAME]
            changes.did[NAME] = f"{CALL} does nothing"
        if len(changes.edits) < 8 and (where := place.calling()):
            changes.edit(Edit(kind="instead", file=where[0], line=where[1], text="pass", call="empty_cache"))

    changes.left[NAME] = f"the script does not call {CALL}"
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
