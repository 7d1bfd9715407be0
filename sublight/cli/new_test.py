"""`sublight new`: a project, what to do next, and bad words in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sublight.cli import main as cli
from sublight.extensions import toolchain
from sublight.extensions.toolchain import Trouble


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_project_and_what_comes_next(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Trouble(problem="no cmake on the PATH", fix="pip install cmake")
    monkeypatch.setattr(toolchain, "troubles", lambda tools: [missing] if "cmake" in tools else [])
    assert cli.run(["new", "op", "my_op", "--ship", "cmake"]) == 0
    shown = capsys.readouterr().out
    assert "CMakeLists.txt" in shown and "Next: cd my_op && make" in shown
    assert "no cmake on the PATH: pip install cmake" in shown
    assert (here / "my_op" / "my_op" / "csrc" / "kernels.cu").is_file()
    assert cli.run(["new", "op", "my_op", "--into", "deep/er", "--ship", "nvrtc", "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["folder"] == "deep/er" and written["missing"] == []
    assert sorted(written["files"]) == sorted(
        str(path.relative_to(here / "deep" / "er")) for path in (here / "deep" / "er").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["thing", "my_op"], "unknown kind of project 'thing': use op"),
        (["op"], "Missing argument 'NAME'"),
        (["op", "My-Op"], "cannot be an op's name"),
        (["op", "my_op", "--ship", "wheel"], "unknown way to ship 'wheel'"),
        (["op", "my_op", "--like", "gelu"], "unknown op to begin with 'gelu': use add2 or rms_norm"),
        (["op", "my_op", "--into", "."], "is there already"),
        (["op", "my_op", "--into", "kept.txt/x"], "cannot write kept.txt/x"),
        (["op", "my_op", "--json", "/"], "it is a folder"),
    ],
)
def test_bad_words_write_nothing(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "kept.txt").write_text("kept")
    assert cli.run(["new", *words]) == 2
    caught = capsys.readouterr()
    assert message in caught.err and caught.err.count("\n") == 1 and not caught.out
    assert [path.name for path in here.iterdir()] == ["kept.txt"]
    assert (here / "kept.txt").read_text() == "kept"


def test_no_torch_is_loaded(here: Path) -> None:
    code = (
        "import sys; from sublight.cli import main as cli; status = cli.run(['new', 'op', 'my_op']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}, cwd=here
    )
    assert done.returncode == 0
