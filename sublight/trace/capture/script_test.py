"""A captured script ends, fails and finds its way as it does without us; what is no script gets one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sublight.errors import BadInput
from sublight.trace.capture.profile import run_script
from sublight.trace.capture.profile_test import NET, TRAIN, Capture, runner


@pytest.fixture(name="run")
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    return runner(tmp_path, monkeypatch)


def test_an_error_is_printed_as_python_prints_it(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        NET + "try:\n    net(torch.randn(4, 7))\nexcept RuntimeError as error:\n    raise ValueError('no') from error\n"
    )
    seen = run(source)
    mine = capsys.readouterr().err
    assert seen.captured.exit_code == 1 and isinstance(seen.captured.error, ValueError)
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True)
    assert plain.returncode == 1 and "in forward" in mine
    assert mine == plain.stderr
    assert seen.captured.trace is not None


def test_a_syntax_error_is_the_scripts_own(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    seen = run("x = 1\nif x\n    pass\n")
    assert seen.captured.exit_code == 1 and isinstance(seen.captured.error, SyntaxError)
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True)
    assert capsys.readouterr().err == plain.stderr


@pytest.mark.parametrize(("call", "code", "printed"), [("3", 3, ""), ("", 0, ""), ("'all wrong'", 1, "all wrong\n")])
def test_exit_codes_pass_through(
    run: Capture, capsys: pytest.CaptureFixture[str], call: str, code: int, printed: str
) -> None:
    seen = run(NET + TRAIN + f"sys.exit({call})\n")
    assert seen.captured.exit_code == code and isinstance(seen.captured.error, SystemExit)
    assert capsys.readouterr().err == printed and len(seen.spans("ProfilerStep#")) == 3


@pytest.mark.parametrize(("at", "profiled"), [(6, 1), (12, 2), (99, 3)])
def test_an_interrupt_gives_what_was_seen(run: Capture, at: int, profiled: int) -> None:
    stop = TRAIN.replace("    net(x)", f"    if number == {at}: raise KeyboardInterrupt\n    net(x)")
    seen = run(NET + stop)
    assert seen.captured.interrupted and seen.captured.exit_code == 130
    assert seen.inside("aten::linear") == [2] * profiled


def test_arguments_file_name_and_neighbours(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    Path("neighbour.py").write_text("WORD = 'found'\n")
    run(
        "import sys, pickle, neighbour\nclass Thing: pass\n"
        "print(sys.argv, __file__, __name__, sys.path[0], neighbour.WORD)\n"
        "print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, __spec__)\n",
        "--lr",
        "1 2",
    )
    here = os.getcwd()
    assert capsys.readouterr().out.splitlines() == [
        f"['train.py', '--lr', '1 2'] {here}/train.py __main__ {here} found",
        "True None",
    ]
    assert "--lr" not in sys.argv and sys.path[0] != here


def test_wrong_arguments_are_the_scripts_own(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    seen = run("import argparse\nargparse.ArgumentParser().parse_args()\n", "--nonsense")
    assert seen.captured.exit_code == 2
    assert "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_a_module_of_a_package(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    for name, source in {"__init__": "", "words": "WORD = 1\n", "empty/__init__": ""}.items():
        Path(f"my_package_for_m/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        Path(f"my_package_for_m/{name}.py").write_text(source)
    run("", name="unused.py")
    body = (NET + TRAIN).replace("STEPS", "100")
    Path("my_package_for_m/main.py").write_text(
        "from .words import WORD\n" + body + "print(sys.argv[1:], __package__)\n"
    )
    captured = run_script("my_package_for_m.main", ["a"], module=True, say=lambda line: None)
    assert captured.exit_code == 0 and captured.steps_from == "optimizer steps"
    assert capsys.readouterr().out.splitlines() == ["trained 99", "['a'] my_package_for_m"]
    with pytest.raises(BadInput, match="a package without a __main__"):
        run_script("my_package_for_m.empty", [], module=True, say=print)
    with pytest.raises(BadInput, match=r"no module named my_package_for_m\.nothing"):
        run_script("my_package_for_m.nothing", [], module=True, say=print)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("missing.py", None, "no such script: missing.py"),
        ("folder", "", "folder is a folder: name the script in it, or use -m for a package"),
        ("notes.txt", b"Dear all,\n", "notes.txt is not Python (line 1: "),
        ("weights.py", b"\0\1\2", "weights.py is not Python: "),
        ("latin.txt", b"caf\xe9 = 1\n", "latin.txt is not Python"),
    ],
)
def test_what_is_not_a_script(run: Capture, name: str, content: bytes | str | None, line: str) -> None:
    if content == "":
        Path(name).mkdir()
    elif isinstance(content, bytes):
        Path(name).write_bytes(content)
    with pytest.raises(BadInput) as error:
        run_script(name, [], say=print)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_without_torch(run: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"torch is not installed here.*pip install"):
        run("print(1)\n")
