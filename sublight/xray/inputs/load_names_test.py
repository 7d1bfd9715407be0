"""What a target's words mean, and what is told where they mean nothing; nothing is compiled here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.errors import BadInput
from sublight.gpus import Gpu, find
from sublight.xray import build
from sublight.xray.inputs import load as load_module
from sublight.xray.inputs.load import load, parted


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("k.py", "k.cu", "odd.txt"):
        (tmp_path / name).write_text("nothing")
    (tmp_path / "softmax").mkdir()
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("target", "path", "kernel"),
    [
        ("k.py", "k.py", ""),
        ("k.py:_kernel", "k.py", "_kernel"),
        ("k.cu:ns::scale<float>", "k.cu", "ns::scale<float>"),
        ("folder", "folder", ""),
        ("./softmax:k", "softmax", "k"),
        ("softmax", None, ""),
        ("softmax:_row_kernel", None, "_row_kernel"),
    ],
)
def test_a_target_is_a_place_and_a_kernel(files: Path, target: str, path: str | None, kernel: str) -> None:
    assert parted(target) == (None if path is None else Path(path), kernel)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (300 * "k" + ".py", {}, "cannot be read: File name too long"),
        ("k.cu", {"threads": "64x32"}, "--threads 64x32: a block has 1 to 1024 threads"),
        ("gone.py", {}, "no file 'gone.py': give an op's name, FILE.py"),
        ("sofmax", {}, "unknown op 'sofmax': did you mean softmax"),
        ("odd.txt", {}, "odd.txt is no file that xray reads: it reads .py, .cu, .ptx, .cubin"),
        ("folder", {}, "folder is no Triton cache: it has no .cubin with its .json"),
        ("k.py", {"may_run": False}, "--no-exec reads only .ptx, .cubin files"),
        ("softmax:k", {"may_run": False}, "--no-exec reads only .ptx, .cubin files"),
        ("k.cu", {"record": True}, "--sig, --const and --record are for Python files, k.cu is none"),
        ("k.py", {"record": True, "signature": "x:i32"}, "--record finds types and constants by itself"),
        ("softmax", {"dtype": "fp31"}, "unknown data type 'fp31'"),
    ],
)
def test_a_bad_target_is_told(files: Path, target: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        load(target, [find("h100")], **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_gpu_to_compile_for(files: Path) -> None:
    for target in ("k.py", "softmax"):
        with pytest.raises(BadInput, match="is compiled for a GPU, and none is named: add --gpu h100"):
            load(target, [])


def test_the_interpreter_is_told_of(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for record in (False, True):
        with pytest.raises(BadInput, match="TRITON_INTERPRET=1 makes kernels that cannot be compiled: unset it"):
            load("k.py", [find("h100")], record=record)


def test_what_does_not_compile_is_left_out(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code_of(launch: str, gpu: Gpu) -> str:
        if launch == "fp8" and gpu.key == "a100":
            raise BadInput("k.py:3: fp8 does not compile")
        return f"{launch} on {gpu.key}"

    said: list[str] = []
    monkeypatch.setattr(build, "code_of", code_of)
    wanted: Any = [("fp8", find("a100")), ("plain", find("a100")), ("fp8", find("h100"))]
    assert list(map(str, load_module._compiled(wanted, said.append))) == ["plain on a100", "fp8 on h100"]
    assert said == ["left out: k.py:3: fp8 does not compile (a100)"]
    with pytest.raises(BadInput, match=r"^k\.py:3: fp8 does not compile$"):
        load_module._compiled(wanted[:1], said.append)


def test_what_is_told_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    load_module._to_stderr("words")
    assert capsys.readouterr() == ("", "sublight: words\n")
