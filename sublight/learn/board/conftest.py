"""A sandbox that works here, or the reason why there is none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublight.learn.board import jail
from sublight.learn.board.jail import Way


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """In memory, as the server has it; other users may go through it."""
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="sublight-board-test-", dir=room))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def way(home: Path) -> Way:
    found, reason = jail.usable(home)
    if found is None:
        pytest.skip(f"no sandbox can be had here: {reason}")
    return found
