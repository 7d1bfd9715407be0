"""Run a script in a process of its own, with cures or without, and read what that gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sublight.fix.cure.record import Outcome


def run(target: str, args: Sequence[str], names: Sequence[str], *, module: bool, folder: str) -> Outcome:
    """The same interpreter, arguments and folder; what the script prints is not shown a second time."""
    with tempfile.TemporaryDirectory(prefix="sublight-") as scratch:
        result, said = Path(scratch) / "result.json", Path(scratch) / "stderr"
        request = {
            "target": target,
            "args": list(args),
            "module": module,
            "names": list(names),
            "result": str(result),
        }
        words = [sys.executable, "-m", "sublight.fix.cure.child", json.dumps(request)]
        package = str(Path(__file__).parents[3])  # where ours is imported from, whatever the folder
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        with said.open("wb") as errors:
            done = subprocess.run(
                words,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                check=False,
            )
        if result.exists():
            return Outcome.from_json(json.loads(result.read_text(encoding="utf-8")))
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return Outcome(error=lines[-1] if lines else f"the process ended with status {done.returncode}")
