"""`%%pyprof` on a shell that is made up: the cell runs in the user's names, and what it raises is raised."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import sublight
from sublight.report.pyprof import notebook


class Shell:
    """What the magic needs of IPython's."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"given": 3}
        self.magics: dict[str, Any] = {}
        self.compile = SimpleNamespace(cache=lambda source: "<ipython-input-1>")

    def transform_cell(self, cell: str) -> str:
        return cell

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        self.magics[f"{magic_kind} {magic_name}"] = function


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    pages: list[str] = []
    fake: Any = ModuleType("IPython.display")
    fake.HTML, fake.display = str, pages.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    errors: Any = ModuleType("IPython.core.error")
    errors.UsageError = type("UsageError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "IPython.core", ModuleType("IPython.core"))
    monkeypatch.setitem(sys.modules, "IPython.core.error", errors)
    return pages


def test_a_cell_runs_in_the_users_names(shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    sublight.load_ipython_extension(shell)
    cell = "def f(n):\n    return abs(n)\nfound = [f(number) for number in range(given)]\n"
    shell.magics["cell pyprof"]("--trace", cell)
    assert shell.user_ns["found"] == [0, 1, 2]
    words = capsys.readouterr().out
    assert next(line for line in words.splitlines() if " f " in line).split()[6] == "3"
    assert "builtins.abs" in words and len(shown) == 1 and "iframe" in shown[0]


def test_what_the_cell_raises_comes_after_its_profile(shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        notebook.pyprof(Shell(), "--counts", "1 / 0\n")
    assert "<module>" in capsys.readouterr().out and len(shown) == 1


@pytest.mark.parametrize("line", ["--bad", "--rate x", "--rate 0", "--trace --counts"])
def test_bad_options_say_which_there_are(line: str) -> None:
    with pytest.raises(ValueError, match="it takes --trace"):
        notebook.options(line)


def test_a_bad_option_is_one_line(shown: list[str]) -> None:
    with pytest.raises(sys.modules["IPython.core.error"].UsageError, match="it takes --trace"):
        notebook.pyprof(Shell(), "--bad", "1\n")
