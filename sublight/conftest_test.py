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


NAMED = "import pytest\n@pytest.mark.parametrize('x', [object()], ids=str)\ndef test_one(x):\n    pass\n"


def test_a_name_that_is_another_in_each_worker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one_test.py").write_text(NAMED)
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    (tmp_path / "conftest.py").write_text("from sublight.conftest import pytest_collection_modifyitems\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR and "is named after an address" in ran.stderr, ran.stderr
