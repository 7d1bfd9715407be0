"""Markdown in a terminal whose Chinese lines are filled: Chinese breaks between any two characters, not at spaces."""

from __future__ import annotations

import re
from typing import ClassVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown as RichMarkdown
from rich.markdown import MarkdownElement
from rich.markdown import Paragraph as RichParagraph

_WIDE = "\u2e80-\u9fff\uff00-\uffef"
_OPENING, _CLOSING = "（“《「", "，。：；、！？）”》」…"  # no line ends with the first, none begins with the second
_UNIT = re.compile(rf"[{_OPENING}]*(?:[{_WIDE}]|[^\s{_WIDE}{_OPENING}{_CLOSING}]+|\S)[{_CLOSING}]*\s*|\s+")


def breaks(words: str, width: int) -> list[int]:
    """Where lines begin, after the first.

    >>> text = "每个 program 只读一次。"
    >>> breaks(text, 18), [text[:13], text[13:]]
    ([13], ['每个 program 只读', '一次。'])
    >>> breaks("只读一次。", 8)  # the full stop takes its character along
    [3]
    """
    places, used = [], 0
    for unit in _UNIT.finditer(words):
        needed = cell_len(unit[0].rstrip())
        if used and used + needed > width:
            places.append(unit.start())
            used = 0
        used += cell_len(unit[0])
    return places


class Paragraph(RichParagraph):
    """A paragraph whose long Chinese lines are broken by `breaks`; English ones by Rich."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not re.search(f"[{_WIDE}]", self.text.plain):
            yield from super().__rich_console__(console, options)
            return
        for line in self.text.divide(breaks(self.text.plain, options.max_width)):
            line.rstrip()
            yield line


class Markdown(RichMarkdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**RichMarkdown.elements, "paragraph_open": Paragraph}
