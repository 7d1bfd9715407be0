"""The engine: requests in, tokens out. A step is: schedule, prefill chunks, decode the rest at once, sample, append.

On a GPU a step that only decodes, greedily, is followed by the next before its tokens are read: the device has them, so
the host schedules and appends while the device computes. A text that turns out to have ended is computed once in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sublight.engines.generate.decoder import Decoder
from sublight.engines.generate.llama import Cache, Llama
from sublight.engines.generate.pages import Pages
from sublight.engines.generate.sampling import NONE, Draw, Logprobs, Sampling, choose, logprobs_of, marked
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
    with_prompt: bool = False  # the prompt's, too
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of its tokens but the first
    finish: str = ""  # "stop", "length", or "failed": the model's logits were no numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that was launched: whose next tokens it gives, in the order of its rows."""

    chunks: list[Chunk]
    mine: list[tuple[Request, Draw]]
    logits: torch.Tensor
    best: torch.Tensor
    arrival: Arrival | None  # of `best` at the host, where that is all that is needed
    may_go_on: bool  # the next step could begin from `best`


class Arrival:
    """Tokens on their way to the host; what is launched behind them is not waited for."""

    def __init__(self, best: torch.Tensor) -> None:
        self._there = best.to("cpu", non_blocking=True, copy=True)  # the next step overwrites it
        self._event = torch.cuda.Event() if best.is_cuda else None
        if self._event:
            self._event.record()

    def tokens(self) -> list[int]:
        if self._event:
            self._event.synchronize()
        return [int(token) for token in self._there.tolist()]


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
        ahead: bool | None = None,
    ) -> None:
        """`most_tokens` of a step bound a prefill's chunk; `graphs` are CUDA's on a GPU, unless told otherwise.
        `ahead`: whether a step may begin before the last one's tokens are read; None: on a GPU."""
        self.model, self.device = model, model.weights.tokens.device
        self.scheduler = Scheduler(Pages(pages, page), most_texts=most_texts, most_tokens=most_tokens)
        self.cache = Cache(model.config, pages, page, model.weights.tokens)
        if isinstance(graphs, bool):
            by: Backend | None = Cuda() if graphs and self.device.type == "cuda" else None
        else:
            by = graphs
        self.decoder = Decoder(model, self.cache, most_texts=most_texts, graphs=by)
        self.is_ahead = self.device.type == "cuda" if ahead is None else ahead
        self._requests: dict[Text, tuple[Request, Draw]] = {}
        self._flight: Flight | None = None  # launched before the tokens of the step before it were read

    def add(self, request: Request) -> Text:
        longest = len(request.prompt) + request.most_new
        if request.most_new < 1:
            raise BadInput(f"{request.most_new} new tokens: give 1 or more")
        if longest > self.model.cos.shape[0]:
            raise BadInput(f"{longest} tokens are more than the model's {self.model.cos.shape[0]}: shorten the prompt")
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self.model.config.vocab:
            raise BadInput(f"the prompt has tokens outside of 0 to {self.model.config.vocab - 1}: use the model's own")
        draw = Draw(request.sampling, request.prompt, self.model.config.vocab, self.device)
        text = Text(list(request.prompt), longest, is_reused=not request.with_prompt)
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
        self._flight = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> list[tuple[Request, int]]:
        """The new tokens of one step, or NONE for a text that failed. The device is waited for once, when they are
        read."""
        flight, self._flight = self._flight, None
        flight = self._still_wanted(flight) or self._launch()
        if flight is None:
            return []
        self._flight = self._launch_behind(flight)
        logprobs: list[Logprobs | None] = [None] * len(flight.mine)
        if flight.arrival is not None:
            tokens = flight.arrival.tokens()
        else:
            tokens, logprobs = choose(flight.logits, flight.best, [draw for _, draw in flight.mine])
        news = []
        for chunk, (request, _), token, each in zip(flight.chunks, flight.mine, tokens, logprobs, strict=True):
            if not chunk.text.is_over:  # else it ended, or was cancelled, while this step was on its way
                self._append(chunk.text, request, token, each)
                news.append((request, token))
        return news

    def _still_wanted(self, flight: Flight | None) -> Flight | None:
        """A step that was launched early, now that its own texts' last tokens are known; None where all have ended."""
        if flight is None or all(chunk.text.is_over for chunk in flight.chunks):
            return None
        for chunk in flight.chunks:
            if not chunk.text.is_over:
                self.scheduler.done(chunk)
        return flight

    def _launch(self) -> Flight | None:
        """The usual way: everything is known."""
        chunks = self.scheduler.next_step()
        if not chunks and not self.scheduler.is_idle:
            raise RuntimeError("no text can go on")  # the scheduler's tests hold that this never is
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        firsts = [(chunk, self._prefill(chunk)) for chunk in chunks if not chunk.is_decode]
        ready = [(chunk, row) for chunk, row in firsts if chunk.ends_the_text]
        parts = [(row, marked(row, row.argmax(-1))) for _, row in ready]  # decode looks only where tokens are drawn
        ended = [chunk for chunk, _ in ready]
        if decodes:
            parts.append(self.decoder(decodes))
            ended += decodes
        for chunk in chunks:
            self.scheduler.done(chunk)
        if not ended:
            return None
        logits, best = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
        return self._flight_of(ended, logits, best, is_decode=len(decodes) == len(chunks))

    def _launch_behind(self, flight: Flight) -> Flight | None:
        """The step behind one whose tokens only the device knows; None where there is none to be had like this."""
        if not flight.may_go_on:
            return None
        row_of = {chunk.text: row for row, chunk in enumerate(flight.chunks)}
        chunks = self.scheduler.next_before_tokens([chunk for chunk in flight.chunks if not chunk.text.is_over])
        if not chunks:
            return None
        logits, best = self.decoder(chunks, [row_of[chunk.text] for chunk in chunks])
        return self._flight_of(chunks, logits, best, is_decode=True)

    def _flight_of(self, chunks: list[Chunk], logits: torch.Tensor, best: torch.Tensor, *, is_decode: bool) -> Flight:
        mine = [self._requests[chunk.text] for chunk in chunks]
        is_greedy = all(draw.is_greedy for _, draw in mine)
        return Flight(
            chunks=chunks,
            mine=mine,
            logits=logits,
            best=best,
            arrival=Arrival(best) if is_greedy else None,
            may_go_on=self.is_ahead and is_greedy and is_decode,
        )

    def _append(self, text: Text, request: Request, token: int, logprobs: Logprobs | None) -> None:
        if token == NONE:
            request.finish = "failed"
            self.cancel(text)
            return
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
        request = self._requests[chunk.text][0]
        logits = self.model.prefill(ids, chunk.start, slots, pages, self.cache, every=request.with_prompt)
        if request.with_prompt:
            self._note_prompt(request, chunk, logits)
        return logits[-1:]

    def _note_prompt(self, request: Request, chunk: Chunk, logits: torch.Tensor) -> None:
        """The chunk's logits are of the tokens behind its own; a text that begins anew has some already."""
        begin = len(request.prompt_logprobs)
        tokens = request.prompt[begin + 1 : chunk.start + chunk.count + 1]
        if tokens:
            rows = logits[begin - chunk.start :][: len(tokens)]
            wanted = torch.tensor(tokens, dtype=torch.int64).to(self.device, non_blocking=True)
            request.prompt_logprobs += logprobs_of(rows, wanted, [request.sampling.logprobs or 0] * len(tokens))

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, int]]:
        """All of them, each new token as it comes."""
        for request in requests:
            self.add(request)
        while not self.scheduler.is_idle:
            yield from self.step()
