"""The debugging page is what ran, and the cheap sessions still print what is on it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return runpy.run_path(str(HERE / "page.py"))


@pytest.fixture(scope="module")
def sessions() -> dict[str, Any]:
    name = "debugging_sessions"
    loaded = type(sys)(name)
    sys.modules[name] = loaded  # dataclasses look their module up
    return runpy.run_path(str(HERE / "sessions.py"), run_name=name)


def test_the_page_is_what_ran(page: dict[str, Any]) -> None:
    text = page["page"](page["read"]())
    assert (DOCS / "debugging.md").read_text(encoding="utf-8") == text, "make docs writes it anew"


def test_every_session_is_on_the_page(page: dict[str, Any]) -> None:
    names = {name for *_, part in page["PARTS"] for name in part}
    assert set(page["read"]()) <= names
    assert "is not recorded yet" in page["_session"]("memcheck", None)
    late = {"machine": "H200", "status": None, "output": "took more than 25 s", "command": "x"}
    assert page["_session"]("memcheck", late) == "*memcheck did not run (on an H200): took more than 25 s.*\n"


def test_the_debugger_stops_behind_the_barrier(sessions: dict[str, Any]) -> None:
    stop = next(line for line in sessions["debugger_commands"]() if line.startswith("break matmul.cu:"))
    lines = sessions["MATMUL"].read_text().splitlines()
    assert "__syncthreads();" in lines[int(stop.rpartition(":")[2]) - 2]


def test_a_session_that_cannot_run_says_why(sessions: dict[str, Any]) -> None:
    none = sessions["ran"]("x", "cpu", "nosuch", ["/nosuch/tool"], 5)
    assert none.status is None and "No such file" in none.output
    slow = sessions["ran"]("x", "cpu", "sleep", [sys.executable, "-c", "import time; time.sleep(9)"], 0.2)
    assert slow.status is None and "took more than" in slow.output
    many = sessions["tidy"]("\n".join(str(i) for i in range(100)))
    assert many.splitlines()[-1] == "… (41 more lines)"


def test_the_planted_kernel_is_wrong_as_shown(page: dict[str, Any]) -> None:
    """Row 0 takes the next row's 7 and 8: (21 + 15) / 6."""
    done = subprocess.run(
        [sys.executable, "examples/debugging/row_mean.py", "--print"],
        cwd=HERE.parent.parent, capture_output=True, text=True, check=True, env={"TRITON_INTERPRET": "1", "PATH": ""},
    )  # fmt: skip
    first = page["read"]()["device_print-cpu"]["output"].splitlines()[0]
    assert done.stdout.splitlines()[0] == first == "(0, 0, 0)  x:  [1. 2. 3. 4. 5. 6. 7. 8.]"
    assert "means  [6.0, " in done.stdout
