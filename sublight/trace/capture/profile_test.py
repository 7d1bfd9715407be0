"""Real small scripts, run as a user's: what was found, what was recorded, and that the script noticed nothing."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import sublight
from sublight.trace.capture.profile import Captured, run_script

PACKAGE = Path(sublight.__file__).parents[1]
NET = """\
import os, sys, time
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(16, 16)

    def forward(self, x):
        y = self.fc(x)
        return torch.relu(y) + x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

net, x = Net(), torch.randn(4, 16)
"""
TRAIN = """\
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for number in range(STEPS):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", number)
"""
INFER = """\
with torch.no_grad():
    for number in range(STEPS):
        y = net(x).softmax(-1)
print("inferred", number)
"""


@dataclass
class Seen:
    """A capture and its file."""

    captured: Captured
    said: list[str]

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.captured.trace_file.read_bytes())

    @property
    def meta(self) -> dict[str, Any]:
        return self.data["sublight"]

    def spans(self, start: str) -> list[tuple[float, float]]:
        found = [e for e in self.data["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(start)]
        return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)

    def inside(self, name: str) -> list[int]:
        """How often `name` ran in each profiled step."""
        starts = [start for start, _ in self.spans(name)]
        return [sum(a <= start < b for start in starts) for a, b in self.spans("ProfilerStep#")]


Capture = Callable[..., Seen]


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Writes a script into the folder and captures it there."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    others = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)}
    monkeypatch.setattr(  # an optimizer that lives says that the script trains; those of other tests live, too
        "sublight.trace.capture.steps._an_optimizer_lives",
        lambda: any(issubclass(type(t), torch.optim.Optimizer) and id(t) not in others for t in gc.get_objects()),
    )

    def run(source: str, *args: str, steps: int = 100, name: str = "train.py", **options: Any) -> Seen:
        Path(name).write_text(source.replace("STEPS", str(steps)))
        said: list[str] = []
        return Seen(run_script(name, args, say=said.append, **options), said)

    return run


@pytest.fixture(name="run")
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    return runner(tmp_path, monkeypatch)


def test_a_training_loop(run: Capture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublight.trace.capture.phases.MORE_S", 0.0)
    seen = run(NET + TRAIN)
    assert seen.captured.exit_code == 0 and seen.captured.error is None and not seen.captured.interrupted
    assert seen.captured.steps_from == "optimizer steps" and seen.captured.notes == ()
    (line,) = seen.said
    assert re.fullmatch(
        r"captured 3 steps \(optimizer steps\)(, which took [\d.]+ s longer than without)?; "
        r"the script goes on, Ctrl-C ends it with the report",
        line,
    )
    assert capsys.readouterr().out == "trained 99\n"
    assert seen.inside("aten::linear") == [2, 2, 2] and seen.inside("Optimizer.zero_grad") == [1, 1, 1]
    meta = seen.meta
    assert meta["version"] == 1 and meta["command"] == "train.py" and meta["torch"] == torch.__version__
    assert 5 <= meta["unprofiled_steps"] == len(meta["unprofiled_step_s"])
    assert sum(meta["unprofiled_step_s"]) == pytest.approx(meta["unprofiled_total_s"])
    assert meta["peak_memory_bytes"] > 10**7 and meta["cpu"]
    trace = seen.captured.trace
    assert trace is not None and trace.meta["steps_from"] == "optimizer steps"
    assert sum(name.startswith("ProfilerStep#") for name in trace.names) == 3
    assert list(seen.captured.folder.path.iterdir()) == [seen.captured.trace_file]  # the rest is gone
    seen.captured.folder.remove()
    assert not list(Path.cwd().glob("sublight-*"))


def test_each_op_has_its_line_and_its_module(run: Capture) -> None:
    sources = run(NET + TRAIN).meta["sources"]
    rows = list(zip(sources["index"], sources["source"], sources["module"], strict=True))
    forward = [(sources["ops"][op], *place) for op, *place in rows if "autograd" not in sources["ops"][op]]
    assert forward[:8] == [
        ("aten::linear", "train.py:10", "layers.0.fc"),
        ("aten::relu", "train.py:11", "layers.0"),
        ("aten::add", "train.py:11", "layers.0"),
        ("aten::linear", "train.py:10", "layers.1.fc"),
        ("aten::relu", "train.py:11", "layers.1"),
        ("aten::add", "train.py:11", "layers.1"),
        ("aten::square", "train.py:26", ""),
        ("aten::mean", "train.py:26", ""),
    ]
    assert set(forward[9:]) == {("aten::add_", "train.py:27", "")}  # after ones_like, where backward begins
    engine = [place for op, *place in rows if "autograd" in sources["ops"][op]]
    assert len(engine) > 8 and set(map(tuple, engine)) == {("", "")}


def test_an_inference_loop(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    seen = run(NET + INFER)
    assert seen.captured.steps_from == "calls of the outermost module"
    assert seen.inside("aten::linear") == [2, 2, 2] and seen.inside("aten::softmax") == [1, 1, 1]
    assert capsys.readouterr().out == "inferred 99\n"


def test_ops_without_modules_are_one_run(run: Capture) -> None:
    seen = run("import torch\nx = torch.ones(8, 8)\nfor _ in range(7): x = (x @ x).tanh()\n")
    assert seen.captured.steps_from == "the whole run" and seen.said == []
    assert len(seen.spans("aten::tanh")) == 7 and seen.spans("ProfilerStep") == []
    assert seen.meta["unprofiled_steps"] == 0 and seen.captured.trace is not None


@pytest.mark.parametrize(("steps", "profiled", "timed"), [(1, 0, 0), (2, 1, 0), (5, 1, 0), (9, 1, 4), (12, 2, 5)])
def test_a_short_script_gives_what_it_has(run: Capture, steps: int, profiled: int, timed: int) -> None:
    seen = run(NET + TRAIN, steps=steps)
    assert seen.inside("aten::linear") == [2] * profiled and seen.spans("sublight.") == []
    assert seen.meta["unprofiled_steps"] == timed and seen.said == []
    assert any("no step after the warm-up" in note for note in seen.captured.notes) == (1 < steps < 12)


def test_micro_batches_are_parts_of_a_step(run: Capture) -> None:
    accumulate = TRAIN.replace("    optimizer.step", "    if number % 4 == 3: optimizer.step")
    seen = run(NET + accumulate, steps=80)
    assert seen.captured.steps_from == "optimizer steps" and seen.inside("aten::square") == [4, 4, 4]


def test_optimizers_in_turn_are_one_step(run: Capture) -> None:
    two = TRAIN.replace("for number", "other = torch.optim.SGD(net.parameters(), lr=0.1)\nfor number")
    seen = run(NET + two.replace("    optimizer.step()\n", "    optimizer.step()\n    other.step()\n"))
    assert seen.inside("Optimizer.step") == [2, 2, 2] and seen.inside("aten::square") == [1, 1, 1]


def test_explicit_steps_are_the_strongest(run: Capture) -> None:
    marked = TRAIN + "    if number % 2: capture.step()\n"
    marked = marked.replace('print("trained", number)\n', "")
    seen = run("from sublight.trace.capture import profile as capture\n" + NET + marked, steps=80)
    assert seen.captured.steps_from == "sublight.step() calls" and seen.inside("aten::square") == [2, 2, 2]


def test_validation_before_training_is_not_the_step(run: Capture) -> None:
    validate = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\nfor _ in range(20): net(x)\n"
    seen = run(NET + validate + TRAIN)
    assert seen.captured.steps_from == "optimizer steps" and seen.inside("aten::square") == [1, 1, 1]


def test_calls_on_other_threads_are_not_steps(run: Capture) -> None:
    threads = (
        "import threading\nfor _ in range(9):\n    t = threading.Thread(target=net, args=(x,)); t.start(); t.join()\n"
    )
    assert run(NET + threads).captured.steps_from == "the whole run"


def test_timed_steps_are_timed_as_they_are(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    clock = "began_s = time.perf_counter()\n"
    slow = TRAIN.replace("    net(x)", "    time.sleep(0.05); net(x)")
    seen = run(NET + clock + slow + 'print("all", time.perf_counter() - began_s)\n', steps=14)
    meta, all_s = seen.meta, float(capsys.readouterr().out.split()[-1])
    assert meta["unprofiled_steps"] == 5 and min(meta["unprofiled_step_s"]) >= 0.05
    assert 5 * 0.05 <= meta["unprofiled_total_s"] <= all_s - 8 * 0.05  # the others slept, too; one may lie half inside


def test_fast_steps_are_timed_more_often(run: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublight.trace.capture.ticks.SHORT_WINDOW_S", 1e9)  # every step is fast
    assert run(NET + INFER, steps=100).meta["unprofiled_steps"] == 50
    assert run(NET + INFER, steps=100, timed=0).meta["unprofiled_steps"] == 0


def test_as_many_steps_as_asked_for(run: Capture) -> None:
    seen = run(NET + TRAIN, warmup=0, timed=2, profiled=1, stacks=False)
    assert seen.inside("aten::linear") == [2] and seen.meta["sources"]["ops"] == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers(run: Capture, capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Workers forked while the profiler runs must not pay for it, and spawned ones must find the script."""
    source = f"""
import os, sys, torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 80
    def __getitem__(self, number):
        patched = torch.nn.Module.__call__.__code__.co_qualname == "sublight_call"
        return torch.ones(8), torch.tensor([os.getpid(), int(patched)])

if __name__ == "__main__":
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="{method}")
    workers, patched = set(), 0
    for x, facts in loader:
        net(x).sum().backward()
        optimizer.step()
        workers |= set(facts[:, 0].tolist())
        patched += int(facts[:, 1].sum())
    print(len(workers - {{os.getpid()}}), patched)
"""
    seen = run(source)
    assert capsys.readouterr().out == "1 0\n" and seen.captured.exit_code == 0
    assert seen.inside("aten::linear") == [1, 1, 1]


