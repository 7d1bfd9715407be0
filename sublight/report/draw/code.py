"""Lines of code in a narrow terminal: what breaks is a comment, so that a pasted line still runs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_REMARK = re.compile(r"""^(?P<code>(?:[^"'#]|"[^"]*"|'[^']*')*\S)\s+#\s(?P<remark>.*)$""")  # no # inside of a string


@dataclass(frozen=True, slots=True)
class Code:
    """Some lines, `indent` columns from the left."""

    text: str
    style: str = "green"
    indent: int = 6

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in self.text.splitlines():
            for part in fitted(line, options.max_width - self.indent):
                yield Text(" " * self.indent + part, style=self.style, overflow="fold")


def fitted(line: str, width: int) -> list[str]:
    """A line in as many as it needs: a remark behind code goes above it, and is wrapped as a comment; a call goes on
    in the next line after an argument.

    >>> fitted("y = f(x)    # one kernel", 30)
    ['y = f(x)    # one kernel']
    >>> fitted("y = f(x)    # one kernel", 20), fitted("  # keep values on the device", 20)
    (['# one kernel', 'y = f(x)'], ['  # keep values on the', '  # device'])
    >>> fitted("y = f('a # b')    # or x['ids']", 20)
    ["# or x['ids']", "y = f('a # b')"]
    >>> fitted("y = loader(dataset, workers=4)", 20)
    ['y = loader(dataset,', '    workers=4)']
    """
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("#"):
        return _comment(line.strip().lstrip("# "), indent, width)
    match = _REMARK.match(line)
    if match:
        return [*_comment(match["remark"], indent, width), *fitted(match["code"], width)]
    cut = line.rfind(", ", line.find("(") + 1, width)
    quoted = line[:cut].count('"') % 2 or line[:cut].count("'") % 2
    return [line] if "(" not in line[: max(cut, 0)] or quoted else [line[: cut + 1], f"{indent}    {line[cut + 2 :]}"]


def _comment(words: str, indent: str, width: int) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        words, max(width, len(start) + 20), initial_indent=start, subsequent_indent=start, break_long_words=False
    )
