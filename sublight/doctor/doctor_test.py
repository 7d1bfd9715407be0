"""The doctor tells ok from missing from broken, names a fix for each, and survives a broken machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublight import doctor, gpus, nvml
from sublight.cli import main as cli
from sublight.doctor import gpu, kept, packages, tools
from sublight.doctor.record import Check
from sublight.extensions import build, toolchain
from sublight.report import doctor as report


def script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_what_is_here_is_found() -> None:
    checks = {check.name: check for check in doctor.examine()}
    assert checks["Python"].state == "ok"
    assert checks["Python"].found.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert checks["rich"].state == "ok"
    assert not doctor.broken(list(checks.values()))
    for check in checks.values():
        assert check.needed_for
        assert check.state == "ok" or check.fix, f"{check.name} is {check.state} and no fix is named"


def test_tools_by_what_they_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    script(tmp_path, "ncu", "echo 'NVIDIA (R) Nsight Compute'; echo 'Version 2025.1.0.0 (build 35237751)'")
    script(tmp_path, "nsys", "exit 3")
    ok, broken = (tools.tool(name, ("--version",), "profiling", "reinstall") for name in ("ncu", "nsys"))
    missing = tools.tool("no-such-tool", ("--version",), "profiling", "install it")
    assert (ok.state, ok.found) == ("ok", "2025.1.0.0")
    assert (broken.state, broken.fix) == ("broken", "reinstall")
    assert (missing.state, missing.fix) == ("missing", "install it")


def test_a_package_that_fails_to_import_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn_package.py").write_text("raise ImportError('libmissing.so: cannot open\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = packages.package("torn_package", "tests", "reinstall it", True)
    assert (check.state, check.found, check.fix) == ("broken", "libmissing.so: cannot open", "reinstall it")
    assert packages.package("never_written", "tests", "install it", False).state == "missing"


@pytest.mark.parametrize(
    ("parameters", "admin", "state"),
    [
        ("RmProfilingAdminOnly: 0\n", False, "ok"),
        ("RmProfilingAdminOnly: 1\n", True, "ok"),
        ("RmProfilingAdminOnly: 1\n", False, "broken"),
        (None, True, "missing"),
    ],
)
def test_counters(
    parameters: str | None, admin: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "params"
    if parameters is not None:
        path.write_text(parameters)
    monkeypatch.setattr(gpu, "DRIVER_PARAMETERS", path)
    monkeypatch.setattr(gpu, "_is_admin", lambda: admin)
    assert gpu.counters().state == state


@pytest.mark.parametrize(("hip", "cuda", "build"), [(None, None, "cpu"), (None, "13.0", "cuda"), ("6.4", None, "rocm")])
def test_torch_builds(hip: str | None, cuda: str | None, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(__version__="2.11.0", version=SimpleNamespace(hip=hip, cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", fake)
    torch, runtime = packages.torch_and_runtime()
    assert torch.found == f"2.11.0 ({build} build)"
    assert (runtime.state, runtime.found) == (("ok", hip or cuda) if hip or cuda else ("missing", ""))


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: None)
    monkeypatch.setattr(nvml, "health", lambda: None)
    assert gpu.device().state == "missing"
    monkeypatch.setattr(nvml, "health", lambda: SimpleNamespace(driver="570"))
    assert gpu.device().state == "broken"

    def fail() -> Any:
        raise RuntimeError("CUDA driver is too old\nupdate it")

    monkeypatch.setattr(gpus, "detect", fail)
    assert gpu.device().found == "CUDA driver is too old"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "cache"))
    assert kept.cache().state == "ok"
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "file"))
    assert kept.cache().state == "broken"


def test_only_what_is_required_decides_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optional = Check(name="ncu", state="broken", needed_for="counters", fix="reinstall")
    monkeypatch.setattr(doctor, "examine", lambda: (optional,))
    assert cli.run(["doctor"]) == 0
    required = Check(name="rich", state="missing", needed_for="tables", fix="pip install rich", required=True)
    monkeypatch.setattr(doctor, "examine", lambda: (optional, required))
    assert cli.run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "pip install rich" in out
    assert report.to_json((optional,))["checks"][0]["name"] == "ncu"


def test_it_runs_without_torch(tmp_path: Path) -> None:
    for name in ("torch", "triton", "numpy", "pynvml"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name={name!r})")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{path}; from sublight.cli import main as cli; sys.exit(cli.run(['doctor', '--json', '-']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1]
    )
    assert (done.returncode, done.stderr) == (0, "")
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert (states["torch"], states["triton"], states["NVML and driver"]) == ("missing", "missing", "missing")


@pytest.mark.parametrize(
    ("words", "capability", "problem"),
    [
        ("9.0", 90, None),
        ("Ampere Hopper", 90, None),
        ("8.0;8.6", 89, None),  # machine code of the same generation
        ("9.0a", 90, None),
        ("7.5+PTX", 120, None),
        ("12.0", 90, "no code for this GPU"),
        ("9.0", 100, "no code for this GPU"),
        ("9.0,10.0", 90, "is no architecture"),
        ("90", None, "is no architecture"),
        ("8.0", None, None),  # no GPU here: it may be for another machine
    ],
)
def test_a_wrong_list_of_architectures(words: str, capability: int | None, problem: str | None) -> None:
    found = toolchain.arch_list_trouble(words, capability)
    assert (found is None) if problem is None else (found is not None and problem in found.problem and found.fix)


def toolkit(folder: Path) -> Path:
    """A folder with CUDA's headers, as far as it is looked at."""
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "cuda_runtime.h").touch()
    return folder


