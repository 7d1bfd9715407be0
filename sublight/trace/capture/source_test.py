"""The names of the user's files, and the marks of the lines that run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sublight.trace.capture import source
from sublight.trace.capture.source import shown_path


def test_a_shown_path_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From wherever the command is run: without the file, its lines cannot be shown."""
    (tmp_path / "project" / "below").mkdir(parents=True)
    script = tmp_path / "project" / "train.py"
    script.write_text("x = 1\n")
    shown = {}
    for folder in (script.parent, script.parent / "below", Path(os.sep)):
        monkeypatch.chdir(folder)
        shown[folder.name] = shown_path(str(script))
        assert Path(shown[folder.name]).read_text() == "x = 1\n"
    assert (shown["project"], shown["below"]) == ("train.py", "../train.py")


def _marked_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[list[str], list[str]]:
    """The lines, as they are marked one after another while this runs, and what is said of it."""
    marks: list[int] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        marks.append(int(name.removeprefix(source.MARK)))
        yield

    file = tmp_path / "step.py"
    run = compile(text, str(file), "exec")
    monkeypatch.setattr(source, "is_users", lambda name: name == str(file))
    tracer = source.SourceTracer()
    monkeypatch.setattr(tracer, "_mark", mark)
    assert tracer.start()
    try:
        exec(run, {})
    finally:
        tracer.stop()
    return [tracer.places[number][0].rpartition(":")[2] for number in marks], tracer.notes()


def test_a_function_that_is_called_very_often_leaves_lines_for_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = "order = sorted(range(60_000), key=lambda at: -at)\nlast = 1\nlater = 2\n"
    lines, notes = _marked_lines(tmp_path, monkeypatch, often)
    assert lines[-2:] == ["2", "3"] and len(lines) < source.MOST_MARKS
    assert notes == ["<lambda> ran over 10,000 lines in a step: ops there have no line of their own"]


def test_marks_that_are_used_up_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_MARKS", 4)
    lines, notes = _marked_lines(tmp_path, monkeypatch, "".join(f"x = {n}\n" for n in range(9)))
    assert lines == ["", "1", "2", "3", ""]
    assert notes == ["a step goes from line to line over 4 times: what follows has no source lines"]
