"""The engine: requests in, tokens out. A step is: schedule, prefill chunks, decode the rest at once, sample, append."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sublight.engines.generate.decoder import Decoder
from sublight.engines.generate.llama import Cache, Llama
from sublight.engines.generate.pages import Pages
from sublight.engines.generate.sampling import Draw, Logprobs, Sampling, choose
from sublight.engines.generate.scheduler import Chunk, Scheduler, Text
from sublight.errors import BadInput
from sublight.fix.graph.backend import Backend, Cuda

PAGE = 16


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, how it goes on, and what came of it."""

    prompt: list[int]
    most_new: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    is_stopped: Callable[[list[int]], bool] | None = None  # by its new tokens: a stop word
    new: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # a token each, where they are wanted
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
        graphs: Backend | bool = True,
    ) -> None:
        """`most_tokens` of a step bound a prefill's chunk; `graphs` are CUDA's on a GPU, unless told otherwise."""
        self.model, self.device = model, model.weights.tokens.device
        self.scheduler = Scheduler(Pages(pages, page), most_texts=most_texts, most_tokens=most_tokens)
        self.cache = Cache(model.config, pages, page, model.weights.tokens)
        if isinstance(graphs, bool):
            by: Backend | None = Cuda() if graphs and self.device.type == "cuda" else None
        else:
            by = graphs
        self.decoder = Decoder(model, self.cache, most_texts=most_texts, graphs=by)
        self._requests: dict[Text, tuple[Request, Draw]] = {}

    def add(self, request: Request) -> Text:
        longest = len(request.prompt) + request.most_new
        if request.most_new < 1:
            raise BadInput(f"{request.most_new} new tokens: give 1 or more")
        if longest > self.model.cos.shape[0]:
            raise BadInput(f"{longest} tokens are more than the model's {self.model.cos.shape[0]}: shorten the prompt")
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self.model.config.vocab:
            raise BadInput(f"the prompt has tokens outside of 0 to {self.model.config.vocab - 1}: use the model's own")
        draw = Draw(request.sampling, request.prompt, self.model.config.vocab, self.device)
        text = Text(list(request.prompt), longest)
        self.scheduler.add(text)
        self._requests[text] = (request, draw)
        return text

    def cancel(self, text: Text) -> None:
        self.scheduler.cancel(text)
        self._requests.pop(text, None)

    def reset(self) -> None:
        """After a step that failed: no text is left, and the device is asked whether it still answers."""
        for text in list(self._requests):
            self.cancel(text)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> list[tuple[Request, int]]:
        """The new tokens of one step. The device is waited for once, when they are read."""
        chunks = self.scheduler.next_step()
        if not chunks and not self.scheduler.is_idle:
            raise RuntimeError("no text can go on")  # the scheduler's tests hold that this never is
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        prefills = [chunk for chunk in chunks if not chunk.is_decode]
        firsts = [(chunk, self._prefill(chunk)) for chunk in prefills]
        ready = [(chunk, row) for chunk, row in firsts if chunk.ends_the_text]
        parts = [(row[None], row.argmax(-1)[None]) for _, row in ready]
        ended = [chunk for chunk, _ in ready]
        if decodes:
            parts.append(self.decoder(decodes))
            ended += decodes
        for chunk in chunks:
            self.scheduler.done(chunk)
        if not ended:
            return []
        mine = [self._requests[chunk.text] for chunk in ended]
        logits, best = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
        tokens, logprobs = choose(logits, best, [draw for _, draw in mine])
        for chunk, (request, _), token, each in zip(ended, mine, tokens, logprobs, strict=True):
            self._append(chunk.text, request, token, each)
        return [(request, token) for (request, _), token in zip(mine, tokens, strict=True)]

    def _append(self, text: Text, request: Request, token: int, logprobs: Logprobs | None) -> None:
        request.new.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        ends = token in request.ends or (request.is_stopped is not None and request.is_stopped(request.new))
        self.scheduler.append(text, token, ends=ends)
        if text.is_over:
            request.finish = "stop" if ends else "length"
            del self._requests[text]

    def _prefill(self, chunk: Chunk) -> torch.Tensor:
        def there(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

        ids = there(chunk.text.tokens[chunk.start : chunk.start + chunk.count])
        slots, pages = there(self.scheduler.slots(chunk)), there(chunk.text.pages)
        return self.model.prefill(ids, chunk.start, slots, pages, self.cache)

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, int]]:
        """All of them, each new token as it comes."""
        for request in requests:
            self.add(request)
        while not self.scheduler.is_idle:
            yield from self.step()
