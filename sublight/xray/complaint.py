"""What a compiler complains of, as one line with the source's own file and line; its dumps are kept off the screen."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.backend import private
from sublight.errors import BadInput

_DIAGNOSTIC = re.compile(r'^(?:loc\()?"?([^\s"()]+?)"?:(\d+):\d+\)?: error: (.+)$', re.MULTILINE)
_ERROR = re.compile(r"\berror\s*: (.+)$", re.MULTILINE)
_PTX_ERROR = re.compile(r", line (\d+); error\s*: (.+)$", re.MULTILINE)
_PTX_PLACE = re.compile(r"^\s*\.loc\s.*//\s*(\S+):(\d+):\d+")


@dataclass(slots=True)
class Printed:
    """What was printed meanwhile; complete when the block has been left."""

    text: str = ""


@contextlib.contextmanager
def hushed() -> Iterator[Printed]:
    """Keep what Python, C++ and child processes print: MLIR writes its dumps to the file descriptor itself."""
    printed = Printed()
    stream = io.StringIO()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        try:
            for descriptor, _ in kept:
                os.dup2(file.fileno(), descriptor)
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                yield printed
        finally:
            for descriptor, copy in kept:
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            printed.text = stream.getvalue() + file.read().decode(errors="replace")


def complaint(error: BaseException, printed: str, *, jit: Any) -> BadInput:
    """The compiler's own sentence, at the source line where one is known."""
    CompilationError = private.CompilationError

    name = jit.__name__
    if isinstance(error, CompilationError):
        place, words = _of_python(error, jit)
    elif found := _PTX_ERROR.search(str(error)):
        place, words = _ptx_place(printed, int(found[1])), f"ptxas: {found[2]}"
    elif found := re.search(r"\bfatal\s*: (.+)$", str(error), re.MULTILINE):
        place, words = "", f"ptxas: {found[1]}"
    elif found := _DIAGNOSTIC.search(printed):
        place, words = f"{found[1]}:{found[2]}: ", found[3]
    elif found := _ERROR.search(printed):
        place, words = "", found[1]
    else:
        place, words = "", f"{type(error).__name__}: {first_line(str(error))}"
    return BadInput(f"{place}{name} does not compile: {words}")


def first_line(words: str) -> str:
    """
    >>> first_line("  one\\ntwo")
    'one'
    """
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def _of_python(error: BaseException, jit: Any) -> tuple[str, str]:
    """The innermost line of the user's, and the innermost message: a failure in tl.sum is told where it is called."""
    CompilationError = private.CompilationError

    place, words = "", ""
    reached: BaseException | None = error
    while reached is not None:
        if isinstance(reached, CompilationError):
            place = _place(reached, jit) or place
            words = first_line(reached.error_message) if reached.error_message else words
        elif not words:
            words = f"{type(reached).__name__}: {first_line(str(reached))}"
        reached = reached.__cause__
    parts = re.fullmatch(r"(\w+)\((['\"])(.*)\2\)", words)  # Triton hands on the repr of some exceptions
    return place, f"{parts[1]}: {parts[3]}" if parts else words or "no message"


def _place(error: Any, jit: Any) -> str:
    line = getattr(error.node, "lineno", None)
    owner = _owner(error.src, jit)
    if line is None or owner is None:
        return ""
    import triton

    file = owner.fn.__code__.co_filename
    if Path(file).is_relative_to(Path(triton.__file__).parent):
        return ""
    lines, start = inspect.getsourcelines(owner.fn)
    above = next((count for count, words in enumerate(lines) if words.lstrip().startswith("def ")), 0)  # decorators
    return f"{file}:{start + above + line - 1}: "


def _owner(source: str | None, jit: Any) -> Any:
    """Whose source that is: the kernel's own, or a function's that it calls, directly or through another."""
    runtime = private.jit

    seen: list[Any] = []
    waiting = [jit, *getattr(runtime, "_triton_jit_function_registry", {}).values()]  # since Triton 3.7
    while waiting and source is not None:
        each = waiting.pop(0)
        if getattr(each, "src", None) == source:
            return each
        seen.append(each)
        reached = getattr(each.fn, "__globals__", {}).values()
        waiting += [
            other
            for other in reached
            if isinstance(other, runtime.JITFunction) and not any(other is known for known in (*seen, *waiting))
        ]
    return None


def _ptx_place(printed: str, line: int) -> str:
    """The source line that a line of PTX came from: Triton prints the PTX that ptxas refused."""
    start = printed.find("//\n// Generated by")
    above = printed[start:].splitlines()[:line] if start >= 0 else []
    for words in reversed(above):
        if place := _PTX_PLACE.match(words):
            return f"{place[1]}:{place[2]}: "
    return ""
