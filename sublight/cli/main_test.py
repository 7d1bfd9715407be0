"""The command as its user meets it: answers, one-line errors, exit statuses, and what it may import when."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from sublight.cli import main as cli
from sublight.errors import BadInput
from sublight.limits import run as limits_run
from sublight.report import fakes
from sublight.results import write_json

HEAVY = ("torch", "triton", "numpy", "pandas", "mcp", "fastapi", "starlette")
HELP_S = 0.3
ROOT = Path(__file__).parents[2]  # processes start here, so that a bare checkout needs no install
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run the command with these words: its status, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(words)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def results_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    write_json(fakes.run().to_json(), path)
    return path


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


# ------------------------------------------------------------------------------------------------ cold start


@pytest.mark.parametrize(
    "code",
    [
        "import sublight; dir(sublight); sublight.__version__",
        "import sublight; sublight.gpus.find('h200')",
        "from sublight.cli import main as cli; cli.run(['--help'])",
        "from sublight.cli import main as cli; cli.run(['bench', '--help'])",
        "from sublight.cli import main as cli; cli.run(['gpus', '--explain', 'h200'])",
        "from sublight.cli import options as o; assert o.learn_words('sol') == ['solution']",
        "from sublight.cli.options import op_names as n; assert {'rms_norm_fp8', 'rms_norm_int8'} <= {*n('rms_norm_')}",
    ],
)
def test_what_needs_no_torch_does_not_import_it(code: str) -> None:
    done = python(f"{code}\nimport sys; print('loaded:', *(m for m in {HEAVY} if m in sys.modules))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("words", [["-m", "sublight", "--help"], ["-c", "import sublight"]])
def test_cold_start(words: list[str]) -> None:
    """In CPU seconds: neighbours on this machine take turns with us, and not our instructions."""

    def spent_s() -> float:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return spent.ru_utime + spent.ru_stime

    def seconds() -> float:
        begin = spent_s()
        subprocess.run([sys.executable, *words], capture_output=True, check=True, cwd=ROOT)
        return spent_s() - begin

    assert min(seconds() for _ in range(5)) < HELP_S


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """`sublight learn start copy` makes such a file."""
    (tmp_path / "copy.py").write_text("def copy(x, out): ...")
    words = [sys.executable, "-m", "sublight", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_without_torch_a_line_names_the_fix(tmp_path: Path) -> None:
    """A torch.py that raises as a missing torch does, found before the real one."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    code = "from sublight.cli import main as cli; import sys; sys.exit(cli.run(['bench', 'softmax']))"
    done = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}")
    assert done.returncode == 2
    assert done.stderr == "sublight: this needs torch, which is not installed: pip install 'sublight[torch]'\n"


# ------------------------------------------------------------------------------------------------ answers


def test_version(say: Say) -> None:
    assert say("--version") == (0, f"sublight {cli.__version__}\n", "")


def test_no_words_is_help(say: Say) -> None:
    status, out, err = say()
    assert (status, err) == (0, "")
    for verb in ("gpus", "limits", "bench", "top", "doctor"):
        assert f"\n  {verb} " in out


def test_gpus_lists_them_all(say: Say) -> None:
    from sublight import gpus

    status, out, _ = say("gpus")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[2:] if line][: len(gpus.all_gpus())] == [
        gpu.key for gpu in gpus.all_gpus()
    ]


def test_gpus_by_name_give_sources(say: Say) -> None:
    status, out, _ = say("gpus", "NVIDIA H200")
    assert status == 0
    assert "4.80 TB/s" in out
    assert "NVIDIA H200 Tensor Core GPU datasheet" in out


def test_gpus_explain_shows_the_arithmetic(say: Say) -> None:
    status, out, _ = say("gpus", "--explain", "h200")
    assert status == 0
    assert "132 SMs × 4096 FLOP/clock/SM × 1.830 GHz = 989.4 TFLOP/s" in out


