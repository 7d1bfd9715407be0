"""Pages of the cache: who has which, and which hold the beginning of a text that somebody else has, too.

A full page is known by what it holds and by the page before it, so two texts that begin alike share pages. Names are
exact (tokens are compared, never only a hash). A page that nobody has stays known until its place is needed; shared
pages are full, so nobody writes into one.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

Name = tuple[int, tuple[int, ...]]  # of a full page: the number of the page before it, and its tokens
ROOT = 0  # the number before a text's first page


class Pages:
    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # longest unused first
        self._known: dict[Name, int] = {}
        self._name: dict[int, Name] = {}
        self._number: dict[int, int] = {}  # of a known page: never given twice, so an old page is no page's parent
        self._numbers = itertools.count(ROOT + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page for new tokens; what it held is forgotten. The caller has looked that one is free."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._users[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Free a text's pages, the last first: its beginning is worth most to other texts, so it is reused last."""
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, f"page {page} was given back twice"
            if not self._users[page]:
                self._free[page] = None
                if page not in self._name:
                    self._free.move_to_end(page, last=False)  # nothing to lose: the next to be taken

    def begins(self, tokens: Sequence[int]) -> list[int]:
        """Known pages that hold the beginning of this text, not its last token: something must be left to compute."""
        found: list[int] = []
        number = ROOT
        for start in range(0, len(tokens) - self.size, self.size):
            page = self._known.get((number, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            number = self._number[page]
            found.append(page)
        return found

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] += 1
            self._free.pop(page, None)

    def fill(self, page: int, before: int | None, tokens: Sequence[int]) -> None:
        """This page is full now, behind that one: others may find it. A second page of the same name stays unknown, as
        do all that come behind it."""
        number = ROOT if before is None else self._number.get(before)
        if number is None or page in self._name:
            return
        name = (number, tuple(tokens))
        if name not in self._known:
            self._known[name], self._name[page], self._number[page] = page, name, next(self._numbers)

    def _forget(self, page: int) -> None:
        if name := self._name.pop(page, None):
            del self._known[name], self._number[page]
