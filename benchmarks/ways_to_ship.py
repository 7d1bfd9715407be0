"""One op six ways into PyTorch: what each costs once a machine (build), once a process (start), and at every call.

    python benchmarks/ways_to_ship.py --json benchmarks/ways_to_ship_h200.json

Every project is written by `sublight new op`, built, held to its own test, then timed, one at a time. On a GPU the
calls are on the GPU. A minute on 16 cores; `--ways` and `--like` take fewer. `--after FILE` waits with the timing until
that file is there: builds may then share the machine with other work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sublight.errors import BadInput, one_of
from sublight.extensions import toolchain
from sublight.extensions.projects import STARTS, WAYS, Project, write
from sublight.extensions.projects.ways import Way, way_of
from sublight.results import write_file

LIMIT_S = 600  # time limit of one command
CHILD = """
import fcntl, importlib, json, sys, time
import torch

name = sys.argv[1]
sys.path.insert(0, ".")
device = "cuda" if torch.cuda.is_available() else "cpu"
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
import cases
inputs = cases.inputs((64, 64), device, 0)
turn = open(sys.argv[2], "a")
fcntl.flock(turn, fcntl.LOCK_EX)  # PyTorch is imported by several processes at once, timed is one
wait()
begin = time.perf_counter()
op = getattr(importlib.import_module(name), name)
op(*inputs)
wait()
start_s = time.perf_counter() - begin


def call_s(call):
    rounds = []
    for _ in range(7):
        wait()
        begin = time.perf_counter()
        for _ in range(300):
            call(*inputs)
        wait()
        rounds.append((time.perf_counter() - begin) / 300)
    return sorted(rounds)[3]


call_s(op)  # clocks, allocator
figures = {"start_s": start_s, "call_s": call_s(op), "torch_call_s": call_s(cases.reference)}
with torch.inference_mode():
    figures["bare_call_s"] = call_s(op)
