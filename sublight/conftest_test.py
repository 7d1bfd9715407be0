"""A run whose worker crashed is not one of which the failed tests may run once more: others may not have run at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

CRASH = "import os\ndef test_one():\n    os._exit(3)\ndef test_behind_it():\n    pass\n"


def test_a_worker_that_crashed_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "one_test.py").write_text(CRASH)
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    (tmp_path / "conftest.py").write_text("from sublight.conftest import pytest_sessionfinish, pytest_testnodedown\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--max-worker-restart", "1", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.INTERRUPTED, ran.stdout
