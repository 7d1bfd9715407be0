"""A project is whole, has its name everywhere, and never goes over a person's files."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.extensions import build, projects, toolchain
from sublight.extensions.projects import STARTS, WAYS, write
from sublight.extensions.projects.ways import TEMPLATES
from sublight.extensions.projects.write import check_name, contents
from sublight.extensions.toolchain import Trouble


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", [way.name for way in WAYS])
def test_a_project_is_whole(way: str, start: str, tmp_path: Path) -> None:
    project = write("my_op", way, start, tmp_path / "made")
    there = sorted(
        str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made").rglob("*") if path.is_file()
    )
    assert sorted(project.files) == there
    assert {"Makefile", "README.md", "cases.py", "my_op/__init__.py", "my_op/_library.py", "pyproject.toml"} <= set(
        there
    )
    for name in there:
        text = (tmp_path / "made" / name).read_text(encoding="utf-8")
        assert "op_name" not in text and not re.search(r"@[\w.]+@", text), name
        if name.endswith(".py"):
            ast.parse(text)
    readme = (tmp_path / "made" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in there)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_every_template_is_used() -> None:
    used = {"README.md", "Makefile", "pyproject.toml"}
    used |= {Path(name).name for way in WAYS for name in contents(way, "add2")} | {"op.py"}
    used |= {source for way in WAYS for source in way.sources}
    assert {path.name.removesuffix(".in") for path in TEMPLATES.rglob("*.in")} <= used
    folders = {path.name for path in (TEMPLATES / "ways").iterdir()}
    assert folders <= {way.name for way in WAYS}
    assert {path.name for path in (TEMPLATES / "starts").iterdir()} == set(STARTS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Norm", "as in my_norm"),
        ("", "small letters"),
        ("2fast", "as in fast"),
        ("two__lines", "as in two_lines"),
        ("../up", "as in up"),
        ("x" * 41, "at most 40"),
        ("class", "is taken"),
        ("json", "is taken"),
        ("aten", "is taken"),
        ("pytest", "an installed package"),
    ],
)
def test_bad_names_are_one_line(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        check_name(name)
    assert "\n" not in str(caught.value)


def test_a_name_of_the_projects_own_code_is_refused(tmp_path: Path) -> None:
    for name in ("device", "inputs", "excess"):
        with pytest.raises(BadInput, match="own code uses"):
            write(name, "triton", "add2", tmp_path / name)
    write("rms_norm", "triton", "rms_norm", tmp_path / "rms_norm")  # functional.rms_norm is not the project's name


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("mine", "file", "link"):
        with pytest.raises(BadInput, match="is there already"):
            write("my_op", "inline", "add2", tmp_path / name)
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "kept"
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "empty").mkdir()
    assert write("my_op", "inline", "add2", tmp_path / "empty").files
    with pytest.raises(BadInput, match="unknown way to ship 'wheel'"):
        write("my_op", "wheel", "add2", tmp_path / "other")
    with pytest.raises(BadInput, match="use add2 or rms_norm"):
        write("my_op", "inline", "gelu", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_is_missing_is_a_line_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: "12.8")
    found = [dataclasses.astuple(each) for each in toolchain.troubles(("compiler", "ninja", "cmake", "nvcc"))]
    problems = [problem.split(" (")[0] for problem, _ in found]
    assert problems == ["no C++ compiler", "no ninja on the PATH", "no cmake on the PATH", "no nvcc"]
    assert all(fix and "\n" not in problem + fix for problem, fix in found)
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: None)
    assert toolchain.troubles(("nvcc",)) == []  # a PyTorch for the CPU asks for none


def test_a_compiler_that_the_environment_names_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: {"g++": "/bin/g++", "ccache": "/bin/ccache"}.get(name))
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    (found,) = toolchain.troubles(("compiler",))
    assert (found.problem, found.fix) == ("no C++ compiler at CXX=/nowhere/g++", "unset CXX, or set it to one")
    monkeypatch.setenv("CXX", "ccache g++")
    assert toolchain.troubles(("compiler",)) == [] and build.host_compiler() == "/bin/g++"


def test_an_nvcc_on_the_path_without_its_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script of that name that calls the true one: PyTorch then looks for headers beside the script."""
    for part in ("bin", "cuda/bin", "cuda/include"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "cuda/include/cuda_runtime.h").touch()
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: str(tmp_path / "bin" / name))
    assert toolchain.torch_home() == str(tmp_path)
    found = toolchain.headers_trouble(toolchain.torch_home(), str(tmp_path / "cuda/bin/nvcc"))
    assert found and found.fix == f"set CUDA_HOME to {tmp_path / 'cuda'}"
    assert toolchain.headers_trouble(str(tmp_path / "cuda"), "nvcc") is None


def test_nvcc_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain.build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(toolchain.build, "nvcc_release", lambda path: "13.0")
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: "12.8")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    other, list_of_none = toolchain.troubles(("nvcc",))
    assert other.problem == "nvcc is of CUDA 13.0, torch of 12.8"
    assert list_of_none == Trouble(
        problem="TORCH_CUDA_ARCH_LIST: 'sm_90' is no architecture",
        fix="write them as in TORCH_CUDA_ARCH_LIST='8.0;9.0+PTX', or unset it for the GPU's own",
    )


def test_the_packages_files_are_in_a_wheel() -> None:
    """pyproject names them by how deep they lie."""
    depths = {len(path.relative_to(TEMPLATES).parts) for path in TEMPLATES.rglob("*.in")}
    words = (Path(projects.__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    for depth in depths:
        assert f'"extensions/projects/templates/{"*/" * (depth - 1)}*.in"' in words
