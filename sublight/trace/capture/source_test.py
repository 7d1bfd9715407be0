"""The names of the user's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
