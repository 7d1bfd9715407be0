"""Who computes what in the next step: continuous batching, prefill in chunks, preemption where pages run short.

First come, first served. A step has room for so many tokens. Those that run go first, oldest first; then new ones are
let in while there is room. Where a running one needs a page and none is free, the youngest gives back all of its pages
and begins anew later (its tokens are kept, so nothing that was sampled is sampled again). The oldest always goes on, so
everyone ends. No torch here: the scheduler is tested by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sublight.engines.generate.pages import Pages
from sublight.errors import BadInput


@dataclass(slots=True, eq=False)
class Text:
    """One request's tokens, and how many of them are in the cache."""

    tokens: list[int]
    most: int  # tokens that it may have in the end
    is_reused: bool = True  # its beginning may be what others computed; else every token is computed for it
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    begun: int = 0  # how often it got its first pages
    reused: int = 0  # tokens that were found in the cache, of all beginnings
    preempted: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one text that a step computes: from `start`, so many."""

    text: Text
    start: int
    count: int

    @property
    def ends_the_text(self) -> bool:
        """Then its last token's logits give the next one."""
        return self.start + self.count == len(self.text.tokens)

    @property
    def is_decode(self) -> bool:
        """One token, behind others: it joins those of other texts."""
        return self.count == 1 and self.start > 0 and self.ends_the_text


class Scheduler:
    def __init__(self, pages: Pages, *, most_texts: int, most_tokens: int) -> None:
        if most_texts < 1 or most_tokens < 1:
            raise BadInput(f"a step of {most_texts} texts and {most_tokens} tokens computes nothing: give 1 or more")
        self.pages, self.most_texts, self.most_tokens = pages, most_texts, most_tokens
        self.waiting: deque[Text] = deque()
        self.running: list[Text] = []  # oldest first

    def add(self, text: Text) -> None:
        room = self.pages.count * self.pages.size
        if not text.tokens:
            raise BadInput("a prompt without tokens gives a model nothing to go on: write something")
        if max(text.most, len(text.tokens)) > room:
            raise BadInput(f"{text.most} tokens do not fit into a cache of {room}: shorten the prompt, or add pages")
        self.waiting.append(text)

    def cancel(self, text: Text) -> None:
        """At any time; its pages are free at once."""
        text.is_over = True
        if text in self.running:
            self.running.remove(text)
            self._give_back(text)
        elif text in self.waiting:
            self.waiting.remove(text)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def next_step(self) -> list[Chunk]:
        """What to compute now; every page that it needs is there."""
        chunks: list[Chunk] = []
        room, was_short = self.most_tokens, False
        for text in list(self.running):
            if not room or (was_short and text not in self.running):  # no room in this step, or given up for an older
                continue
            count = min(room, len(text.tokens) - text.cached)
            while not self._grow(text, text.cached + count):
                was_short = True
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is text:
                    break
            else:
                chunks.append(Chunk(text, text.cached, count))
                room -= count
        while self.waiting and room and not was_short and len(self.running) < self.most_texts:
            text = self.waiting[0]
            known = self.pages.begins(text.tokens) if text.is_reused else []
            if text.is_reused and self._is_coming(text, len(known) * self.pages.size):
                break
            count = min(room, len(text.tokens) - len(known) * self.pages.size)
            self.pages.share(known)
            text.pages, text.cached = known, len(known) * self.pages.size
            text.begun += 1
            if not self._grow(text, text.cached + count):
                self._give_back(text)
                break
            text.reused += text.cached
            self.running.append(self.waiting.popleft())
            chunks.append(Chunk(text, text.cached, count))
            room -= count
        return chunks

    def next_before_tokens(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What follows these, which are computed now and whose tokens nobody knows yet: one token more of each text
        that may have one. Nothing where the usual way might do more: somebody in its prompt, one who waits and may come
        in, too few pages."""
        going = [chunk for chunk in chunks if chunk.start + 2 < chunk.text.most]
        has_room = len(going) < self.most_texts
        if len(chunks) != len(self.running) or (self.waiting and has_room):
            return []
        missing = [-(-(chunk.start + 2) // self.pages.size) - len(chunk.text.pages) for chunk in going]
        if sum(missing) > self.pages.free:
            return []
        for chunk in going:
            self._grow(chunk.text, chunk.start + 2)
        return [Chunk(chunk.text, chunk.start + 1, 1) for chunk in going]

    def done(self, chunk: Chunk) -> None:
        """The chunk is in the cache: pages that are full now are known to others."""
        text, size = chunk.text, self.pages.size
        text.cached = chunk.start + chunk.count
        for number in range(chunk.start // size, text.cached // size):
            before = text.pages[number - 1] if number else None
            self.pages.fill(text.pages[number], before, text.tokens[number * size : (number + 1) * size])

    def append(self, text: Text, token: int, *, ends: bool) -> None:
        text.tokens.append(token)
        if ends or len(text.tokens) >= text.most:
            self.cancel(text)

    def slots(self, chunk: Chunk) -> list[int]:
        """Where in the cache the chunk's keys and values go."""
        size, pages = self.pages.size, chunk.text.pages
        return [pages[at // size] * size + at % size for at in range(chunk.start, chunk.start + chunk.count)]

    def _grow(self, text: Text, tokens: int) -> bool:
        """Pages for so many tokens: all that are missing, or none."""
        missing = -(-tokens // self.pages.size) - len(text.pages)
        if missing > self.pages.free:
            return False
        text.pages += [self.pages.take() for _ in range(missing)]
        return True

    def _is_coming(self, text: Text, known: int) -> bool:
        """Whether most of what this text would compute, behind its `known` tokens, is being computed for another, as of
        the choices of one prompt: then it waits for those pages, which come in every step that it could begin in."""
        size, tokens = self.pages.size, text.tokens
        for other in self.running:
            if other.cached >= len(other.tokens) - 1 or other.tokens[:known] != tokens[:known]:
                continue
            alike = known
            while alike + size < len(tokens) and other.tokens[alike : alike + size] == tokens[alike : alike + size]:
                alike += size
            if other.cached < alike and 2 * (alike - known) > len(tokens) - known:
                return True
        return False

    def _preempt(self, text: Text) -> None:
        self.running.remove(text)
        self._give_back(text)
        text.preempted += 1
        self.waiting.appendleft(text)

    def _give_back(self, text: Text) -> None:
        self.pages.release(text.pages)
        text.pages, text.cached = [], 0
