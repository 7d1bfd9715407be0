"""Ctrl-C and SIGTERM at every moment of `sublight explain script.py`, in real processes: a report or one line.

The moments are exact: the script puts a signal to its own process into the function that is named, or the test sends
one when a line comes out. Nothing sleeps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sublight
from sublight.diagnose import fakes
from sublight.results import write_json

PACKAGE = Path(sublight.__file__).parents[1]
HANGS_S = 150.0  # an endless script that nothing ends
TRAIN = """\
import itertools, os, signal, sys
import torch
import torch.profiler as p
import sublight.trace.capture.phases as phases, sublight.trace.capture.recording as recording

net, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def at(owner, name, skip=0, times=1):
    original, calls = getattr(owner, name), itertools.count()
    def patched(*args, **kwargs):
        if next(calls) == skip:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGNAL)
        return original(*args, **kwargs)
    setattr(owner, name, patched)

MOMENT
for number in itertools.count() if STEPS < 0 else range(STEPS):
    if number == STOP: os.kill(os.getpid(), signal.SIGNAL)
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Run:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def has_report(self) -> bool:
        return "Ops by device time" in self.out and "report: explain-train.html" in self.err


Explain = Callable[..., Run]


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """A shell starts what runs in its background deaf to Ctrl-C, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def command(folder: Path, *words: str, answer: dict[str, int] | None = None) -> Run:
    """Run `sublight explain` in a folder, and send a signal at each line on stderr that has one of these words."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    write_json(fakes.limits("cpu").to_json(), folder / "limits.json")
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "TMPDIR": str(temporary), "COLUMNS": "120"}
    command = [sys.executable, "-m", "sublight", "explain", "--limits", "limits.json", *words]
    waiting, err = dict(answer or {}), []
    with (
        (folder / "out").open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, env=env, cwd=folder, text=True) as process,
    ):
        too_long = threading.Timer(HANGS_S, process.kill)
        too_long.start()
        assert process.stderr is not None
        for line in process.stderr:
            err.append(line)
            for start in [start for start in waiting if start in line]:
                process.send_signal(waiting.pop(start))
        too_long.cancel()
    assert not waiting, f"these lines never came: {waiting}"
    done = Run(process.returncode, (folder / "out").read_text(), "".join(err))
    assert "Traceback" not in done.err and "Exception ignored" not in done.err, done.err
    left = [name for name in os.listdir(temporary) if not name.startswith("torchinductor")]
    assert left == []
    return done


@pytest.fixture(name="explain")
def _explain(tmp_path: Path) -> Explain:
    def run(
        moment: str = "", *, stop: int = -1, steps: int = -1, number: str = "SIGINT", **more: dict[str, int]
    ) -> Run:
        source = TRAIN
        for word, value in {"MOMENT": moment, "STOP": stop, "STEPS": steps, "SIGNAL": number}.items():
            source = source.replace(word, str(value))
        (tmp_path / "train.py").write_text(source)
        return command(tmp_path, "train.py", **more)

    return run


@pytest.mark.parametrize("stop", [0, 4, 12])
def test_an_endless_script_interrupted_at_a_step(explain: Explain, stop: int) -> None:
    done = explain(stop=stop)
    assert done.status == 130 and done.has_report


@pytest.mark.parametrize(
    "moment",
    [
        "at(p.profile, 'start', times=3)",
        "at(p.profile, 'stop')",
        "at(p.profile, 'stop', skip=1)",
        "at(p.profile, 'export_chrome_trace', skip=1)",
        "at(phases, 'attribute')",
        "at(recording, 'write')",
    ],
)
def test_while_the_recorder_works(explain: Explain, moment: str) -> None:
    """The signal waits for the recorder, then ends the script."""
    done = explain(moment)
    assert done.status == 130 and done.has_report


READING = "import sublight.trace.read.chrome as m; at(m, 'load')"
ANALYSING = "import sublight.diagnose.explain as m; at(m, 'explain')"
WRITING = "import sublight.results as m; at(m, 'write_file')"


@pytest.mark.parametrize("moment", [READING, ANALYSING, WRITING])
def test_while_the_report_is_made(explain: Explain, moment: str) -> None:
    done = explain(moment, steps=60)
    assert done.status == 0 and done.has_report and "Ctrl-C again gives it up" in done.err


def test_a_second_one_gives_the_report_up(explain: Explain) -> None:
    done = explain(f"{ANALYSING}\n{WRITING}", steps=60)
    assert done.status == 130 and not done.has_report
    assert done.err.splitlines()[-1] == "sublight: interrupted while the report was made: there is none"


def test_twice_in_a_row(explain: Explain) -> None:
    """The second one comes while the report of the first is made."""
    done = explain(ANALYSING, stop=9)
    assert done.status == 130 and done.has_report


def test_sigterm_is_an_end_like_any_other(explain: Explain) -> None:
    done = explain(stop=9, number="SIGTERM")
    assert done.status == 143 and done.has_report


def test_before_the_script_began(explain: Explain) -> None:
    done = explain(answer={"sublight: running train.py": signal.SIGINT})
    assert done.status == 130 and not done.has_report
    assert done.err.splitlines()[-1] == "sublight: interrupted before the script began: there is no report"


def test_a_script_that_keeps_the_signal_for_itself(explain: Explain) -> None:
    own = "signal.signal(signal.SIGINT, lambda *_: (print('saved', flush=True), sys.exit(5)))"
    done = explain(f"{own}\nat(p.profile, 'stop')")
    assert done.status == 5 and "saved" in done.out and done.has_report


def test_a_signal_in_a_destructor_is_not_lost(explain: Explain) -> None:
    thing = "class Thing:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT); print('gone')\nThing()"
    assert explain(thing).status == 130
