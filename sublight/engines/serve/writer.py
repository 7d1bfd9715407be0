"""Tokens become text as they come: never half a character, never the beginning of what may be a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from sublight.engines.generate.vocabulary import Vocabulary

BROKEN = "\ufffd"  # what a decoder makes of half a character
MOST_HELD = 4  # tokens: a character has four bytes at most, so more of them will never be one


class Writer:
    """The text of one request. `add` takes a token and says whether a stop word is there; `take` gives what is sure."""

    def __init__(self, words: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._words, self._stops = words, [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._from, self._read = 0, 0  # tokens that are decoded again for what stands between two, and those read
        self._held = ""  # decoded, and not given yet
        self.is_stopped = False

    def add(self, token: int) -> bool:
        self._ids.append(token)
        before = self._words.decode(self._ids[self._from : self._read]) if self._read else ""
        whole = self._words.decode(self._ids[self._from :])
        if whole.endswith(BROKEN) and len(self._ids) - self._read <= MOST_HELD:
            return False
        self._from, self._read = self._read, len(self._ids)
        return self._append(whole[len(before) :])

    def take(self) -> str:
        """What can go out now."""
        sure = len(self._held) - (0 if self.is_stopped else self._unsure())
        text, self._held = self._held[:sure], self._held[sure:]
        return text

    def end(self) -> str:
        """All that is left: no more tokens come. A stop word may have waited for half a character."""
        if not self.is_stopped and self._read < len(self._ids):
            before = self._words.decode(self._ids[self._from : self._read]) if self._read else ""
            self._append(self._words.decode(self._ids[self._from :])[len(before) :])
        text, self._held = self._held, ""
        return text

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
