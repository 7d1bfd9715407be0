"""All tests that need a GPU, in several processes at once; those that time the GPU alone, at the end.

    python -m benchmarks.gpu_tests                     every test of the ops, and those with the `gpu` mark
    python -m benchmarks.gpu_tests sublight/ops/norm   of these files only
    python -m benchmarks.gpu_tests --limit 360 --json tests.json

Of tests with many cases some are drawn, others at each commit (sublight/conftest.py): SUBLIGHT_CASES=all runs every
case. Needs pytest and nothing beside it. Prints one table, then the failures.

Each process may take its share of the GPU's memory. A few have a large share: they run the tests with the `gpu_large`
mark, then help with the others. Tests for which the share did not suffice run again, first a few at once, then one by
one. A process that dies or loses its GPU to a kernel's error costs the test that it ran: another one takes what is
left. After the time limit all are ended, and what did not run counts as a failure of the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_tests_worker import BROKEN, JOB, Job
from sublight.errors import BadInput

ROOT = Path(__file__).parent.parent
OPS = "sublight/ops"
LIMIT_S = 600.0
SHARE_BYTES = 6 * 2**30  # of a GPU's memory, for each process at least: tests that take more have the `gpu_large` mark
LARGE, LARGE_OF = 4, 7  # one process in LARGE_OF runs the `gpu_large` tests, and gets LARGE shares
FEW = 3  # processes for tests that do not fit into a large share, either
OURS = 0.9  # this part of the memory is shared out: contexts and libraries take the rest
POLL_S, PROGRESS_S = 0.1, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    id: str
    outcome: str  # passed, failed, skipped; memory: its process's share did not suffice
    seconds: float = 0.0
    memory_bytes: int = 0  # of the GPU, at its peak
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What the processes have written so far."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    collected: tuple[str, ...] | None = None  # None: no process has collected its tests yet
    took: tuple[str, ...] = ()

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Tests that were taken and have no outcome yet, in order: the first is the one that runs."""
        return tuple(test for test in self.took if test not in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    outcomes: tuple[Outcome, ...]
    not_run: tuple[str, ...]
    elapsed_s: float
    processes: int

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for each in self.outcomes)

    @property
    def ok(self) -> bool:
        return not self.not_run and self.count("passed") + self.count("skipped") == len(self.outcomes) > 0


def read(paths: Iterable[Path]) -> Lines:
    outcomes: dict[str, Outcome] = {}
    collected: tuple[str, ...] | None = None
    took: list[str] = []
    for path in paths:
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # its process is just writing this file
            line = json.loads(text)
            if "id" in line:
                outcomes[line["id"]] = Outcome(**line)
            took += line.get("took", ())
            collected = tuple(line["collected"]) if "collected" in line else collected
    return Lines(outcomes=outcomes, collected=collected, took=tuple(took))