where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
print(json.dumps(figures | {"device": where, "torch": torch.__version__}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op, one way; times in seconds, None where `problem` says why there is none."""

    way: str
    like: str
    build_s: float | None = None  # once a machine: the build command, or the first start beyond a later one
    start_s: float | None = None  # once a process: import and first call, PyTorch being there
    call_s: float | None = None  # forward, 64 x 64, as a program makes it
    bare_call_s: float | None = None  # the same in inference_mode, past what the gradient's registration adds
    torch_call_s: float | None = None  # PyTorch's own function
    problem: str = ""
    is_left_out: bool = False  # a tool is missing on this machine; otherwise a problem is a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    project: Project
    build_s: float | None  # the build command's time; None where the first start builds
    first_start_s: float
    device: str
    torch: str


def build(way: Way, like: str, folder: Path) -> Built:
    """Write, build, start once, and pass its own test; BadInput says what failed."""
    project = write(f"ship_{like}_{way.name}", way.name, like, folder / f"{like}_{way.name}")
    build_s = None
    if way.build:
        begin = time.perf_counter()
        _run(project, folder, "make", "build", f"PYTHON={sys.executable}")
        build_s = time.perf_counter() - begin
    first = _figures(project, folder, folder / f"{project.name}.turn")
    _run(project, folder, sys.executable, f"test_{project.name}.py")
    return Built(
        project=project,
        build_s=build_s,
        first_start_s=first["start_s"],
        device=first["device"],
        torch=first["torch"],
    )


def timed(built: Built, folder: Path) -> Row:
    """Time the start and the calls of a built project, when it is this project's turn."""
    project = built.project
    figures = _figures(project, folder, folder / "turn")
    once_s = max(0.0, built.first_start_s - figures["start_s"]) if built.build_s is None else built.build_s
    times = {name: figures[name] for name in ("start_s", "call_s", "bare_call_s", "torch_call_s")}
    return Row(way=project.way, like=project.start, build_s=once_s, **times)


def _figures(project: Project, folder: Path, turn: Path) -> dict[str, Any]:
    shown = _run(project, folder, sys.executable, "-c", CHILD, project.name, str(turn))
    figures: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return figures


def _run(project: Project, folder: Path, *command: str) -> str:
    """In the project, with caches of its own, so that a build is one; the last line of what went wrong."""
    caches = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "TRITON_CACHE_DIR": str(folder / "triton")}
    environment = os.environ | caches | {"PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment.pop("TRITON_INTERPRET", None)
    try:
        done = subprocess.run(
            command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{Path(command[0]).name}: {error}") from None
    if done.returncode < 0:
        last = (done.stdout.splitlines() or ["nothing"])[-1]
        place = re.search(r"^Current thread.*\n  (File .*)", done.stderr, re.MULTILINE)  # of Python's faulthandler
        where = f", in {place[1]}" if place else ""
        raise BadInput(f"ended by {signal.Signals(-done.returncode).name} after {last!r}{where}")
    if done.returncode:
        raise BadInput(complaint(done.stdout + "\n" + done.stderr))
    return done.stdout


def complaint(report: str) -> str:
    """The compiler's, pip's or Python's own line, not make's or ninja's that something failed.

    >>> complaint("a.cpp:3: error: no such file\\nninja: build stopped: subcommand failed.\\nmake: *** [build] Error 1")
    'a.cpp:3: error: no such file'
    >>> complaint("CMake Error in CMakeLists.txt:\\n  CUDA_ARCHITECTURES is empty for target\\n\\nmake: *** Error 1")
    'CMake Error in CMakeLists.txt: CUDA_ARCHITECTURES is empty for target'
    """
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    own = [line for line in lines if not re.match(r"(g?make(\[\d+\])?|ninja|FAILED|subprocess\.\w+Error)\b", line)]
    wrong = [at for at, line in enumerate(own) if re.search(r"\berror\b|Error:", line, re.IGNORECASE)]
    if wrong and re.match(r"CMake Error.*:$", own[wrong[0]]):  # CMake writes the message on the next line
        return " ".join(own[wrong[0] : wrong[0] + 2])[:300]
    return ([own[at] for at in wrong[:1]] or own[-1:] or lines[-1:] or ["failed without a word"])[0][:300]


def rows(
    ways: Sequence[str], likes: Sequence[str], folder: Path, jobs: int, after: Path | None = None
) -> tuple[list[Row], str]:
    """Builds and tests several at a time, then (`after` a file is there) every timing alone; and what they ran on."""
    cases = [(way_of(name), like) for like in likes for name in ways]

    def attempt(case: tuple[Way, str]) -> Built | Row:
        way, like = case
        if missing := toolchain.troubles(way.tools):
            return Row(way=way.name, like=like, problem=f"{missing[0].problem}: {missing[0].fix}", is_left_out=True)
        try:
            return build(way, like, folder)
        except BadInput as error:
            return Row(way=way.name, like=like, problem=str(error))

    def figures(result: Built | Row) -> Row:
        if isinstance(result, Row):
            return result
        try:
            return timed(result, folder)
        except BadInput as error:
            return Row(way=result.project.way, like=result.project.start, problem=str(error))

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(attempt, cases))
    while after and not after.exists():
        time.sleep(0.2)
    with ThreadPoolExecutor(max(1, min(jobs, (os.cpu_count() or 1) // 4))) as pool:  # imports beside a timing
        all_rows = list(pool.map(figures, results))
    where = next((f"{each.device}, torch {each.torch}" for each in results if isinstance(each, Built)), "nothing ran")
    return all_rows, where


def table(timings: Sequence[Row]) -> str:
    """In Markdown, as docs/ship.md has it."""
    heads = ("op", "way", "build, s", "start, s", "call, µs", "in inference_mode, µs", "PyTorch's call, µs")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in timings:
        if row.problem:
            cells = [f"{'left out' if row.is_left_out else 'failed'}: {row.problem}", "", "", "", ""]
        else:
            calls = [row.call_s, row.bare_call_s, row.torch_call_s]
            cells = [f"{row.build_s:.1f}", f"{row.start_s:.2f}", *(f"{1e6 * (each or 0.0):.1f}" for each in calls)]
        lines.append(f"| {' | '.join((row.like, row.way, *cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(way.name for way in WAYS))
    parser.add_argument("--like", default=",".join(STARTS))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="builds at a time")
    parser.add_argument("--after", type=Path, help="time nothing before this file is there")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    try:
        ways = [one_of("way", name, [way.name for way in WAYS]) for name in options.ways.split(",")]
        likes = [one_of("op", name, list(STARTS)) for name in options.like.split(",")]
    except BadInput as error:
        print(f"ways_to_ship: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ways-to-ship-") as folder:
        measured, where = rows(ways, likes, Path(folder), max(1, options.jobs), options.after)
    print(f"{where}; builds {max(1, options.jobs)} at a time\n\n{table(measured)}")
    if options.json:
        written = {"machine": where, "jobs": options.jobs, "rows": [dataclasses.asdict(row) for row in measured]}
        write_file(json.dumps(written, indent=1) + "\n", Path(options.json))
    return int(any(row.problem and not row.is_left_out for row in measured))


if __name__ == "__main__":
    sys.exit(main())
