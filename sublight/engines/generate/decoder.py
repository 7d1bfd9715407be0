"""Decode steps over buffers that stay where they are: one CUDA graph for each size of batch, replayed.

A step's numbers (token, position, slot, length of each text, and the table of pages) are written on the host, and go to
the device in one copy each. With graphs a batch is padded to the next of BUCKETS, the table's width to a power of two:
how attention is cut depends on that width, so a short context is not cut as a long one is. Padding writes nowhere (slot
-1) and sees nothing (length 0).

A step may follow another whose tokens the host has not read: then the device takes each text's token from the row of
the step before. What the host writes lies twice, since the step before may not have been copied yet.
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
WHICH, POSITION, SLOT, LENGTH, ID, LAST = range(6)  # WHICH: the token's place among ID, which the host wrote, and LAST


class Decoder:
    def __init__(self, model: Llama, cache: Cache, *, most_texts: int, graphs: Backend | None) -> None:
        self.model, self.cache, self.graphs = model, cache, graphs
        self.device, self.page = cache.k.device, cache.k.shape[2]
        pages = cache.k.shape[1]
        self.width = min(-(-model.cos.shape[0] // self.page), pages)
        most = self._bucket(most_texts)
        is_pinned = self.device.type == "cuda"
        self.most = most
        self._numbers_there = torch.zeros(6, most, dtype=torch.int32, device=self.device)
        self._table_there = torch.zeros(most * self.width, dtype=torch.int32, device=self.device)
        self._staged = [
            [torch.zeros(count, dtype=torch.int32, pin_memory=is_pinned) for count in (LAST * most, most * self.width)]
            for _ in range(2)
        ]
        self._table = np.zeros(most * self.width, dtype=np.int32)
        self._row_of: list[tuple[Text | None, int, int]] = [(None, 0, 0)] * most  # whose pages a row of the table holds
        self._shape = (0, 0)
        self._captured: dict[tuple[int, int], Captured | None] = {}  # None: it could not be captured
        self._pool: Any = graphs.new_pool() if graphs else None

    def __call__(
        self, chunks: Sequence[Chunk], rows_before: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (texts, vocab) and the largest's place; good until the next call.

        With `rows_before` nobody knows the chunks' tokens yet: they are what these rows of the last call gave as the
        largest. The call before that one must have been waited for.
        """
        count = len(chunks)
        widest = max(len(chunk.text.pages) for chunk in chunks)
        size, width = (self._bucket(count), self._wide(widest)) if self.graphs else (count, widest)
        self._write(chunks, size, width, rows_before)
        captured = self._graph(size, width)
        if captured is None or self.graphs is None:
            logits, best = self._run(size, width, in_graph=False)
        else:
            self.graphs.enter(self._pool, self.device)
            captured.replay()
            logits, best = captured.outputs
        self._numbers_there[LAST, :count].copy_(best[:count])  # behind the graph, which capturing runs twice
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

    def _write(self, chunks: Sequence[Chunk], size: int, width: int, rows_before: Sequence[int] | None) -> None:
        """The host's numbers, and their copies to the device."""
        self._staged.reverse()
        staged_numbers, staged_table = self._staged[0]
        page, count, numbers = self.page, len(chunks), staged_numbers.numpy().reshape(LAST, self.most)
        rows = [
            (at, text.pages[at // page] * page + at % page, at + 1)
            for text, at in ((chunk.text, chunk.start) for chunk in chunks)
        ]
        numbers[POSITION : LENGTH + 1, :count] = np.array(rows, dtype=np.int32).T
        if rows_before is None:
            numbers[ID, :count] = [chunk.text.tokens[chunk.start] for chunk in chunks]
            numbers[WHICH, :count] = np.arange(count)
        else:
            numbers[WHICH, :count] = self.most + np.array(rows_before, dtype=np.int32)
        numbers[:, count:size] = ((0,), (0,), (-1,), (0,), (0,))
        self._numbers_there[:LAST].view(-1).copy_(staged_numbers, non_blocking=True)
        used = size * width
        if self._write_table(chunks, self._table[:used].reshape(size, width), (size, width)):
            staged_table.numpy()[:used] = self._table[:used]
            self._table_there[:used].copy_(staged_table[:used], non_blocking=True)

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

    def _run(self, size: int, width: int, *, in_graph: bool) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._numbers_there[:, :size]
        ids = self._numbers_there[ID:].view(-1).index_select(0, numbers[WHICH])
        table = self._table_there[: size * width].view(size, width)
        places = numbers[POSITION], numbers[SLOT], table, numbers[LENGTH]
        logits = self.model.decode(ids, *places, self.cache, in_graph=in_graph)
        return logits, largest(logits)

    def _graph(self, size: int, width: int) -> Captured | None:
        """The graph for this batch size; where none can be captured, decoding goes on without, with a warning once."""
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
                self._run(size, width, in_graph=True)
            graphs.prepare(self.device)
            return graphs.capture(lambda: self._run(size, width, in_graph=True), self._pool, self.device, ())
