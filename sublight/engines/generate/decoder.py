"""Decode steps over buffers that stay where they are: one CUDA graph for each size of batch, replayed.

A step's numbers (token, position, slot, length of each text, and the table of pages) are written on the host, and go to
the device in one copy each. With graphs a batch is padded to the next of BUCKETS, the table's width to a power of two:
how attention is cut depends on that width, so a short context is not cut as a long one is. Padding writes nowhere (slot
-1) and sees nothing (length 0).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sublight.engines.generate.llama import Cache, Llama
from sublight.engines.generate.sampling import largest
from sublight.engines.generate.scheduler import Chunk, Text
from sublight.fix.graph.backend import Backend, Captured

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batches that decode is captured for; beyond, no graph
LEAST_WIDTH = 64  # pages of a captured table
ID, POSITION, SLOT, LENGTH = range(4)


class Decoder:
    def __init__(self, model: Llama, cache: Cache, *, most_texts: int, graphs: Backend | None) -> None:
        self.model, self.cache, self.graphs = model, cache, graphs
        self.device, self.page = cache.k.device, cache.k.shape[2]
        pages = cache.k.shape[1]
        self.width = min(-(-model.cos.shape[0] // self.page), pages)
        most = self._bucket(most_texts)
        is_pinned = self.device.type == "cuda"
        self._numbers = torch.zeros(4, most, dtype=torch.int32, pin_memory=is_pinned)
        self._table = torch.zeros(most * self.width, dtype=torch.int32, pin_memory=is_pinned)
        self._numbers_there, self._table_there = (x.to(self.device) for x in (self._numbers, self._table))
        self._row_of: list[tuple[Text | None, int, int]] = [(None, 0, 0)] * most  # whose pages a row of the table holds
        self._shape = (0, 0)
        self._captured: dict[tuple[int, int], Captured | None] = {}  # None: it could not be captured
        self._pool: Any = graphs.new_pool() if graphs else None

    def __call__(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (texts, vocab) and the largest's place; good until the next call."""
        count = len(chunks)
        widest = max(len(chunk.text.pages) for chunk in chunks)
        size, width = (self._bucket(count), self._wide(widest)) if self.graphs else (count, widest)
        self._write(chunks, size, width)
        captured = self._graph(size, width)
        if captured is None or self.graphs is None:
            logits, best = self._run(size, width)
        else:
            self.graphs.enter(self._pool, self.device)
            captured.replay()
            logits, best = captured.outputs
        return logits[:count], best[:count]

    @property
    def graph_bytes(self) -> int:
        """Device memory that the graphs took."""
        return sum(each.pool_bytes + each.driver_bytes for each in self._captured.values() if each)

    @property
    def graph_count(self) -> int:
        return sum(each is not None for each in self._captured.values())

    def _bucket(self, count: int) -> int:
        return next((bucket for bucket in BUCKETS if bucket >= count), count)

    def _wide(self, pages: int) -> int:
        wide = LEAST_WIDTH
        while wide < pages:
            wide *= 2
        return min(wide, self.width)

    def _write(self, chunks: Sequence[Chunk], size: int, width: int) -> None:
        """The host's numbers, and their copies to the device. The last step's were waited for, so nobody reads them."""
        page, numbers = self.page, self._numbers.numpy()
        rows = [
            (text.tokens[at], at, text.pages[at // page] * page + at % page, at + 1)
            for text, at in ((chunk.text, chunk.start) for chunk in chunks)
        ]
        numbers[:, : len(rows)] = np.array(rows, dtype=np.int32).T
        numbers[:, len(rows) : size] = ((0,), (0,), (-1,), (0,))
        self._numbers_there.copy_(self._numbers, non_blocking=True)
        table = self._table[: size * width].view(size, width)
        if self._write_table(chunks, table.numpy(), (size, width)):
            self._table_there[: size * width].copy_(self._table[: size * width], non_blocking=True)

    def _write_table(self, chunks: Sequence[Chunk], table: np.ndarray[Any, Any], shape: tuple[int, int]) -> bool:
        """Rows that are not as they were; whether there are any."""
        is_new = shape != self._shape
        if is_new:
            self._shape, self._row_of = shape, [(None, 0, 0)] * len(self._row_of)
            table.fill(0)
        for row, chunk in enumerate(chunks):
            text = chunk.text
            was, begun, known = self._row_of[row]
            if was is not text or begun != text.begun:
                known = 0
            if known != len(text.pages):
                table[row, known : len(text.pages)] = text.pages[known:]
                self._row_of[row], is_new = (text, text.begun, len(text.pages)), True
        return is_new

    def _run(self, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._numbers_there[:, :size]
        table = self._table_there[: size * width].view(size, width)
        logits = self.model.decode(numbers[ID], numbers[POSITION], numbers[SLOT], table, numbers[LENGTH], self.cache)
        return logits, largest(logits)

    def _graph(self, size: int, width: int) -> Captured | None:
        """Of this size; where there is none to be had, launches go on without, and a warning says so once."""
        if self.graphs is None or size > BUCKETS[-1]:
            return None
        if (size, width) not in self._captured:
            try:
                self._captured[size, width] = self._capture(self.graphs, size, width)
            except RuntimeError as error:
                self._captured[size, width] = None
                reason = " ".join(str(error).split())[:200]
                warnings.warn(f"sublight: no CUDA graph for a batch of {size}: {reason}", RuntimeWarning, stacklevel=2)
        return self._captured[size, width]

    def _capture(self, graphs: Backend, size: int, width: int) -> Captured:
        """Once beside it first, so that kernels are compiled and workspaces there: that writes what the replay will."""
        with graphs.exclusive():
            with graphs.side(self.device):
                self._run(size, width)
            graphs.prepare(self.device)
            return graphs.capture(lambda: self._run(size, width), self._pool, self.device, ())
