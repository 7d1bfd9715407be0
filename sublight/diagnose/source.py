"""The user's own lines behind a finding, and what one of them could be instead where that is a matter of a word."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sublight.trace.attribute import Attribution
from sublight.trace.record import Ints, Trace

MOST_LINES = 3  # of a finding
MOST_ROWS = 300  # whose place is looked up
AROUND = 1  # lines above and below
_NEEDED = re.compile(  # by Python itself: a branch, a text, an index
    r"""^\s*(?:if|elif|while|assert|return|print|yield)\b|\bf["']|\brange\(|json"""
    r"""|[\w\])]\[[^\]]*\.item\(\)"""
)
PLACE = re.compile(r"^(?P<file>.+?):(?P<line>\d+)(?: \((?P<function>.*)\))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's, with those around it where its file can be read."""

    place: str  # "train.py:41"
    count: float  # of what the finding is about, a step
    number: int
    before: str = ""  # the line itself; empty where the file is not here, or was changed since
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    after: str = ""  # the line as it could be; empty where more than the line must change
    share: str = ""  # what it takes, in words; else `count` stands beside it


def lines(attribution: Attribution, rows: Ints, steps: int, finding: str) -> tuple[SourceLine, ...]:
    """The source lines that these rows come from, the most frequent first."""
    if not len(rows):
        return ()
    sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).astype(np.int64)]
    trace, places = attribution.trace, Counter[str]()
    back: set[str] = set()  # places that copy from the device: what waits for the bytes must go on waiting
    for row in sample.tolist():
        if source := attribution.place(row)[0]:
            places[source] += 1
            back |= {source} if trace.name_of(row).startswith("Memcpy DtoH") else set()
    each = len(rows) / len(sample) / steps
    found = (
        _line(trace, place, count * each, "" if place in back else finding)
        for place, count in places.most_common(MOST_LINES)
    )
    return tuple(line for line in found if line is not None)


def named(trace: Trace, places: Iterable[tuple[str, str]]) -> tuple[SourceLine, ...]:
    """These lines, each with what it takes in words."""
    found = ((_line(trace, place, 0.0, ""), share) for place, share in places)
    return tuple(replace(line, share=share) for line, share in found if line is not None)


def text_of(trace: Trace, file: str, number: int) -> str:
    """A line of the user's; empty where its file is not here, or was changed since."""
    linecache.checkcache(file)
    return linecache.getline(file, number).strip() if _unchanged(trace, file) else ""


def _line(trace: Trace, place: str, count: float, finding: str) -> SourceLine | None:
    match = PLACE.match(place)
    if not match:
        return None
    file, number = match["file"], int(match["line"])
    named = SourceLine(place=f"{file}:{number}", count=count, number=number)
    text = _text(file, number) if _unchanged(trace, file) else []
    if not text or not text[AROUND].strip():
        return named
    rewrite = _REWRITES.get(finding)
    after = rewrite(text[AROUND]) if rewrite else text[AROUND]
    return SourceLine(
        place=named.place,
        count=count,
        number=number,
        before=text[AROUND],
        above=tuple(text[:AROUND]),
        below=tuple(text[AROUND + 1 :]),
        after=after if after != text[AROUND] else "",
    )


def _text(file: str, number: int) -> list[str]:
    """The lines around this one, those that there are none of empty; nothing where the file cannot be read."""
    linecache.checkcache(file)
    around = [linecache.getline(file, at).rstrip("\n") for at in range(number - AROUND, number + AROUND + 1)]
    return around if any(around) else []


def _unchanged(trace: Trace, file: str) -> bool:
    """Whether a file is as it was when the trace was made: a line of a later version would be another line."""
    try:
        return not os.path.isfile(trace.source) or Path(file).stat().st_mtime <= Path(trace.source).stat().st_mtime
    except (OSError, ValueError):
        return False


def _stays_on_device(line: str) -> str:
    """A value that is only kept may stay a tensor; one that Python itself needs may not.

    >>> _stays_on_device("total += loss.item()"), _stays_on_device("log.append([loss.item(), 1])")
    ('total += loss.detach()', 'log.append([loss.detach(), 1])')
    >>> [_stays_on_device(line) for line in ("if loss.item() > 3:", "print(f'{loss.item():.3f}')", "w[at.item()] = 1")]
    ['if loss.item() > 3:', "print(f'{loss.item():.3f}')", 'w[at.item()] = 1']
    """
    return line if _NEEDED.search(line) else line.replace(".item()", ".detach()")


def _not_blocking(line: str) -> str:
    """
    >>> _not_blocking("x = x.to(device)"), _not_blocking("x = x.cuda()")
    ('x = x.to(device, non_blocking=True)', 'x = x.cuda(non_blocking=True)')
    >>> _not_blocking("x = x.to(device, non_blocking=True)")
    'x = x.to(device, non_blocking=True)'
    """
    if "non_blocking" in line or "cpu" in line:
        return line
    line = re.sub(r"\.to\(([^()]+)\)", r".to(\1, non_blocking=True)", line)
    return line.replace(".cuda()", ".cuda(non_blocking=True)")


def _strided(line: str) -> str:
    """
    >>> _strided("y = x.transpose(1, 2).contiguous()"), _strided("y = x.t().contiguous().view(-1)")
    ('y = x.transpose(1, 2)', 'y = x.t().contiguous().view(-1)')
    """
    return re.sub(r"\.contiguous\(\)(?!\.view\()", "", line)


_REWRITES: dict[str, Callable[[str], str]] = {
    "host-sync": _stays_on_device,
    "pageable-copy": _not_blocking,
    "exposed-copy": _not_blocking,
    "redundant-cast-or-copy": _strided,
}