def test_explain_this_gpu_where_there_is_none(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    from sublight import gpus

    monkeypatch.setattr(gpus, "detect", lambda: None)
    status, out, err = say("gpus", "--explain", "this")
    assert (status, out) == (2, "")
    assert err.startswith("sublight: no GPU")


def test_json_alone_goes_to_stdout(say: Say) -> None:
    status, out, err = say("gpus", "h200", "--json", "-")
    assert (status, err) == (0, "")
    assert json.loads(out)[0]["key"] == "h200"


def test_json_to_a_file_beside_the_table(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "gpus.json"
    status, out, _ = say("gpus", "--json", str(path))
    assert status == 0
    assert "h200" in out
    assert len(json.loads(path.read_text())) > 15


@pytest.mark.parametrize("verb", ["gpus", "limits", "bench", "top", "doctor"])
def test_every_verb_has_json(verb: str, say: Say) -> None:
    assert "--json" in say(verb, "--help")[1]


@pytest.mark.parametrize("verb", [verb.__name__ for verbs in cli.VERBS.values() for verb in verbs])
def test_a_verbs_help_names_words_without_python_types(verb: str, say: Say) -> None:
    status, out, _ = say(verb, "--help")
    assert status == 0 and out.startswith(f"Usage: sublight {verb} [OPTIONS]")
    assert "[[" not in out and "<str>" not in out and "list[" not in out


# ------------------------------------------------------------------------------------------------ bench


def test_bench_from_a_file_measures_nothing(say: Say, results_file: Path) -> None:
    status, out, _ = say("bench", "--from", str(results_file))
    assert status == 0
    assert "softmax fwd 4096x4096 bf16" in out
    assert "17.4 µs" in out
    assert "FLOP/B" in out  # the roofline's axis


@pytest.mark.parametrize("interrupted", [0, 1])
def test_bench_passes_on_what_was_asked(interrupted: int, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def run(ops: Any, **given: Any) -> Any:
        given.pop("progress")("softmax", 0, len(fakes.run().rows) + interrupted)
        asked.update(given, ops=[op.name for op in ops])
        return fakes.run()

    bench = SimpleNamespace(run=run, limits_for=lambda machine, progress=None: fakes.limits())
    monkeypatch.setitem(sys.modules, "sublight.bench", bench)
    monkeypatch.setattr("sublight.bench", bench, raising=False)
    words = ["softmax", "--shape", "rows=8,cols=16", "--dtype", "fp32,bf16", "--against", "liger", "--direction", "fwd"]
    status, out, _ = say("bench", *words, "--device", "cpu", "--quick")
    assert status == (130 if interrupted else 0)
    assert asked.pop("machine").kind == "cpu"
    assert asked == {
        "ops": ["softmax"],
        "limits": fakes.limits(),
        "shapes": ["rows=8,cols=16"],
        "dtypes": ["fp32", "bf16"],  # each op reads them: some have words of their own
        "against": ["liger"],
        "directions": ["fwd"],
        "quick": True,
    }
    assert "17.4 µs" in out


def test_a_row_above_the_limit_is_an_error_in_words(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(fakes.run(fakes.row("torch", 10e-6)).to_json(), path)
    out = say("bench", "--from", str(path))[1]
    assert "168 %" in out
    assert "ERROR: above limit" in out
    assert "the cost or the measured limit is wrong" in out


@pytest.mark.parametrize(("factor", "status", "word"), [(1.0, 0, "0 slower"), (1.3, 1, "slower"), (0.7, 0, "faster")])
def test_compare_exits_1_where_something_got_slower(
    factor: float, status: int, word: str, say: Say, results_file: Path, tmp_path: Path
) -> None:
    import dataclasses

    run = fakes.run()
    rows = tuple(dataclasses.replace(row, median_s=row.median_s and factor * row.median_s) for row in run.rows)
    new = tmp_path / "new.json"
    write_json(dataclasses.replace(run, rows=rows).to_json(), new)
    got, out, _ = say("bench", "--from", str(new), "--compare", str(results_file))
    assert got == status
    assert word in out.splitlines()[-2]


def test_compare_is_in_the_json(say: Say, results_file: Path) -> None:
    data = json.loads(say("bench", "--from", str(results_file), "--compare", str(results_file), "--json", "-")[1])
    assert {change["verdict"] for change in data["changes"]} == {"same"}
    assert len(data["rows"]) == len(fakes.run().rows)


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<svg"), ("html", b"<!doctype html>"), ("png", b"\x89PNG")])
def test_plots(suffix: str, start: bytes, say: Say, results_file: Path, tmp_path: Path) -> None:
    path = tmp_path / f"roofline.{suffix}"
    assert say("bench", "--from", str(results_file), "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(start)


# ------------------------------------------------------------------------------------------------ bad input

BAD = [
    (["gpus", "h2000"], "unknown GPU 'h2000': nearest are h200"),
    (["gpus", "--explain", "a1000"], "unknown GPU 'a1000'"),
    (["gpu"], "No such command 'gpu'"),
    (["gpus", "--exlain", "h200"], "No such option"),
    (["memory"], "Missing argument 'FILE'; see `sublight memory --help`"),
    (["limits", "--device", "cdua"], "unknown device 'cdua': use cuda or cpu"),
    (["limits", "--only", "host_cpy", "--device", "cpu"], "unknown limit 'host_cpy'"),
    (["limits", "--html", "/"], "cannot write /: it is a folder"),
    (["memory", "examples/unfused_norm.py"], "is a script, and memory reads what one recorded: begin it with"),
    (["memory", "/"], "/ is a folder: name one file, a memory snapshot (.pickle) or a trace"),
    (["limits", "--json", "/proc/nowhere/x.json"], "cannot write /proc/nowhere/x.json"),
    (["bench", "--json", f"{__file__}/x.json"], "cannot write"),
    (["bench", "sofmax"], "unknown op 'sofmax': did you mean softmax"),
    (["bench", "softmax", "--shape", "4096xx"], "shape '4096xx' does not fit softmax"),
    (["bench", "softmax", "--dtype", "bf61"], "unknown data type 'bf61'"),
    (["bench", "softmax", "--direction", "forward"], "unknown direction 'forward'"),
    (["bench", "--plot", "x.jpg"], "cannot plot to 'x.jpg': the name must end in .html, .svg, .png"),
    (["bench", "--from", "nowhere.json"], "cannot read nowhere.json"),
    (["bench", "--compare", __file__], "is not a results file"),
    (["doctor", "now"], "unexpected extra argument"),
    *(
        ([*words, os.devnull], f"{os.devnull} is a device, not a file: name a file")  # as /dev/zero, which has no end
        for words in (["bench", "--from"], ["top", "--replay"], ["learn", "import"], ["train"])
    ),
    (["explain", f"{'x' * 300}.json"], "File name too long; name another file"),
    (["memory", "x.pickle", "--html", "x.pickle"], "is named twice"),
    (["memory", f"{'x' * 300}.pickle"], "File name too long; name another file"),
    (["limits", "--html", f"{'x' * 300}.html"], "File name too long; name another file"),
    *(  # it would become a file of that name
        ([*words, option, "-"], f"{option} - is not printed: name a file")
        for words, option in (
            *((["explain", "x.py"], option) for option in ("--html", "--perfetto", "--trace")),
            *(([verb], "--html") for verb in ("limits", "demo", "learn", "train")),
            (["memory", "x.pickle"], "--html"),
            (["xray", "x.py"], "--html"),
            (["predict", "gpt2"], "--html"),
            (["predict", "gpt2"], "--csv"),
            (["top"], "--record"),
        )
    ),
]


@pytest.mark.parametrize(
    ("words", "message"), BAD, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_status_2(words: list[str], message: str, say: Say) -> None:
    status, out, err = say(*words)
    assert (status, out) == (2, "")
    assert err.startswith("sublight: ")
    assert err.count("\n") == 1
    assert message in err


def test_from_refuses_what_asks_for_a_measurement(say: Say, results_file: Path) -> None:
    status, _, err = say("bench", "--from", str(results_file), "--dtype", "fp32", "--quick")
    assert status == 2
    assert "leave out --dtype, --quick" in err
    assert say("bench", "add", "--from", str(results_file))[2].startswith("sublight: unknown op in that file 'add'")


def test_interrupted(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for signal in (KeyboardInterrupt, typer.Abort):  # older click makes the second of the first, newer typer a status

        def interrupt(signal: type[BaseException] = signal) -> Any:
            raise signal

        monkeypatch.setattr("sublight.doctor.examine", interrupt)
        assert say("doctor") == (130, "", "sublight: interrupted\n")


def test_a_full_gpu_is_a_line(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch names it."""

    def fill(**_: Any) -> Any:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(limits_run, "run", fill)
    status, _, err = say("limits")
    assert status == 2
    assert err.startswith("sublight: the GPU's memory is full")


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(limits_run, "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(["limits"])


def written_to(stdout: int, words: list[str]) -> tuple[int, str]:
    """The command's status and its stderr; stdout is buffered, as a user's is."""
    done = subprocess.run(
        [sys.executable, "-m", "sublight", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [["gpus"], ["gpus", "--json", "-"]])
def test_a_closed_pipe_is_silent(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert written_to(writer, words) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["gpus"], ["gpus", "--json", "-"], ["--version"], ["--help"]])
def test_a_full_disk_under_stdout_is_a_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        status, err = written_to(full.fileno(), words)
    assert (status, err) == (2, "sublight: cannot write what was found: No space left on device\n")


def test_complaints_are_one_line() -> None:
    import contextlib
    import io

    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert cli._complain("two\nlines") == 2
    assert err.getvalue() == "sublight: two lines\n"
    assert issubclass(BadInput, ValueError)
