"""`sublight xray` as its user meets it: what each form asks for, what is refused, and where everything goes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sublight import gpus
from sublight.cli import main as cli
from sublight.cli import options
from sublight.cli import output as cli_output
from sublight.cli import xray as cli_xray
from sublight.cli.main_test import HEAVY, Say, python
from sublight.report.xray import fakes as xray_fakes
from sublight.results import Samples
from sublight.xray import examine
from sublight.xray.counters import measure
from sublight.xray.counters.record import Counters
from sublight.xray.inputs import load
from sublight.xray.record import Code, Finding
from sublight.xray.sanitize import run as sanitize

CSV = (
    '"ID","Kernel Name","Block Size","Grid Size","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",'
    '"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"\n"","","","","",""\n'
    '"0","_double","(128, 1, 1)","(256, 2, 1)","100","1600"\n'
)
KERNELS = """
import triton
import triton.language as tl
print("imported")

@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)
"""


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run the command with these words: its status, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(words)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Kernels made by hand instead of compiled ones; what `load` was asked for."""
    calls: list[dict[str, Any]] = []

    def fake(target: str, wanted: list[gpus.Gpu], **given: Any) -> tuple[Code, ...]:
        calls.append({"target": target, "gpus": [gpu.key for gpu in wanted], **given})
        os.write(1, b"said by the user's file\n")
        names = ("_double", "_other") if target.endswith("two.py") else ("_double",)
        registers = 64 if "N=64" in given["constants"] else 40
        used = dataclasses.replace(xray_fakes.code().resources, registers=registers)
        keys = [gpu.key for gpu in wanted] or ["h200"]
        return tuple(xray_fakes.code(key, name=name, resources=used) for key in keys for name in names)

    def page(code: Code, *, measured_s: float | None = None) -> examine.Page:
        made = xray_fakes.page(code=code)
        bounds = (*made.roof.bounds, examine_bound(measured_s)) if measured_s else made.roof.bounds
        return dataclasses.replace(made, roof=dataclasses.replace(made.roof, bounds=bounds))

    monkeypatch.setattr(load, "load", fake)
    monkeypatch.setattr(examine, "examine", page)
    monkeypatch.setattr(gpus, "detect", lambda: None)
    monkeypatch.setenv(
        "TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "")
    )  # put back, whatever the command does
    monkeypatch.chdir(tmp_path)
    for name in ("one.py", "two.py", "k.cu", "k.cubin"):
        (tmp_path / name).touch()
    (tmp_path / "cache").mkdir()
    (tmp_path / "r.csv").write_text(CSV, encoding="utf-8")
    return calls


def examine_bound(seconds: float) -> Any:
    from sublight.xray.roof import Bound

    return Bound(name="measured", seconds=seconds, detail="the median, on this machine")


# ------------------------------------------------------------------------------------------------ pages


def test_one_kernel_on_a_gpu_that_many_have(say: Say, asked: list[dict[str, Any]]) -> None:
    status, out, err = say("xray", "one.py:_double")
    assert (status, err) == (0, "")
    assert out.startswith("_double  double.py\n") and "registers a thread" in out
    assert asked[0] | {"target": "one.py:_double", "gpus": ["h100"], "dtype": "bfloat16", "may_run": True} == asked[0]
    assert (asked[0]["threads"], asked[0]["record"], asked[0]["shape"]) == (None, False, "")
    assert (asked[0]["shared_bytes"], asked[0]["flags"]) == (0, [])


