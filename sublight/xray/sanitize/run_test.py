"""Planted bugs are found at their lines, and right kernels are left alone; bad input gets one clear line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.xray.sanitize import run as sanitize

PLANTED = Path(__file__).parents[3] / "examples" / "kernels"
WRONG, RIGHT = (sorted((PLANTED / folder).glob("*.py")) for folder in ("wrong", "right"))


def marks(file: Path, word: str) -> set[tuple[str, int]]:
    """What the comments of a planted script say should be found, and where."""
    found = set()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if told := re.search(rf"# {word}: (.*)", line):
            found |= {(id.strip(), number) for id in told[1].split(",")}
    return found


def order(file: Path) -> sanitize.Script:
    sizes = re.search(r"run with: --at (\S+)", file.read_text(encoding="utf-8"))
    return sanitize.Script(file=file, at=sanitize.parse_sizes(sizes[1]) if sizes else {})


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, sanitize.Report]:
    """All planted scripts, and a few of this file's own, in one process."""
    folder = tmp_path_factory.mktemp("scripts")
    own = []
    for name, source in OWN.items():
        (folder / f"{name}.py").write_text(HEAD + source, encoding="utf-8")
        own.append(folder / f"{name}.py")
    (folder / "more").mkdir()
    (folder / "more" / "beside.py").write_text(HEAD + BESIDE, encoding="utf-8")
    files = [*WRONG, *RIGHT, *own]
    return {file.stem: report for file, report in zip(files, sanitize.run_all(list(map(order, files))), strict=True)}


def found(report: sanitize.Report, *, information: bool = False) -> set[tuple[str, int]]:
    return {
        (finding.id, finding.place.line if finding.place else 0)
        for finding in report.findings
        if finding.is_information is information
    }


def test_there_are_twenty_of_each() -> None:
    assert len(WRONG) >= 20 and len(RIGHT) >= 20
    assert not {file.stem for file in WRONG} & {file.stem for file in RIGHT}
    assert all(marks(file, "planted") for file in WRONG)
    assert not any(marks(file, "planted") for file in RIGHT)


@pytest.mark.parametrize("file", WRONG, ids=lambda file: file.stem)
def test_planted_bugs_are_found_at_their_lines(file: Path, reports: dict[str, sanitize.Report]) -> None:
    report = reports[file.stem]
    assert found(report) == marks(file, "planted")
    assert {finding.place.file for finding in report.findings if finding.place} == {str(file.resolve())}
    assert not report.is_clean


@pytest.mark.parametrize("file", RIGHT, ids=lambda file: file.stem)
def test_right_kernels_are_left_alone(file: Path, reports: dict[str, sanitize.Report]) -> None:
    report = reports[file.stem]
    assert found(report) == set()
    assert found(report, information=True) == marks(file, "information")
    assert report.is_clean and not report.failure and report.launches


