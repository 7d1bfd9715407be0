"""Tokens become text as they come: never half a character, never the beginning of what may be a stop word.

A token's text depends on the ones before it: many tokenizers drop the space of a text's first word. So a few tokens
are decoded again with each new one, and what they give together beyond what was there is its text.
"""

from __future__ import annotations

from collections.abc import Sequence

from sublight.engines.generate.vocabulary import Vocabulary

BROKEN = "\ufffd"  # what a decoder makes of half a character
MOST_HELD = 4  # tokens: a character has four bytes at most, so more of them will never be one
MOST_SILENT = 16  # tokens without a text of their own, as special ones are, that are kept
MOST_BEFORE = 8  # tokens of a prompt: enough for its last word


class Writer:
    """The text of one request. `add` takes a token and says whether a stop word is there; `take` gives what is sure."""

    def __init__(self, words: Vocabulary, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`before` are the tokens of a prompt whose text goes on; none where the text is a reply by itself."""
        self._words, self._stops = words, [stop for stop in stops if stop]
        self._ids = list(before[-MOST_BEFORE:])
        if self._ids and words.decode(self._ids).endswith(BROKEN):  # it ends in half a character
            self._ids = []
        self._from, self._read = 0, len(self._ids)  # tokens that are decoded again, and those whose text is known
        self._halves = 0  # tokens at the end that are no whole character yet
        self._held = ""  # decoded, and not given yet
        self.is_stopped = False

    def add(self, token: int) -> bool:
        self._ids.append(token)
        text = self._unread()
        if text.endswith(BROKEN) and self._halves < MOST_HELD:
            self._halves += 1
            return False
        self._halves = 0
        if text:
            self._from, self._read = self._read, len(self._ids)
        elif len(self._ids) - self._read > MOST_SILENT:
            del self._ids[self._read :]
        return self._append(text)

    def take(self) -> str:
        """What can go out now."""
        sure = len(self._held) - (0 if self.is_stopped else self._unsure())
        text, self._held = self._held[:sure], self._held[sure:]
        return text

    def end(self) -> str:
        """All that is left: no more tokens come. A stop word may have waited for half a character."""
        if not self.is_stopped and self._read < len(self._ids):
            self._append(self._unread())
        text, self._held = self._held, ""
        return text

    def _unread(self) -> str:
        before = self._words.decode(self._ids[self._from : self._read]) if self._read else ""
        return self._words.decode(self._ids[self._from :])[len(before) :]

    def _append(self, text: str) -> bool:
        self._held += text
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self._held, self.is_stopped = self._held[: min(places)], True
        return self.is_stopped

    def _unsure(self) -> int:
        """Characters at the end that a stop word may begin with."""
        most = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
