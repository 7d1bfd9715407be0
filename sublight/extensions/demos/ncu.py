"""Hardware counters of a process's kernels, by Nsight Compute where it is installed and may read them."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence

from sublight.errors import BadInput

LIMIT_S = 60
PLACES = ("ncu", "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")


def counters(module: str, arguments: Sequence[str], metrics: Sequence[str], *options: str) -> list[dict[str, str]]:
    """A row for each kernel that `python -m module` launches: its name, and each metric's value."""
    tool = next((path for place in PLACES if (path := shutil.which(place))), None)
    if tool is None:
        raise BadInput("counters: no ncu (Nsight Compute) on the PATH: install it, it is in the CUDA toolkit")
    command = [tool, "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(metrics), *options]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", module, *arguments],
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BadInput(f"counters: ncu took more than {LIMIT_S} s") from None
    rows = parse(done.stdout)
    if not rows:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line or "ERR_" in line]
        raise BadInput(f"counters: ncu read none: {lines[0].strip('= ') if lines else 'no kernel was profiled'}")
    return rows


def parse(report: str) -> list[dict[str, str]]:
    """ncu's CSV among its own lines: a head, a line of units, a line for each kernel.

    >>> parse('==PROF== Connected\\n"ID","Kernel Name","a.sum"\\n"","","cycle"\\n"0","f","1,234"\\n')
    [{'ID': '0', 'Kernel Name': 'f', 'a.sum': '1,234'}]
    """
    lines = [line for line in report.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [row for row in rows if row.get("ID")]


def number(row: dict[str, str], metric: str) -> float | None:
    """
    >>> number({"a": "1,234.5", "b": "n/a"}, "a"), number({"a": "1", "b": "n/a"}, "b")
    (1234.5, None)
    """
    try:
        return float(row[metric].replace(",", ""))
    except (KeyError, ValueError):
        return None