def test_lanes_of_cuda_are_read_off_its_addresses(
    say: Say, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With what --arg says of the launch, as the addresses depend on it."""
    from sublight.xray.ptx.accesses_test import planted

    body = "mov.u32 %r5, %r1; mul.wide.u32 %rd3, %r5, 8; add.s64 %rd4, %rd1, %rd3; setp.gt.u32 %p1, %r9, 5; "
    code = planted(f"{body} @%p1 bra DONE; ld.global.u32 %r6, [%rd4]; DONE: ", n=None)
    monkeypatch.setattr(load, "load", lambda *given, **named: (code,))
    status, out, err = say("xray", "k.cu", "--lanes", "--arg", "n=3", "--html", "page.html")
    assert (status, err) == (0, "")
    assert "each lane 8 bytes behind the last" in " ".join(out.split()) and "+128 16··17··18" in out
    assert "Where the lanes of a warp go" in (tmp_path / "page.html").read_text(encoding="utf-8")
    status, out, _ = say("xray", "k.cu", "--threads", "--json", "-")  # a bare --threads is --lanes
    assert status == 0 and "--arg n=" in json.loads(out)["notes"][0]


def test_every_option_reaches_the_kernel(say: Say, asked: list[dict[str, Any]]) -> None:
    assert say("xray", "softmax", "--gpu", "a100,h200,A100", "--shape", "4x8", "--dtype", "fp32")[0] == 0
    assert asked[0] | {"gpus": ["a100", "h200"], "shape": "4x8", "dtype": "float32"} == asked[0]
    words = ("one.py", "--sig", "x_ptr:*bf16", "--const", "N=64", "--const", "num_warps=8", "--gpu", "h200")
    assert say("xray", *words)[0] == 0
    assert asked[1] | {"signature": "x_ptr:*bf16", "constants": ("N=64", "num_warps=8")} == asked[1]
    assert say("xray", "one.py", "--record", "--", "--steps", "2")[0] == 0
    assert asked[2] | {"record": True, "arguments": ("--steps", "2")} == asked[2]
    result = ("--threads", "32x8", "--shared", "48KiB", "--nvcc", "-std=c++20 -DN=4")
    assert say("xray", "k.cu", *result)[0] == say("xray", "k.cubin", "--no-exec")[0] == 0
    assert asked[3]["threads"] == (32, 8) and asked[3]["shared_bytes"] == 48 * 1024
    assert (
        asked[3]["flags"] == ["-std=c++20", "-DN=4"] and asked[3]["gpus"] == ["h100"] and asked[4]["may_run"] is False
    )
    assert asked[4]["gpus"] == []  # a cubin says for which it is


def test_the_launch_is_what_the_user_says(say: Say, asked: list[dict[str, Any]]) -> None:
    status, out, _ = say("xray", "one.py", "--grid", "64x8", "--arg", "x_ptr=4096,1=0.5", "--json", "-")
    assert status == 0 and json.loads(out)["kernels"][0]["grid"] == [64, 8]
    wanted = cli_xray.Wanted(target="one.py", numbers=("x_ptr=4096", "1=0.5"))
    (code,) = cli_xray._with_arguments([xray_fakes.code()], wanted)
    assert code.arguments == {"x_ptr": 4096, "1": 0.5} and code.grid == (256, 2)


def test_several_kernels_are_summed_up_unless_told(say: Say, asked: list[dict[str, Any]]) -> None:
    status, out, _ = say("xray", "two.py", "--gpu", "a100,h200")
    assert status == 0 and out.startswith("2 kernels of two.py on a100, h200\n") and "registers a thread" not in out
    assert "one kernel's whole page: two.py:_double" in out
    assert say("xray", "two.py", "--full")[1].count("registers a thread") == 2


def test_html_and_json_files(say: Say, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    status, out, _ = say("xray", "two.py", "--html", "x.html", "--json", "x.json")
    assert status == 0 and "2 kernels" in out
    assert [each["name"] for each in json.loads((tmp_path / "x.json").read_text())["kernels"]] == ["_double", "_other"]
    html = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and "_other" in html and 'class="wide tall summary"' in html


def test_stdout_is_for_the_result_alone(capfd: pytest.CaptureFixture[str], asked: list[dict[str, Any]]) -> None:
    assert cli.run(["xray", "one.py", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["kernels"][0]["name"] == "_double" and err == "said by the user's file\n"
    with pytest.raises(ValueError, match="as raised"), cli_output.stdout_kept():
        os.write(1, b"x")
        raise ValueError("as raised")
    os.write(1, b"again\n")
    assert capfd.readouterr() == ("again\n", "x")


def test_what_is_shown_loads_no_costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sublight.results", None)
    cli_output.show("a result", {}, "")
    assert capsys.readouterr().out == "a result\n"


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a kernel: sublight xray kernels.py:my_kernel, or an op: sublight xray softmax"),
        (["nothing.py"], "no file 'nothing.py'"),
        (["softmaxx"], "unknown op 'softmaxx': did you mean softmax"),
        (["one.py", "--gpu", "h300"], "unknown GPU 'h300': nearest are h200"),
        (["one.py", "two.py"], "two.py: one kernel file at a time"),
        (["one.py", "--at", "n=3"], "without --run, xray takes no --at: leave it out"),
        (["softmax", "--sig", "x:*bf16", "--threads", "4"], "an op takes no --sig and no --threads: leave them out"),
        (["softmax", "--record"], "an op takes no --record"),
        (["softmax", "--dtype", "int3"], "unknown data type 'int3'"),
        (["one.py", "--shape", "4x4"], "a Python file takes no --shape"),
        (["one.py", "--threads", "128"], "a Python file takes no --threads"),
        (["k.cu", "--const", "N=1"], "CUDA C++, PTX or a cubin takes no --const"),
        (["cache", "--threads", "4"], "a Triton cache takes no --threads"),
        (["one.py", "--const", "after:N=1"], "is for the second kernel of --diff"),
        (["one.py", "--grid", "4x"], "--grid '4x': write blocks, as in 132 or 64x8"),
        (["one.py", "--grid", "1x2x3x4"], "--grid '1x2x3x4'"),
        (["one.py", "--grid", "1x65536"], "no GPU launches more than 2,147,483,647 x 65,535 x 65,535 blocks"),
        (["one.py", "--grid", "0"], "--grid '0'"),
        (["one.py", "--arg", "n"], "--arg 'n': write NAME=NUMBER"),
        (["one.py", "--arg", "m=4"], "--arg m: no such argument; the arguments are x_ptr, y_ptr"),
        (["one.py", "--arg", "2=4"], "--arg 2: no such argument"),
        (["k.cu", "--threads", "0"], "--threads 0: a block has 1 to 1024 threads"),
        (["k.cu", "--threads", "many"], "--threads 'many': write a block's threads, as in 256 or 32x8"),
        (["k.cu", "--shared", "lots"], "--shared: 'lots' is not a quantity"),
        (["one.py", "--measure"], "--measure needs a GPU, and torch finds none here"),
        (["one.py", "--lr", "3"], "as in `sublight xray --record train.py -- --lr 3`"),
        (["one.py", "--html", "cache"], "cannot write cache: it is a folder"),
        (["one.py", "--json", "one.py"], "named twice"),
        (["one.py", "--import", "no.csv"], "there is no file no.csv"),
        (["--import", "r.csv", "--html", "x.html"], "--import without a kernel takes no --html"),
        (["--diff"], "--diff takes two"),
        (["--diff", "one.py"], "--diff takes two"),
        (["--diff", "one.py", "two.py", "k.cu"], "--diff takes two"),
        (["--diff", "one.py", "two.py", "--html", "x.html"], "--diff takes no --html: leave it out"),
        (["--diff", "one.py", "two.py", "--record"], "--diff takes no --record"),
        (["--run"], "--run takes a Python script: sublight xray --run script.py"),
        (["--run", "softmax"], "--run takes a Python script: sublight xray --run script.py, not softmax"),
        (["--run", "one.py", "--gpu", "h100", "--html", "x"], "--run takes no --gpu and no --html: leave them out"),
        (["--run", "one.py", "--at", "n"], "--at n: write NAME=NUMBER"),
        (["--run", "--diff", "one.py", "two.py"], "one of them at a time"),
    ],
)
def test_bad_input_is_one_line(
    say: Say,
    asked: list[dict[str, Any]],
    words: list[str],
    message: str,
) -> None:
    status, out, err = say("xray", *words)
    assert (status, out) == (2, "")
    assert err.startswith("sublight: ") and err.count("\n") == 1 + err.count("said by the user's file\n")
    assert not asked or "no such argument" in message  # all else is refused before kernels are loaded or compiled
    assert message in err


# ------------------------------------------------------------------------------------------------ the other verbs


def test_diff_of_two_and_of_two_constants(say: Say, asked: list[dict[str, Any]]) -> None:
    status, out, _ = say("xray", "--diff", "one.py", "k.cubin", "--gpu", "h200")
    assert status == 0 and [each["target"] for each in asked] == ["one.py", "k.cubin"]
    assert "the same instructions" in out
    asked.clear()
    words = ("--const", "N=512", "--const", "M=1", "--const", "after:N=64")
    status, out, _ = say("xray", "--diff", "one.py:k", *words, "--json", "-")
    assert [(each["target"], each["constants"]) for each in asked] == [
        ("one.py:k", ("N=512", "M=1")), ("one.py:k", ("M=1", "N=64")),
    ]  # fmt: skip
    assert status == 0 and json.loads(out)["kernels"][0]["figures"]["registers a thread"] == ["40", "64"]
    status, out, _ = say("xray", "--diff", "one.py", "two.py")
    assert status == 0 and out.rstrip().endswith("on one side only: _other")


@pytest.mark.parametrize(("is_information", "status"), [(True, 0), (False, 1)])
def test_run_says_by_its_status_whether_something_is_wrong(
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    is_information: bool,
    status: int,
) -> None:
    found = Finding(id="race", kernel="k", place=xray_fakes.place(3), detail="Two.", is_information=is_information)
    given: list[Any] = []

    def fake(script: Path, args: Any, *, at: Any) -> sanitize.Report:
        given.append((script, args, at))
        return sanitize.Report(script=script, findings=(found,), kernels=("k",), launches=1, failure="")

    monkeypatch.setattr(sanitize, "run", fake)
    told, out, err = say("xray", "--run", "a.py", "--at", "n=2**31", "--", "--fast")
    assert (told, err) == (status, "") and out.startswith("race  double.py:3  k\n  Two.\n")
    assert given == [(Path("a.py"), ("--fast",), {"n": 2**31})]
    told, out, _ = say("xray", "--run", "a.py", "--json", "-")
    assert told == status
    assert json.loads(out)["findings"] == [
        {"id": "race", "kernel": "k", "file": xray_fakes.FILE, "line": 3, "detail": "Two."}
    ]


def test_counters_alone_and_beside_a_kernel(say: Say, asked: list[dict[str, Any]]) -> None:
    status, out, _ = say("xray", "--import", "r.csv")
    assert (
        status == 0
        and asked == []
        and out.splitlines()[2].split()
        == [
            "_double",
            "16",
        ]
    )
    status, out, _ = say("xray", "one.py", "--import", "r.csv", "--json", "-")
    data = json.loads(out)
    assert status == 0 and data["kernels"][0]["name"] == data["counted"][0]["kernel"] == "_double"
    assert next(each for each in data["compared"] if each["what"] == "global load")["counted"] == 16
    assert "global load, sectors per request" in say("xray", "one.py", "--import", "r.csv")[1]


def test_measured_time_and_counters_are_on_the_page(
    say: Say,
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: gpus.find("h200"))
    commands = []

    def fake(launches: Any, *, command: Any) -> list[measure.Measured]:
        commands.append((len(launches), command))
        counted = Counters(kernel="_double", load_requests=10, load_sectors=160)
        samples = Samples(times_s=(2e-5, 2e-5, 2e-5), method="graph")
        return [measure.Measured(kernel="_double", samples=samples, counters=counted, no_counters="")]

    monkeypatch.setattr(measure, "measure", fake)
    status, out, _ = say("xray", "one.py:_double", "--record", "--measure", "--gpu", "a100,h200", "--", "3")
    assert status == 0 and commands == [(1, (sys.executable, "one.py", "3"))]  # the A100 is not here
    assert "measured 20.0 µs" in out and "global load, sectors per request" in out
    assert say("xray", "one.py", "--measure", "--gpu", "a100")[2].startswith("sublight: --measure runs on h200")


def test_what_could_not_be_measured_is_noted(asked: list[dict[str, Any]]) -> None:
    found = measure.Measured(kernel="_double", no_time="its tensors are not on the GPU", no_counters="no ncu")
    notes = cli_xray._with_time(xray_fakes.code(), found).notes
    assert notes[-2:] == ("not timed: its tensors are not on the GPU", "no counters: no ncu")


# ------------------------------------------------------------------------------------------------ the shell


def test_completion_of_ops_files_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sof.py", "soft.txt", "software.cu"):
        (tmp_path / name).touch()
    (tmp_path / "sofas").mkdir()
    assert options.op_and_file_names("sof") == ["softmax", "softmax_topk", "sof.py", "software.cu", "sofas/"]
    assert options.gpu_lists("h2") == ["h200"] and options.gpu_lists("a100,h2") == ["a100,h200"]


@pytest.mark.parametrize(
    ("words", "expected"), [("xray softm", "softmax"), ("xray softmax --gpu a100,h20", "a100,h200")]
)
def test_the_shell_is_told(words: str, expected: str) -> None:
    code = "from sublight.cli import main as cli; cli.main()"
    result = {
        "COMP_WORDS": f"sublight {words}",
        "COMP_CWORD": str(len(words.split())),
        "_SUBLIGHT_COMPLETE": "complete_bash",
    }
    assert expected in python(code, **result).stdout.split()


def test_help_says_what_runs_code_and_loads_nothing() -> None:
    code = "import sys; from sublight.cli import main, options; main.run(['xray', '--help']); "
    code += "options.op_and_file_names('s'); "
    done = python(f"{code}print('loaded:', *(m for m in {HEAVY} if m in sys.modules))")
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert (
        "imported, which runs it" in " ".join(done.stdout.split())
        and "  sublight xray --run script.py\n" in done.stdout
    )


# ------------------------------------------------------------------------------------------------ with a compiler


def test_a_real_kernel_in_another_process(tmp_path: Path) -> None:
    """Compiled for two GPUs, without the interpreter that these tests run under; stdout has JSON alone."""
    (tmp_path / "k.py").write_text(KERNELS, encoding="utf-8")
    given = "'--sig', 'x_ptr:*bf16, y_ptr:*bf16, n:i32:16', '--const', 'BLOCK=1024', '--grid', '4', '--arg', 'n=4096'"
    code = f"""
from sublight.cli import main as cli
kernel = ["xray", {str(tmp_path / "k.py")!r} + ":copy", {given}]
after = ["--diff", "--const", "after:BLOCK=2048", "--gpu", "a100", "--json", {str(tmp_path / "diff.json")!r}]
pages = [*kernel, "--gpu", "a100,h200", "--json", "-"]
statuses = [cli.run(words) for words in (pages, [*kernel, *after], kernel[:2], [*kernel[:2], "--no-exec"])]
import sys
print(statuses, file=sys.stderr)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    data, end = json.JSONDecoder().raw_decode(done.stdout)
    assert [(each["name"], each["gpu"]) for each in data["kernels"]] == [("copy", "a100"), ("copy", "h200")]
    for each in data["kernels"]:
        assert each["spill_bytes"] == 0 and each["threads"] == 128 and 8 <= each["registers"] <= 40
        assert {access["sectors_per_request"] for access in each["accesses"]} == {16.0}  # 16 bytes a lane, side by side
    assert done.stdout[end:].lstrip().startswith("copy  a100\n")  # the diff's table
    assert json.loads((tmp_path / "diff.json").read_text())["kernels"][0]["given"] == {"BLOCK": ["1024", "2048"]}
    lines = done.stderr.splitlines()
    assert lines.count("imported") == 1 and lines[-1] == "[0, 0, 2, 2]"
    assert any("needs a type for x_ptr, y_ptr, n and a value for BLOCK" in line for line in lines)
    assert any("--no-exec reads only .ptx, .cubin files" in line for line in lines)