def start(job: Job, paths: Sequence[str], threads: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, JOB: json.dumps(asdict(job)), "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests_worker", "-p", "no:cacheprovider"]
    with (Path(job.folder) / f"{job.turn}-{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *paths], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the whole group: a test may have started processes
    process.wait()


def shares(processes: int) -> list[float]:
    """Each process's share of the memory; the large shares come first."""
    if processes == 1:
        return [1.0]
    large = max(1, processes // LARGE_OF)
    share = OURS / (processes - large + large * LARGE)
    return [LARGE * share] * large + [share] * (processes - large)


def jobs_of(turn: str, processes: int, **rest: Any) -> list[Job]:
    if turn == "together":
        each = shares(processes)
        return [
            Job(name=str(i), turn=turn, share=share, large=share == each[0], **rest) for i, share in enumerate(each)
        ]
    share = OURS / processes if processes > 1 else 1.0
    return [Job(name=str(i), turn=turn, share=share, **rest) for i in range(processes)]


def run_turn(jobs: Sequence[Job], paths: Sequence[str], end_s: float) -> Lines:
    """Processes that share the tests of a turn, until none are left or time is up."""
    folder, turn, threads = Path(jobs[0].folder), jobs[0].turn, max(1, (os.cpu_count() or 1) // len(jobs))
    names = map(str, itertools.count(len(jobs)))
    of_process = {job.name: job for job in jobs}
    running = {job.name: start(job, paths, threads) for job in jobs}
    died: dict[str, Outcome] = {}
    begin_s = shown_s = time.monotonic()

    def lines(name: str = "*") -> Lines:
        return read(sorted(folder.glob(f"{turn}-{name}.jsonl")))

    try:
        while running and time.monotonic() < end_s:
            time.sleep(POLL_S)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                process, its = running.pop(name), lines(name)
                lost = its.unfinished
                if its.collected is None:
                    text = (folder / f"{turn}-{name}.log").read_text(errors="replace")[-1500:]
                    died[f"process {name}"] = Outcome(id=f"process {name}", outcome="failed", text=text)
                elif its.took and process.returncode not in (0, 1):
                    if lost and process.returncode != BROKEN:  # not so a process that ended itself between two tests
                        text = f"the process died in this test: {how(process.returncode)}"
                        died[lost[0]] = Outcome(id=lost[0], outcome="failed", text=text)
                        lost = lost[1:]
                    heir = replace(of_process[name], name=next(names), first=lost)
                    of_process[heir.name], running[heir.name] = heir, start(heir, paths, threads)
            if time.monotonic() - shown_s > PROGRESS_S:
                shown_s, so_far = time.monotonic(), lines()
                failed = sum(each.outcome == "failed" for each in so_far.outcomes.values())
                counts = f"{len(so_far.outcomes)} of {len(so_far.collected or ())} tests, {failed} failed"
                print(f"{shown_s - begin_s:4.0f} s {turn}: {counts}", flush=True)
    finally:
        for process in running.values():
            end(process)
    all_lines = lines()
    return replace(all_lines, outcomes=all_lines.outcomes | died)


def how(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def run(paths: Sequence[str], processes: int, limit_s: float, whole: str = OPS) -> Run:
    begin_s = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    tests: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn, at_once in (("together", processes), ("few", min(FEW, processes)), ("alone", 1)):
            again = tuple(each.id for each in outcomes.values() if each.outcome == "memory")
            files = paths if turn == "together" else files_for(turn, paths, again)
            if not files:
                continue
            jobs = jobs_of(turn, at_once, folder=folder, whole=whole, again=again)
            lines = run_turn(jobs, files, begin_s + limit_s)
            outcomes |= lines.outcomes
            tests += lines.collected or ()
    not_run = tuple(dict.fromkeys(test for test in tests if test not in outcomes))
    elapsed_s = time.monotonic() - begin_s
    return Run(outcomes=tuple(outcomes.values()), not_run=not_run, elapsed_s=elapsed_s, processes=processes)


def files_for(turn: str, paths: Sequence[str], again: Sequence[str]) -> Sequence[str]:
    """The files of a later turn's tests: collecting all files once more would take as long as running some."""
    if any("::" in path for path in paths):
        return paths
    files = {test.split("::")[0] for test in again}
    if turn == "alone":
        all_files = [
            file for path in map(Path, paths) for file in (path.rglob("*_test.py") if path.is_dir() else [path])
        ]
        files |= {str(file) for file in all_files if "gpu_alone" in file.read_text(encoding="utf-8")}
    return sorted(files)


def table(result: Run) -> str:
    """The summary: passes by folder, skipped tests with reasons, the slowest tests, and last the failures."""
    folders: dict[str, Counter[str]] = {}
    for each in result.outcomes:
        counts = folders.setdefault("/".join(each.id.split("::")[0].split("/")[:3]), Counter())
        counts[each.outcome] += 1
        counts["seconds"] += each.seconds  # type: ignore[assignment]
    width = max(map(len, folders), default=10)
    lines = [f"{'':{width}}  passed  failed  left out  seconds of a process"]
    for name, counts in sorted(folders.items(), key=lambda item: -item[1]["seconds"]):
        failed = counts["failed"] + counts["memory"]
        lines.append(
            f"{name:{width}}  {counts['passed']:6}  {failed:6}  {counts['skipped']:8}  {counts['seconds']:7.1f}"
        )
    reasons = Counter(each.text.removeprefix("Skipped: ") for each in result.outcomes if each.outcome == "skipped")
    lines += ["", *(f"left out {count:4}: {reason}" for reason, count in reasons.most_common())]
    slowest = sorted(result.outcomes, key=lambda each: -each.seconds)[:8]
    lines += ["", *(f"{each.seconds:6.1f} s {each.id}" for each in slowest)]
    largest = sorted((each for each in result.outcomes if each.memory_bytes), key=lambda each: -each.memory_bytes)[:5]
    lines += ["", *(f"{each.memory_bytes / 2**30:5.1f} GiB {each.id}" for each in largest)] if largest else []
    failures = [each for each in result.outcomes if each.outcome in ("failed", "memory")]
    lines += [f"\nFAILED {each.id}\n{indented(each.text)}" for each in failures]
    lines += [f"NOT RUN {test}" for test in result.not_run[:20]]
    counts = f"{result.count('passed')} passed, {len(failures)} failed, {result.count('skipped')} left out"
    late = f", {len(result.not_run)} not run: time was up" if result.not_run else ""
    return "\n".join([*lines, "", f"{counts}{late} in {result.elapsed_s:.0f} s, {result.processes} processes"])


def indented(text: str, most: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-most:])


def files_with_gpu_tests() -> list[str]:
    files = (path for top in ("sublight", "examples") for path in sorted((ROOT / top).rglob("*_test.py")))
    marked = [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()]
    return [OPS, *(path for path in marked if not path.startswith(OPS))]


def processes_here() -> int:
    """How many processes this machine has cores and GPU memory for."""
    import torch

    if not torch.cuda.is_available():
        raise BadInput(
            "no GPU that torch can use here: `python -m sublight doctor` says why; --processes 2 runs on the CPU"
        )
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return most_processes((os.cpu_count() or 3) - 2, memory_bytes)


def most_processes(cores: int, memory_bytes: int) -> int:
    return max((n for n in range(2, cores + 1) if shares(n)[-1] * memory_bytes >= SHARE_BYTES), default=1)


def parsed(arguments: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="test files or folders; all that need a GPU unless given")
    parser.add_argument("--processes", type=int, help="at once; as many as cores and memory allow unless given")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for all ({LIMIT_S:.0f})")
    parser.add_argument("--json", type=Path, help="write every test's outcome here")
    args = parser.parse_args(arguments)
    if args.processes is not None and args.processes < 1:
        parser.error(f"--processes {args.processes}: at least 1")
    if not args.limit > 0:
        parser.error(f"--limit {args.limit:g}: more than 0 seconds")
    if missing := [path for path in args.paths if not Path(path.split("::")[0]).exists()]:
        parser.error(f"{missing[0]}: no such file or folder")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    args.json = args.json and args.json.absolute()
    args.paths = [os.path.relpath(path, ROOT) for path in args.paths]
    return args


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> int:
    args = parsed(arguments)
    try:
        processes = args.processes or processes_here()
    except BadInput as error:
        print(f"gpu_tests: {error}", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    result = run(args.paths or files_with_gpu_tests(), processes, args.limit)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=1))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
