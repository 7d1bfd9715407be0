"""A stand-in for the judge, without torch: it runs what is submitted, whatever it is, in a real sandbox.

`python -m sublight.learn.board.fakes` speaks as `grader.py` does; with a file's name it is what runs inside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sublight.learn.board.jail import Jail
from sublight.learn.grade.sandbox import Budget, confine

END_THE_JUDGE = "# ends the judge"  # as code could that cuts off the files which it shares with it
REDUCED: dict[str, Any] = {"cases": [], "kernels": [], "notes": [], "gpu": "h200", "goal": None}


def main() -> None:
    base = Jail(**json.loads(sys.stdin.readline())["jail"])
    print(json.dumps({"ready": "", "not_timed": "no GPU"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if END_THE_JUDGE in order["source"]:
            os._exit(1)
        print(json.dumps({"verdict": _verdict(base, order)}), flush=True)


def _verdict(base: Jail, order: dict[str, Any]) -> dict[str, Any]:
    """What the code prints is its fraction."""
    home = tempfile.mkdtemp(dir=base.home)
    os.chmod(home, 0o711)
    jail = Jail(way=base.way, home=home, user=base.user)
    jail.make()
    jail.admit(jail.room)
    file = Path(jail.room, "submission.py")
    file.write_text(json.dumps(order))
    command = [sys.executable, "-P", "-m", "sublight.learn.board.fakes", str(file)]
    done = subprocess.run(jail.around(command), capture_output=True, text=True, check=False)
    shutil.rmtree(home)
    words = done.stdout.strip()
    faults = [] if words else [{"kind": "failed", "line": 0, "text": done.stderr[-200:] or "killed", "case": ""}]
    return {**REDUCED, "passed": bool(words), "fraction_predicted": float(words or "nan"), "faults": faults}


def _inside(file: str) -> None:
    order = json.loads(Path(file).read_text())
    confine(Budget(**order["budget"]), programs=True)
    os.chdir(os.path.dirname(file))
    exec(compile(order["source"], "submission.py", "exec"), {})


if __name__ == "__main__":
    _inside(sys.argv[1]) if len(sys.argv) > 1 else main()
