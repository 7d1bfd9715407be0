"""Batches copied from pinned memory on a stream of their own, beside the step that still runs.

What `.to(device)` promises is kept: the batch may be written into when the call returns, and the stream that computes
waits for the copy. A batch that comes once goes through pinned memory; one that comes again is pinned where it lies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sublight.backend import private
from sublight.fix.cure import place
from sublight.fix.cure.record import Changes, Cure, Edit

if TYPE_CHECKING:
    import torch

NAME = "pinned copies"
LEAST_BYTES = 1 << 16  # a smaller copy is there for its latency
MOST_BYTES = 8 << 30  # pinned in place, all together


class Copier:
    """Moves batches; what it pinned in place it holds, for memory must not be freed while it is pinned."""

    def __init__(self, own: Callable[..., Any], changes: Changes) -> None:
        self._own, self._changes = own, changes
        self._streams: dict[Any, Any] = {}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._held: dict[int, torch.Tensor] = {}  # by address of the storage
        self._held_bytes = 0

    def move(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        import torch

        was_pinned = x.is_pinned()
        source = x if was_pinned or self._pin(x) else x.pin_memory()
        current = torch.cuda.current_stream(device)
        side = self._streams.setdefault(current.device, None) or torch.cuda.Stream(current.device)
        self._streams[current.device] = side
        with torch.cuda.stream(side):
            moved: torch.Tensor = self._own(source, device, non_blocking=True)
            done = side.record_event()
        current.wait_event(done)
        moved.record_stream(current)  # its memory is this stream's until it is past it
        if source is x:
            done.synchronize()  # the copy alone: the script may write into the batch next
        self._tell(was_pinned)
        return moved

    def _pin(self, x: torch.Tensor) -> bool:
        """Pin the memory of a batch that came before; whether it is pinned."""
        import torch

        base = x if x._base is None else x._base
        storage = base.untyped_storage()
        if storage.data_ptr() in self._held:
            return True
        before = self._seen.get(id(base))
        self._seen[id(base)] = weakref.ref(base)
        if before is None or before() is not base or self._held_bytes + storage.nbytes() > MOST_BYTES:
            return False
        if int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)):
            return False
        self._held[storage.data_ptr()] = base
        self._held_bytes += storage.nbytes()
        return True

    def _tell(self, was_pinned: bool) -> None:
        if NAME not in self._changes.did:
            self._changes.did[NAME] = "batches go through pinned memory, on a stream of their own"
            self._changes.left.pop(NAME, None)
            if where := place.calling():
                file, line = where
                for call in ("to", "cuda"):
                    self._changes.edit(Edit(kind="argument", file=file, line=line, text="non_blocking=True", call=call))
                    if not was_pinned:  # else non_blocking would change nothing
                        self._changes.edit(Edit(kind="chained", file=file, line=line, text=".pin_memory()", call=call))


def takes(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The GPU that this call of `.to` moves a batch to; None: it is none of ours."""
    import torch

    if type(x) is not torch.Tensor or x.is_cuda or x.requires_grad or x.nbytes < LEAST_BYTES:
        return None
    if x.device.type != "cpu" or x.layout != torch.strided or torch.compiler.is_compiling():
        return None
    try:
        device, dtype, non_blocking, memory_format = private.parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return None
    if device is None or device.type != "cuda" or dtype not in (None, x.dtype) or memory_format is not None:
        return None
    if (non_blocking and x.is_pinned()) or torch.cuda.is_current_stream_capturing():
        return None
    return device  # type: ignore[no-any-return]


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    import torch
    from torch.utils.data import DataLoader

    own_to, own_cuda, own_loader = torch.Tensor.to, torch.Tensor.cuda, DataLoader.__init__
    copier = Copier(own_to, changes)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = takes(self, args, kwargs)
        return own_to(self, *args, **kwargs) if device is None else copier.move(self, device)

    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = takes(self, ("cuda",), {}) if not args and not kwargs else None
        return own_cuda(self, *args, **kwargs) if device is None else copier.move(self, device)

    def loader(self: Any, *args: Any, **kwargs: Any) -> None:
        if "pin_memory" not in kwargs and len(args) < 8 and torch.cuda.is_available():
            kwargs["pin_memory"] = True
            if where := place.calling():
                changes.edit(
                    Edit(kind="argument", file=where[0], line=where[1], text="pin_memory=True", call="DataLoader")
                )
        own_loader(self, *args, **kwargs)

    changes.left[NAME] = "no batch was copied to a GPU by .to() or .cuda()"
    torch.Tensor.to, torch.Tensor.cuda = to, cuda  # type: ignore[method-assign, assignment]
    DataLoader.__init__ = loader  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.cuda = own_to, own_cuda  # type: ignore[method-assign]
        DataLoader.__init__ = own_loader  # type: ignore[method-assign]


PINNED = Cure(
    name=NAME,
    treats=("pageable-copy",),
    line="loader = DataLoader(dataset, ..., pin_memory=True)\nbatch = batch.to(device, non_blocking=True)",
    where="where batches are loaded and copied; the next one before this step's work, on a stream of its own",
    install=install,
    needs_gpu=True,
)
