"""Which frames are the profiler's own."""

from __future__ import annotations

import os
from pathlib import Path

ENTRY = str(Path(__file__).parents[1] / "trace" / "capture" / "script.py")  # whose frames call the program
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.endswith("_test.py")