HEAD = "import torch, triton\nimport triton.language as tl\n"
BESIDE = """
MOST = tl.constexpr(torch.cuda.get_device_properties(0).warp_size * 32)
@triton.jit
def twice(x):
    return x + x
"""
OWN = {
    "gluon_after_triton": """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
@triton.jit
def first(x_ptr):
    tl.store(x_ptr, 1.0)
@gluon.jit
def second(x_ptr):
    gl.store(x_ptr, 2.0)
x = torch.zeros(1)
first[(1,)](x)
second[(1,)](x)  # information: not-interpreted
""",
    "same_value": """
@triton.jit
def k(x_ptr):
    tl.store(x_ptr, 1.0)  # information: race
k[(4,)](torch.zeros(1))
""",
    "waits_for_a_later_program": """
@triton.jit
def k(count_ptr, PROGRAMS: tl.constexpr):
    tl.atomic_add(count_ptr, 1)
    while tl.atomic_add(count_ptr, 0) < PROGRAMS:  # information: not-interpreted
        pass
k[(2,)](torch.zeros(1, dtype=torch.int32), PROGRAMS=2)
""",
    "builtin_of_gpus_alone": """
from triton.language.extra import cuda
@triton.jit
def k(x_ptr):
    cuda.gdc_wait()  # information: not-interpreted
    tl.store(x_ptr, 1.0)
k[(1,)](torch.zeros(1))
""",
    "fails_by_itself": """
@triton.jit
def k(x_ptr):
    tl.store(x_ptr, 1.0)
k[(1,)](torch.zeros(1))
raise SystemExit(3)  # planted: script-failed
""",
    "default_and_function_by_name": """
from triton.language.extra.libdevice import rsqrt
MEAN: tl.constexpr = tl.constexpr(3)
torch.set_default_device("cuda")
@triton.jit
def k(x_ptr, BLOCK: tl.constexpr, mode: tl.constexpr = MEAN):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, rsqrt(tl.load(x_ptr + at) + mode))
k[(1,)](torch.ones(64), BLOCK=64)
""",
    "fails_in_the_kernel": """
@triton.jit
def k(x_ptr):
    tl.static_assert(False, "not this")  # planted: script-failed, does-not-compile
k[(1,)](torch.zeros(1))
""",
    "libdevice": """
from triton.language.extra import libdevice
torch.set_default_device("cuda")
@triton.jit
def k(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, libdevice.tanh(tl.load(x_ptr + at)))
x = torch.randn(64)
y = torch.empty_like(x)
assert x.device.type == "cuda" and x.cuda().is_cuda and torch.cuda.is_available()
k[(1,)](x, y, BLOCK=64)
torch.testing.assert_close(y, x.tanh())
""",
    "freed_and_made_again": """
@triton.jit
def k(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))
import numpy as np
for _ in range(20):
    torch.empty(1 << 20)
    x = torch.from_numpy(np.ones(1 << 20, np.float32))
    k[(1,)](x, torch.zeros(64), BLOCK=64)
""",
    "late_write": """
@triton.jit
def k(y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 1.0, mask=at < n)
y = torch.empty(64)
k[(1,)](y, 32, BLOCK=64)
y[32:] = 2.0
assert y.sum().item() == 96
""",
    "mixed_sizes": """
@triton.jit
def k(x_ptr, byte_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(byte_ptr + at, tl.full((BLOCK,), 1, tl.int8))  # planted: unwritten-output
    tl.debug_barrier()
    tl.store(x_ptr, tl.load(x_ptr) + tl.load(x_ptr + BLOCK // 4))  # planted: uninitialised-read
x = torch.empty(64)
k[(1,)](x, x.view(torch.int8), BLOCK=64)
""",
    "other_process": """
import multiprocessing
@triton.jit
def k(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at <= n)  # planted: out-of-bounds
def work():
    k[(1,)](torch.zeros(10, device="cuda"), 10, BLOCK=16)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
""",
    "other_thread": """
from concurrent.futures import ThreadPoolExecutor
@triton.jit
def k(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at <= n)  # planted: out-of-bounds
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda _: k[(1,)](torch.zeros(10, device="cuda"), 10, BLOCK=16), range(4)))
""",
    "configs_of_a_call": """
def configs():
    return [triton.Config({"BLOCK": 64})]
@triton.autotune(configs=configs(), key=["n"])
@triton.jit
def k(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    at = tl.arange(0, n)  # planted: does-not-compile, script-failed
    tl.store(x_ptr + at, 1.0, mask=at < n)
k[(1,)](torch.zeros(64), 64)
""",
    "module_beside": """
import os, sys
sys.path.append(os.path.join(os.path.dirname(__file__), "more"))
import beside
@triton.jit
def k(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, beside.twice(tl.load(x_ptr + at)))
    tl.static_assert(BLOCK <= beside.MOST)
k[(1,)](torch.zeros(64), BLOCK=64)
""",
    "benchmark": """
@triton.jit
def k(x_ptr):
    tl.store(x_ptr, 1.0)
def never(n):
    raise AssertionError
report = triton.testing.Benchmark(
    x_names=["n"], x_vals=[1 << 28], line_arg="p", line_vals=["a"], line_names=["a"], plot_name="", args={}
)
triton.testing.perf_report(report)(never).run(print_data=True)
assert k[(1,)](torch.zeros(1)).asm["ptx"] == ""
""",
    "by_constant": """# run with: --at COLS=100_000_000
@triton.jit
def k(x_ptr, y_ptr, COLS: tl.constexpr):
    row = tl.program_id(0)
    tl.store(y_ptr + row, tl.load(x_ptr + row * COLS))  # planted: offset-overflow
k[(30,)](torch.zeros(30, 2), torch.empty(30), COLS=2)
""",
}


@pytest.mark.parametrize("name", OWN)
def test_own_scripts(name: str, reports: dict[str, sanitize.Report]) -> None:
    report = reports[name]
    assert found(report) == marks(report.script, "planted")
    assert found(report, information=True) == marks(report.script, "information")