def test_versions_of_cuda_that_do_not_match_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(tools, "load", lambda module: SimpleNamespace(version=SimpleNamespace(cuda="12.8")))
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "nvcc_release", lambda path: "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    arch, cuda, headers = tools.extensions()
    assert (headers.state, headers.found) == ("ok", str(home))
    assert (arch.state, arch.found) == ("broken", "'sm_90' is no architecture") and "unset it" in arch.fix
    assert (cuda.state, cuda.found) == ("broken", "nvcc is of CUDA 13.0, torch of 12.8") and "CUDA_HOME" in cuda.fix
    monkeypatch.setattr(build, "nvcc_release", lambda path: "12.4")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    cuda, headers = tools.extensions()
    assert (cuda.state, cuda.found) == ("ok", "CUDA 12.4 and 12.8")
    assert headers.state == "broken" and "other, which has no include/cuda_runtime.h" in headers.found


def test_an_nvcc_that_driver_or_gpu_do_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(tools, "load", lambda module: SimpleNamespace(version=SimpleNamespace(cuda=None)))
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "nvcc_release", lambda path: "13.0")
    monkeypatch.setattr(tools.nvml, "cuda_version", lambda: "12.8")
    monkeypatch.setattr(tools.gpus, "detect", lambda: SimpleNamespace(compute_capability=(9, 0)))
    driver, gpu = tools.extensions()
    assert (driver.state, driver.found) == ("broken", "nvcc is of CUDA 13.0, the driver takes up to 12.8")
    assert "newer driver" in driver.fix and (gpu.state, gpu.found) == ("ok", "CUDA 13.0 and 9.0")
    monkeypatch.setattr(build, "nvcc_release", lambda path: "11.4")
    driver, gpu = tools.extensions()
    assert driver.state == "ok" and gpu.state == "broken" and "11.8 or later" in gpu.fix


def test_a_missing_cpp_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name, **more: None)
    check = tools.cpp_compiler()
    assert check.state == "missing" and "apt install g++" in check.fix


def test_nvcc_is_found_where_builds_find_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not on the PATH, but in CUDA_HOME."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "nvcc"
    tool.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    check = tools.tool("nvcc", ("--version",), "x", "y")
    assert (check.state, check.found) == ("ok", "13.0")
