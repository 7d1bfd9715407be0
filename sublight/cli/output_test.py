"""Results on a stdout that cannot show all characters, or does not tell its width."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sublight.report.draw import console

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stdout_without_all_characters_gets_a_table_and_whole_json(encoding: str, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "sublight", "gpus", "--explain", "l4", *words]
        return subprocess.run(command, capture_output=True, cwd=ROOT, env=environment)

    table, whole = run(), run("--json", "-")
    assert table.returncode == 0 and b"192 bit" in table.stdout, table.stderr
    assert run("--json", str(tmp_path / "x")).returncode == 0
    assert json.loads(whole.stdout) == json.loads((tmp_path / "x").read_bytes())


def test_no_columns_are_columns_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("0", console.PIPED_COLUMNS), ("", console.PIPED_COLUMNS), ("90", 90), ("wide", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        assert console.stdout().width == width, columns
