"""What the user asked for cannot be done: one clear line, with the names that come near."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Sequence

MOST_NAMES = 8  # in one line of an error


class BadInput(ValueError):
    """What the user asked for cannot be done; the message says what was wrong and what to do, in one line."""


def refuse_device(path: str | os.PathLike[str]) -> None:
    """A device may have no end, as /dev/zero has none: it is refused before it is read whole.

    >>> refuse_device(os.devnull)
    Traceback (most recent call last):
    sublight.errors.BadInput: /dev/null is a device, not a file: name a file
    """
    try:
        is_device = stat.S_ISCHR(os.stat(path).st_mode)
    except (OSError, ValueError):  # reading it will say what is wrong
        return
    if is_device:
        raise BadInput(f"{path} is a device, not a file: name a file")


def nearest(word: str, known: list[str]) -> str:
    """The names that the user may have meant, best first; where none is near, the first few that there are.

    >>> nearest("sofmax", ["add", "softmax", "rms_norm"])
    'softmax'
    """
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return ", ".join(near or [*known[:MOST_NAMES], *(["…"] if len(known) > MOST_NAMES else [])])


def one_of(what: str, word: str, known: Sequence[str]) -> str:
    """The word, if it is known; else one line that says which are, or, of many, which come near.

    >>> one_of("size", "huge", ["small", "large", "larger"])
    Traceback (most recent call last):
    sublight.errors.BadInput: unknown size 'huge': use small, large, larger
    """
    if word in known:
        return word
    if len(known) > MOST_NAMES:
        names = nearest(word, list(known))
        advice = f"use {names}" if names.endswith("…") else f"did you mean {names}?"
    else:
        advice = f"use {(' or ' if len(known) < 3 else ', ').join(known)}"
    raise BadInput(f"unknown {what} {word!r}: {advice}")
