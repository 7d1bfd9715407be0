"""Tensors in shared memory: the parent owns, poisons and reads them; a child maps the same pages and computes there.

A child knows a tensor by its file, shape, strides and data type. What is right never lies in such a file.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from sublight.learn.grade.scratch import made

POISON = 0xFF  # in every byte: NaN in each floating-point type, -1 in integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a child needs to map a tensor."""

    file: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any, file: str = "") -> Spec:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(file=file, shape=tuple(tensor.shape), strides=tuple(tensor.stride()), dtype=dtype)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "shape": list(self.shape), "strides": list(self.strides), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Spec:
        return cls(file=data["file"], shape=tuple(data["shape"]), strides=tuple(data["strides"]), dtype=data["dtype"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A tensor on pages that another process may map, too."""

    spec: Spec
    pages: Any  # numpy bytes
    tensor: Any

    @classmethod
    def like(cls, tensor: Any, file: Path, *, is_poisoned: bool = True) -> Shared:
        """Room for such a tensor, its strides kept; gaps between its rows are poisoned, as everything is. A large one
        that will be written as a whole need not be: pages then come when they are touched."""
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        size_bytes = max(reach * tensor.element_size(), 1)
        descriptor = made(file, bytes([POISON]) * size_bytes if is_poisoned else b"")
        os.ftruncate(descriptor, size_bytes)
        with os.fdopen(descriptor, "r+b") as pages:
            return mapped(Spec.of(tensor, str(file)), pages)

    def poison(self) -> None:
        self.pages[...] = POISON

    def written(self) -> Any:
        """The elements that are not as `poison` left them: their numbers in the tensor as one long row."""
        import torch

        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.tensor.element_size()]
        return (self.tensor.view(whole) != -1).flatten().nonzero().flatten()

    def digest(self) -> bytes:
        """A digest of all of a buffer's bytes, the gaps between rows included."""
        return hashlib.blake2b(self.pages.tobytes()).digest()


def mapped(spec: Spec, file: IO[bytes] | None = None) -> Shared:
    """The tensor on its pages; of the file that is open, where the name is not to be trusted."""
    import torch

    pages = np.memmap(file or spec.file, np.uint8, mode="r+")
    flat = torch.from_numpy(pages).view(getattr(torch, spec.dtype))
    return Shared(spec=spec, pages=pages, tensor=flat.as_strided(spec.shape, spec.strides))