def test_what_is_said(reports: dict[str, sanitize.Report]) -> None:
    assert "the same value, so harmless" in reports["same_value"].findings[0].detail
    assert "not this" in reports["fails_in_the_kernel"].failure
    assert "waits for a later one" in reports["waits_for_a_later_program"].failure


def test_details_name_program_tensor_and_place(reports: dict[str, sanitize.Report]) -> None:
    [load, store] = reports["off_by_one_mask"].findings
    assert load.kernel == "_double_kernel"
    assert load.detail == (
        "program (7, 0, 0) reads at offset 1000 of x_ptr, a float32 [1000] that ends at 1000: "
        "mask it off, or mend the stride"
    )
    assert store.detail.startswith("program (7, 0, 0) writes at offset 1000 of y_ptr")
    [overflow] = reports["offset_overflow_flat"].findings
    assert "2,999,999,744 becomes -1,294,967,552" in overflow.detail
    [race] = reports["race_same_values"].findings
    assert race.detail == (
        "program (1, 0, 0) writes y_ptr[128] (a float16 [1024]), which program (0, 0, 0) writes (line 16): the values "
        "are the same this time, so their tiles overlap; give each program its own elements (7 times in all)"
    )
    read, unwritten = sorted(reports["uninitialised_one_more"].findings, key=lambda finding: finding.id)
    assert read.detail == (
        "program (0, 0, 0) reads cache_ptr[0, 3, 0] (a float32 [2, 8, 16]), which torch.empty made and nobody wrote "
        "(16 lanes do): write it first, or begin with torch.zeros (2 times in all)"
    )
    assert unwritten.detail.startswith("128 of 256 elements of cache_ptr, a float32 [2, 8, 16] that torch.empty made")
    assert "(the first is [0, 3, 0])" in unwritten.detail
    assert reports["off_by_one_mask"].to_json()["findings"][0] == {
        "id": "out-of-bounds",
        "kernel": "_double_kernel",
        "file": str((PLANTED / "wrong/off_by_one_mask.py").resolve()),
        "line": 15,
        "detail": load.detail,
    }


def test_what_a_script_prints_leaves_stdout_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert sanitize._ended(sanitize._python("this", interpret=False)) == 0
    said = capfd.readouterr()
    assert said.out == "" and "Zen" in said.err


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a file"):
        sanitize.run(tmp_path / "none.py")
    with pytest.raises(BadInput, match="write NAME=NUMBER"):
        sanitize.parse_sizes("n=many")
    with pytest.raises(BadInput, match="write NAME=NUMBER"):
        sanitize.parse_sizes("n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"launches": 0, "failure": ""}, "launches no Triton kernel"),
        ({"launches": 0, "failure": "ImportError: x"}, "line 4: it ended before it launched a kernel: ImportError: x"),
        ({"launches": 1, "unused": ["rows"]}, "--at rows: no kernel of .* has that number; they have n"),
    ],
)
def test_runs_that_show_nothing(
    answer: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other process answers is made up here: starting one takes seconds."""
    import json
    import pickle

    class Ended:
        def wait(self) -> int:
            return 0

        def kill(self) -> None: ...
        def communicate(self) -> None: ...

    def pretend(module: str, *files: str, interpret: bool, stdin: int | None = None) -> Ended:
        if not interpret:  # the compiler, which is there from the beginning and gets nothing to do
            return Ended()
        order = json.loads(Path(files[0]).read_text(encoding="utf-8"))
        failed = {"id": "script-failed", "kernel": "", "file": "a.py", "line": 4, "detail": "", "is_information": False}
        result = {
            "findings": [failed] if answer.get("failure") else [],
            "kernels": [],
            "arguments": ["n"],
            "unused": [],
        }
        Path(order["answers"]).write_text(json.dumps([{**result, "failure": "", **answer}]), encoding="utf-8")
        Path(order["jobs"]).write_bytes(pickle.dumps([[]]))
        return Ended()

    monkeypatch.setattr(sanitize, "_python", pretend)
    monkeypatch.setitem(sys.modules, "sublight.xray.sanitize.compile", None)  # for the other process alone to load
    (tmp_path / "script.py").write_text("", encoding="utf-8")
    with pytest.raises(BadInput, match=words):
        sanitize.run(tmp_path / "script.py", at={"rows": 5})


def test_importing_it_loads_neither_torch_nor_triton() -> None:
    asked = "import sys, sublight.xray.sanitize.run; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, env=dict(os.environ))
    assert result.stdout.strip() == "set()"


def test_nothing_of_the_working_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert sanitize._ended(sanitize._python("theirs", interpret=False)) == 1, "there is no such module"