def test_a_script_that_profiles_itself(run: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    profiled = """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
    net(x)
print(len([event for event in own.events() if event.name == "aten::linear"]))
"""
    seen = run(NET + TRAIN + profiled, steps=2)
    assert capsys.readouterr().out == "trained 1\n2\n" and seen.captured.exit_code == 0
    assert any("a profiler of its own" in note for note in seen.captured.notes)
    assert seen.inside("aten::linear") == [2]


COMPILED = """
from torch._dynamo.utils import counters
torch._dynamo.reset(); counters.clear()
class Broken(torch.nn.Module):
    def forward(self, x):
        y = net(x)
        print(end="")
        return y + 1
model = torch.compile(Broken(), backend="eager", dynamic=False)
with torch.no_grad():
    for number in range(40):
        y = model(torch.randn(5 if number == 11 else 4, 16))
print(dict(counters["frames"]), dict(counters["stats"]))
"""


def elsewhere(folder: Path) -> dict[str, str]:
    """The environment of a process of its own: this package rather than an installed one, temporary files there."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "TMPDIR": str(folder)}


def _alone(script: Path) -> tuple[str, str, str]:
    """Output, errors and trace file of a capture in a process of its own."""
    driver = script.with_name("driver.py")
    driver.write_text(
        "import sys\nfrom sublight.trace.capture.profile import run_script\n"
        f"captured = run_script({str(script)!r}, [], say=lambda line: None)\n"
        "print('report', captured.exit_code, captured.trace_file)\n"
    )
    done = subprocess.run(
        [sys.executable, str(driver)], capture_output=True, text=True, check=True, env=elsewhere(script.parent)
    )
    output, _, report = done.stdout.rpartition("report ")
    return output, done.stderr, report.split()[1]


def test_compilation_is_counted_and_not_disturbed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NET + COMPILED)
    output, errors, file = _alone(script)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert output == plain.stdout and "'ok': 4" in output and errors == plain.stderr
    meta = json.loads(Path(file).read_bytes())["sublight"]
    dynamo = meta["dynamo"]
    assert dynamo["compiles_in_window"] == 2 and dynamo["compiles"] == 4  # the odd shape falls into a timed step
    assert dynamo["compile_s_in_window"] > 0 and any("expected 4, actual 5" in r for r in dynamo["recompile_reasons"])
    assert sum(dynamo["graph_breaks"].values()) == 2 and "print" in next(iter(dynamo["graph_breaks"]))
    assert meta["steps_from"] == "calls of the outermost module"


def test_open_ranges_are_closed_when_a_profile_ends() -> None:
    from sublight.trace.capture.guard import OpenRanges

    ranges = OpenRanges()
    ranges.begin()
    ended: list[str] = []

    class Range(torch.profiler.record_function):
        def __exit__(self, *error: Any) -> None:
            ended.append(self.name)
            super().__exit__(*error)

    outer = Range("outer").__enter__()
    for _ in range(200):  # let go of once they are closed
        with Range("passing"):
            pass
    inner = Range("inner").__enter__()
    del ended[:]
    ranges.end()
    assert ended == ["inner", "outer"] and ranges._open == []
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)


def test_a_range_across_profiles_ends_with_the_first(run: Capture) -> None:
    """It began while steps were sought and ends while one is profiled: PyTorch would write into freed memory."""
    epoch = "epoch = torch.profiler.record_function('epoch')\nepoch.__enter__()\n"
    late = TRAIN.replace("    net(x)", "    if number == 11: epoch.__exit__(None, None, None)\n    net(x)")
    seen = run(NET + epoch + late, steps=5)  # ends in the warm-up: the first profile is the one that is kept
    spans = seen.spans("epoch")
    step = seen.spans("ProfilerStep#")
    assert len(spans) == 1 and spans[0][1] >= step[-1][1]
    assert run(NET + epoch + late).inside("aten::square") == [1, 1, 1]


def test_nothing_of_ours_stays(run: Capture) -> None:
    from torch.autograd import profiler

    def ours() -> tuple[Any, ...]:
        enter = profiler.record_function.__enter__
        return torch.nn.Module.__call__, profiler._enable_profiler, enter, sys.modules["__main__"]

    before = ours()
    for steps in (3, 11, 100):
        run(NET + TRAIN, steps=steps)
        assert ours() == before
    assert sys.gettrace() is None and not torch.autograd._profiler_enabled()


def test_a_run_without_steps_is_bounded(run: Capture) -> None:
    endless = (
        "import time, torch\nend = time.time() + 2\nwhile time.time() < end: torch.ones(4) + 1; time.sleep(.001)\n"
    )
    began = time.monotonic()
    seen = run(endless, time_limit_s=0.3)
    assert any(note.startswith("only the first") for note in seen.captured.notes), time.monotonic() - began
    adds = seen.spans("aten::add")
    assert len(adds) > 10 and (adds[-1][1] - adds[0][0]) < 1.5e6  # µs


def test_a_forked_child_has_no_report(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text("import os, sys, torch\nif os.fork() == 0:\n    sys.exit(7)\nprint('child', os.wait()[1] >> 8)\n")
    output, errors, _ = _alone(script)  # in a process of its own: the child comes out of the script's end
    assert output == "child 7\n" and errors == ""
