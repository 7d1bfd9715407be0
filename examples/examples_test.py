"""Every example runs, plain and fixed give the same result, and expected.toml and the README know all of them."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent
NOT_EXAMPLES = {"record.py", "examples_test.py", "proof_test.py", "lottery_ticket.py", "lottery_ticket_test.py"}
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.name not in NOT_EXAMPLES)
TOLERANCE = 2e-3  # bfloat16 autocast and TF32 round; everything else is nearer
# these run where there is no GPU, though only a GPU shows what they are about
ALSO_ON_CPU = {"fp32_model", "host_sync", "no_tensor_cores", "small_grid", "unfused_optimizer"}
NEED_A_GPU = {"allocator_thrash", "exposed_copy", "healthy_graph", "launch_bound", "pageable_copy"}


def load_record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_record", FOLDER / "record.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


record = load_record()
EXPECTED = record.examples()
ON_CPU = sorted({name for name, example in EXPECTED.items() if "cpu" in example.devices} | ALSO_ON_CPU)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Scripts set what is global to torch."""
    precision, limit = torch.get_float32_matmul_precision(), torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.config.recompile_limit = limit


def run(name: str, *args: str) -> None:
    argv, sys.argv = sys.argv, [f"{name}.py", *args]
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = argv


def result(capsys: pytest.CaptureFixture[str], name: str, *args: str) -> float:
    run(name, "--steps", "3", *args)
    step_s, value = record.parse(capsys.readouterr().out)
    assert step_s > 0
    return value


def check_versions(capsys: pytest.CaptureFixture[str], name: str, device: str) -> None:
    plain = result(capsys, name, "--device", device)
    assert plain == plain and abs(plain) > 1e-4, "a result that says nothing"
    if "fixed" in EXPECTED[name].versions:
        fixed = result(capsys, name, "--device", device, "--fixed")
        assert fixed == pytest.approx(plain, rel=TOLERANCE if device == "cpu" else 0.02)


def test_every_script_is_listed() -> None:
    assert sorted(EXPECTED) == SCRIPTS
    assert {name for name in SCRIPTS if "cpu" not in EXPECTED[name].devices} == (
        ALSO_ON_CPU | NEED_A_GPU | {"graph_break"}
    )


def test_the_readme_has_a_row_for_each() -> None:
    rows = re.findall(
        r"^\| `(\w+)\.py` \| `([\w-]+)` \|.*\| (yes|no) \|", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    listed = {(name, e.finding, "yes" if "cpu" in e.devices else "no") for name, e in EXPECTED.items()}
    assert set(rows) == listed and len(rows) == len(listed)


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_plain_pytorch_and_says_what_it_shows(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= {*sys.stdlib_module_names, "numpy", "torch"}
    assert f"`sublight explain`: {EXPECTED[name].finding}." in (ast.get_docstring(tree) or "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(name, "--help")
    printed = capsys.readouterr().out
    assert left.value.code == 0
    assert ("--fixed" in printed) == (EXPECTED[name].finding != "healthy")
    assert "--steps" in printed and "--device" in printed


@pytest.mark.parametrize("name", ON_CPU)
def test_fixed_gives_the_same_result_on_the_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_versions(capsys, name, "cpu")


@pytest.mark.gpu
@pytest.mark.gpu_seconds(3)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SCRIPTS)
def test_fixed_gives_the_same_result_on_the_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_versions(capsys, name, "cuda")


@pytest.mark.parametrize("name", sorted(NEED_A_GPU))
def test_says_in_a_line_that_it_needs_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(name, "--device", "cpu")
    assert left.value.code == 2
    assert re.fullmatch(rf"{name}\.py: needs a GPU: .+\n", capsys.readouterr().err)


def test_graphs_break_and_fixed_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_fast, counters = torch.compile, torch._dynamo.utils.counters
    monkeypatch.setattr(torch, "compile", lambda model: compile_fast(model, backend="eager"))
    counters.clear()
    plain = result(capsys, "graph_break", "--device", "cpu")
    assert counters["graph_break"]
    counters.clear()
    torch._dynamo.reset()
    assert result(capsys, "graph_break", "--device", "cpu", "--fixed") == pytest.approx(plain, rel=1e-5)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def test_each_length_compiles_anew_and_fixed_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    counters = torch._dynamo.utils.counters
    graphs = []
    for flags in ((), ("--fixed",)):
        counters.clear()
        torch._dynamo.reset()
        result(capsys, "recompilation", "--device", "cpu", *flags)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [3, 1]


@pytest.fixture
def two_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two scripts, the first of which fails; explaining is left out."""
    (tmp_path / "broken.py").write_text("raise SystemExit('it broke')")
    (tmp_path / "works.py").write_text(
        "import sys\nprint('loss: 0.5')\nprint(f\"step: {2.0 if '--fixed' in sys.argv else 8.0:.2f} ms\")\n"
    )
    both = "".join(f'["{name}.py"]\nfinding = "host-sync"\ndevices = ["cuda", "cpu"]\n' for name in ("broken", "works"))
    (tmp_path / "expected.toml").write_text(both)

    def trace_example(example, version, device, out, folder):
        trace = out / f"{example.name}.{version}"
        trace.write_bytes(bytes(2_000_000))
        return trace

    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "trace_example", trace_example)
    monkeypatch.setattr(record, "WHICH_DEVICE", "print('cpu')")
    return tmp_path


def test_record_keeps_going_and_keeps_what_it_has(
    two_examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = two_examples / "out"
    out.mkdir()
    (out / "times.json").write_text('{"older": {"plain_s": 1.0}}')
    monkeypatch.setattr(sys, "argv", ["record.py", "--out", str(out), "--repeats", "1"])
    assert record.main() == 1
    times = json.loads((out / "times.json").read_text())
    assert times["older"] == {"plain_s": 1.0}
    assert "it broke" in times["broken"]["errors"][0] and "plain_s" not in times["broken"]
    works = times["works"]
    assert (works["plain_s"], works["fixed_s"], works["device"]) == (0.008, 0.002, "cpu")
    assert "errors" not in works and works["plain_result"] == works["fixed_result"] == 0.5
    printed = capsys.readouterr().out
    assert re.search(r"^works +8\.00 +2\.00 +75% +2\.00!", printed, re.MULTILINE) and "it broke" in printed


def test_record_names_the_examples_there_are(
    two_examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["record.py", "--out", str(two_examples / "out"), "wrks"])
    with pytest.raises(SystemExit) as left:
        record.main()
    assert left.value.code == 2 and "no such example: wrks" in capsys.readouterr().err
    assert not (two_examples / "out").exists()
