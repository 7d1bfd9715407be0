"""Notes what torch computes while a submission runs: it may make buffers and views, no more."""

from __future__ import annotations

import sys
from typing import Any

from sublight.backend import private

ALLOWED = {  # by the names of ATen
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
    *("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "lift_fresh", "detach", "alias"),
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "slice", "select", "expand", "permute"),
    *("transpose", "t", "unsqueeze", "squeeze", "split", "narrow", "unfold"),
    *("is_same_size", "size", "stride", "numel", "sym_size", "sym_stride", "sym_numel", "is_contiguous"),
}


class Guard(private.TorchDispatchMode):
    """Names every other operation, with the submission's line."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads Dynamo at the first operation

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.noted: dict[str, int] = {}  # operation -> line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ALLOWED:
            self.noted.setdefault(name, self._line())
        return func(*args, **(kwargs or {}))

    def _line(self) -> int:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0
