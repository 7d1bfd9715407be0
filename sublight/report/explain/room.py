"""How much of everything a page has room for: it stays below its size whatever a trace holds."""

from __future__ import annotations

from dataclasses import dataclass

from sublight import units
from sublight.report.explain import timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The most of each kind of thing that a page shows."""

    blocks: int
    ops: int
    characters: int  # the longest text from a trace
    findings: int = 60

    def cut(self, words: str) -> str:
        return words if len(words) <= self.characters else f"{words[: self.characters - 1]}…"


ROOMS = (  # tried in this order, until the page is small enough
    Room(blocks=timeline.MOST_BLOCKS, ops=1500, characters=timeline.MOST_CHARACTERS),
    Room(blocks=8000, ops=600, characters=160),
    Room(blocks=4000, ops=300, characters=100),
    Room(blocks=1000, ops=100, characters=60, findings=40),
    Room(blocks=200, ops=30, characters=40, findings=10),
)


def time_text(seconds: float | None) -> str:
    return units.text(seconds, "s")
