"""Which frames are the profiler's own."""

from __future__ import annotations

import os
from pathlib import Path

ENTRIES = (  # whose frames call the program
    str(Path(__file__).parents[1] / "trace" / "capture" / "script.py"),
    str(Path(__file__).with_name("block.py")),
)
BEHIND = str(Path(__file__).parents[1] / "trace" / "capture" / "interrupt.py")  # which they call when it is over
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.endswith("_test.py")
