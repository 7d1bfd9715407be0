"""The engine: requests in, tokens out. A step is: schedule, prefill chunks, decode the rest at once, sample, append."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sublight.engines.generate.llama import Cache, Llama
from sublight.engines.generate.pages import Pages
from sublight.engines.generate.sampling import Sampling, choose
from sublight.engines.generate.scheduler import Chunk, Scheduler, Text, tables
from sublight.errors import BadInput

PAGE = 16
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batches that decode is captured for
Decode = Callable[..., torch.Tensor]


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, how it goes on, and what came of it."""

    prompt: list[int]
    most_new: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    is_stopped: Callable[[list[int]], bool] | None = None  # by its new tokens: a stop word
    new: list[int] = field(default_factory=list)
    finish: str = ""  # "stop" or "length"


class Engine:
    def __init__(
        self,
        model: Llama,
        *,
        pages: int,
        page: int = PAGE,
        most_texts: int = 64,
        most_tokens: int = 512,
        wrap_decode: Callable[[Decode], Decode] | None = None,
    ) -> None:
        """`most_tokens` of a step bound a prefill's chunk; with `wrap_decode` (sublight.graph) batches are padded."""
        self.model, self.device = model, model.weights.tokens.device
        self.scheduler = Scheduler(Pages(pages, page), most_texts=most_texts, most_tokens=most_tokens)
        self.cache = Cache(model.config, pages, page, model.weights.tokens)
        self.is_padded = wrap_decode is not None
        self._decode = wrap_decode(self._decode_plain) if wrap_decode else self._decode_plain
        self._width = -(-min(model.cos.shape[0], pages * page) // page)  # of a table of pages
        self._requests: dict[int, tuple[Request, torch.Generator]] = {}  # by their text

    def add(self, request: Request) -> Text:
        longest = len(request.prompt) + request.most_new
        if request.most_new < 1:
            raise BadInput(f"{request.most_new} new tokens: give 1 or more")
        if longest > self.model.cos.shape[0]:
            raise BadInput(f"{longest} tokens are more than the model's {self.model.cos.shape[0]}: shorten the prompt")
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self.model.config.vocab:
            raise BadInput(f"the prompt has tokens outside of 0 to {self.model.config.vocab - 1}: use the model's own")
        text = Text(list(request.prompt), longest)
        self.scheduler.add(text)
        self._requests[id(text)] = (request, torch.Generator().manual_seed(request.sampling.seed))
        return text

    def cancel(self, text: Text) -> None:
        self.scheduler.cancel(text)
        self._requests.pop(id(text), None)

    def step(self) -> list[tuple[Request, int]]:
        """The new tokens of one step."""
        chunks = self.scheduler.next_step()
        if not chunks and not self.scheduler.is_idle:
            raise RuntimeError("no text can go on")  # the scheduler's tests hold that this never is
        decodes = [chunk for chunk in chunks if chunk.count == 1 and chunk.start]
        prefills = [chunk for chunk in chunks if not (chunk.count == 1 and chunk.start)]
        rows = [(chunk, self._prefill(chunk)) for chunk in prefills]
        if decodes:
            rows += list(zip(decodes, self._decode_batch(decodes), strict=True))
        for chunk in chunks:
            self.scheduler.done(chunk)
        ready = [(chunk.text, logits) for chunk, logits in rows if chunk.ends_the_text]
        if not ready:
            return []
        mine = [self._requests[id(text)] for text, _ in ready]
        logits = torch.stack([each for _, each in ready])
        tokens = choose(logits, [request.sampling for request, _ in mine], [generator for _, generator in mine])
        for (text, _), (request, _), token in zip(ready, mine, tokens, strict=True):
            self._append(text, request, token)
        return [(request, token) for (request, _), token in zip(mine, tokens, strict=True)]

    def _append(self, text: Text, request: Request, token: int) -> None:
        request.new.append(token)
        ends = token in request.ends or (request.is_stopped is not None and request.is_stopped(request.new))
        self.scheduler.append(text, token, ends=ends)
        if text.is_over:
            request.finish = "stop" if ends else "length"
            del self._requests[id(text)]

    def _numbers(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def _prefill(self, chunk: Chunk) -> torch.Tensor:
        ids = self._numbers(chunk.text.tokens[chunk.start : chunk.start + chunk.count], torch.int64)
        slots = self._numbers(self.scheduler.slots(chunk), torch.int64)
        return self.model.prefill(ids, chunk.start, slots, self._numbers(chunk.text.pages, torch.int64), self.cache)

    def _decode_batch(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Padding writes nowhere (slot -1) and sees nothing (length 0)."""
        count = len(chunks)
        size = next((bucket for bucket in BUCKETS if bucket >= count), count) if self.is_padded else count
        rest = [0] * (size - count)
        ids = self._numbers([chunk.text.tokens[chunk.start] for chunk in chunks] + rest, torch.int64)
        positions = self._numbers([chunk.start for chunk in chunks] + rest, torch.int64)
        slots = self._numbers([self.scheduler.slots(chunk)[0] for chunk in chunks] + [-1] * len(rest), torch.int64)
        width = self._width if self.is_padded else max(len(chunk.text.pages) for chunk in chunks)
        table = self._numbers([*tables(chunks, width), *[[0] * width] * len(rest)], torch.int32)
        lengths = self._numbers([chunk.start + 1 for chunk in chunks] + rest, torch.int32)
        return self._decode(ids, positions, slots, table, lengths)[:count]

    def _decode_plain(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        return self.model.decode(ids, positions, slots, table, lengths, self.cache)

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, int]]:
        """All of them, each new token as it comes."""
        for request in requests:
            self.add(request)
        while not self.scheduler.is_idle:
            yield from self.step()
