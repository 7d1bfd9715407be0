"""What `explain --fix` predicts, and what its cures really save: every example that a cure treats, and five scripts
that nothing was fitted to (and one that something was fitted to after its first result).

    python benchmarks/fixes.py --out DIR --seconds 200     of each script the main cure; call it again for the others
    python benchmarks/fixes.py --out DIR --cures all       every cure, all together and the diff, some 25 minutes
    python benchmarks/fixes.py --out DIR unfused_norm      these
    python benchmarks/fixes.py --out DIR --table           what DIR holds

Each script runs from a folder of its own. Several are under way at a time: they load, compile and warm up beside each
other, and while the steps of one are timed or profiled all the others stand still (`alone.py`). DIR/NAME.json is a
script's report, DIR/fixes.json the rows (the form of benchmarks/explain_fix_h200.json), both written after each script.
At the end of its time the call ends what runs, and keeps what was measured by then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import alone  # noqa: E402

WITHIN = 0.25
LIMIT_S = 240.0  # time limit of one trial, with its waits for the device
JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))  # scripts that run at the same time
LEAST_S = 15.0  # with less time left no further script is begun
GRACE_S = 20.0  # to write its report in, for a script whose time has run out
NOT_IN_TIME = "not done in the call's time"
LIMITS = "limits.json"
PROBES, PROBE_CYCLES, QUIET_WITHIN_S = 12, 4_000_000, 5.0  # of some 2 ms each
ALONE_FROM = 3  # steps before the timed window: clocks and caches are the script's own by then
WAIT_FOR_A_TURN = """\
import sys
if "sublight.fix.cure.child" in sys.orig_argv:  # not the script's own workers
    from benchmarks import fixes
    fixes.time_steps_alone()
"""
SEEN = {"fp32_attention"}  # softmax under autocast is costed as that script's first result showed

Kind = Literal["example", "new", "seen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script; to a "new" one no figure of ours was ever fitted."""

    path: Path
    kind: Kind

    @property
    def name(self) -> str:
        return self.path.stem


def cases() -> dict[str, Case]:
    """The examples whose finding a cure treats, then the new scripts."""
    from sublight.fix.cure import CURES

    treated = {finding for cure in CURES for finding in cure.treats}
    listed = tomllib.loads((ROOT / "examples" / "expected.toml").read_text(encoding="utf-8"))
    scripts = [
        Case(path=ROOT / "examples" / file, kind="example") for file, row in listed.items() if row["finding"] in treated
    ]
    scripts += [
        Case(path=path, kind="seen" if path.stem in SEEN else "new")
        for path in sorted((ROOT / "benchmarks" / "fix_scripts").glob("*.py"))
    ]
    return {case.name: case for case in scripts}


def run(case: Case, out: Path, cures: str, deadline_s: float) -> str:
    """Let `explain --fix` try the script until its time is up; returns why there is no report, or nothing."""
    report = out / f"{case.name}.json"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="sublight-fixes-") as scratch:
        folder, site = Path(scratch, "work"), Path(scratch, "site")
        folder.mkdir()
        site.mkdir()
        (site / "sitecustomize.py").write_text(WAIT_FOR_A_TURN, encoding="utf-8")
        shutil.copy(case.path, folder)
        path = os.pathsep.join(filter(None, (str(ROOT), str(site), os.environ.get("PYTHONPATH"))))
        words = [sys.executable, __file__, "--out", str(out.resolve()), "--cures", cures, "--try", str(case.path.name)]
        with (out / f"{case.name}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env={"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            ended = _wait(process, deadline_s)
    if report.exists():
        return ""
    if ended:
        return ended
    last = (out / f"{case.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return f"exit status {process.returncode}: {''.join(last)}"


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Wait for the process. When its time is up it is first told to write what it has, and then killed."""
    for signal_number, more_s in ((signal.SIGINT, 0.0), (signal.SIGKILL, GRACE_S)):
        try:
            process.wait(max(0.1, deadline_s + more_s - time.monotonic()))
            return NOT_IN_TIME if more_s else ""
        except subprocess.TimeoutExpired:
            process.send_signal(signal_number)
    process.wait()
    return NOT_IN_TIME


def try_one(script: str, out: Path, cures: Literal["all", "main"]) -> None:
    """In a process of its own, in the script's folder: what `explain --fix --yes` does, its report as JSON."""
    from sublight.diagnose.cures import fix
    from sublight.diagnose.explain import explain
    from sublight.fix.cure import scratch
    from sublight.fix.cure.run import Rerun
    from sublight.report.explain.fix import to_json
    from sublight.results import write_json
    from sublight.trace.capture import profile

    profile_steps_alone()
    captured = profile.run_script(script, (), profiled=4, say=_say)
    alone.end()  # a script that ended early has not ended its turn
    trace = captured.trace
    if trace is None:
        raise SystemExit(f"no trace: {captured.reason}")

    def of_steps(meta: dict[str, Any]) -> Any:
        return explain([replace(trace, meta={**trace.meta, **meta})], limits_file=str(out / LIMITS), source=script)

    explanation = of_steps({})
    again = Rerun(
        target=script,
        args=(),
        module=False,
        scratch=scratch.plan(os.getcwd(), script, module=False),
        limit_s=LIMIT_S,
    )
    fixed = fix(
        explanation,
        again,
        say=_say,
        rebased=lambda step_s: of_steps({"unprofiled_total_s": step_s, "unprofiled_steps": 1}),
        tries=cures,
    )
    write_json(to_json(explanation.to_json(), fixed), out / f"{Path(script).stem}.json")


def profile_steps_alone() -> None:
    """`explain`'s own run: alone from when the steps are known until the last was recorded, which ends the script."""
    from sublight.trace.capture.phases import Recorder

    settled, end_capture = Recorder.settled, Recorder._end_capture

    def begin(self: Recorder, kind: Any) -> None:
        settled(self, kind)
        alone.begin()
        wait_for_a_quiet_device()

    def end(self: Recorder) -> None:
        end_capture(self)
        alone.end()
        raise SystemExit(0)

    Recorder.settled, Recorder._end_capture = begin, end  # type: ignore[method-assign]


def time_steps_alone() -> None:
    """A trial: alone for the last steps of its warm-up and those that are timed."""
    from sublight.fix.cure.timer import StepTimer

    boundary, finish = StepTimer.boundary, StepTimer._end

    def begin(self: StepTimer) -> None:
        if self._phase == "warmup" and self._left == ALONE_FROM:
            alone.begin()
            wait_for_a_quiet_device()
        boundary(self)

    def end(self: StepTimer, end_s: float) -> None:
        alone.end()
        finish(self, end_s)

    StepTimer.boundary, StepTimer._end = begin, end  # type: ignore[method-assign]


def wait_for_a_quiet_device() -> None:
    """Processes that stand still may have launched work for a second. As long as the GPU takes turns between theirs and
    ours, a kernel of a fixed number of cycles takes longer, and never twice the same.
    """
    import torch

    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    until_s, times_ms = time.monotonic() + QUIET_WITHIN_S, list[float]()
    while time.monotonic() < until_s:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.cuda._sleep(PROBE_CYCLES)
        after.record()
        after.synchronize()
        times_ms = [*times_ms, before.elapsed_time(after)][-PROBES:]
        if len(times_ms) == PROBES and max(times_ms) < 1.03 * min(times_ms):
            return
    _say(f"the device was not quiet after {QUIET_WITHIN_S:.0f} s: {min(times_ms):.2f} to {max(times_ms):.2f} ms")


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def rows_of(name: str, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows: one for each cure that was tried alone, and one for the diff."""
    fix = report["fix"]
    tried = [("", each) for each in fix["tried"] if len(each["names"]) == 1]
    tried += [("diff", fix["checked"])] if fix["checked"] else []
    return [
        {
            "example": name,
            "what": what,
            "step_s": report["step_s"],
            "again_s": fix["before_s"],
            "cures": each["names"],
            "findings": each["findings"],
            "predicted_s": each["predicted_s"],
            "real_s": each["real_s"],
            "spread_s": each["spread_s"],
            "losses_differ": each["difference"],
            "verdict": each["verdict"],
            "words": each["words"],
        }
        for what, each in tried
    ]


def best_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row for each script: the cure with the largest prediction, of equal ones the one that saved more."""
    best: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["real_s"] is None or row.get("what"):
            continue
        other = best.get(row["example"])
        if other is None or (row["predicted_s"], row["real_s"]) > (other["predicted_s"], other["real_s"]):
            best[row["example"]] = row
    return list(best.values())


def is_within(row: Mapping[str, Any]) -> bool:
    return bool(row["real_s"] > 0 and abs(row["predicted_s"] / row["real_s"] - 1) <= WITHIN)


def table(rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str], known: Mapping[str, Case]) -> str:
    """The table of predicted and real savings, and how many predictions are within the bound."""
    lines = [f"{'script':18} {'cure':18} {'step':>9} {'predicted':>9} {'real':>9} {'p/r':>6}  {'diff':10} verdict"]
    best = {row["example"]: row for row in best_rows(rows)}
    diffs = {row["example"]: row for row in rows if row.get("what") == "diff"}
    for name in known:
        mine = [row for row in rows if row["example"] == name]
        if row := best.get(name):
            ratio = f"{row['predicted_s'] / row['real_s']:.2f}" if row["real_s"] > 0 else "–"
            shown = f"{_ms(diffs[name]['real_s'])}" if name in diffs else "–"
            times = f"{_ms(row['again_s']):>9} {_ms(row['predicted_s']):>9} {_ms(row['real_s']):>9} {ratio:>6}"
            lines.append(f"{name:18} {row['cures'][0]:18} {times}  {shown:10} {row['verdict']}")
        elif name in failed:
            lines.append(f"{name:18} {failed[name]}")
        elif mine:
            why = "; ".join(f"{row['cures'][0]}: {row['verdict']}: {row['words']}" for row in mine)
            lines.append(f"{name:18} no cure ran: {why}")
    kinds: tuple[tuple[str, Kind], ...] = (("examples", "example"), ("new scripts", "new"))
    for words, kind in kinds:
        ran = [row for name, row in best.items() if name in known and known[name].kind == kind]
        right = sum(is_within(row) for row in ran)
        total = sum(case.kind == kind for case in known.values())
        lines.append(f"{words}: {right} of {len(ran)} that ran within {WITHIN:.0%}; {total} in all")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


class Store:
    """DIR/fixes.json, written after each script."""

    def __init__(self, folder: Path) -> None:
        self._file, self._folder = folder / "fixes.json", folder
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else '{"rows": [], "failed": {}}'
        self.data: dict[str, Any] = json.loads(text)

    @property
    def done(self) -> set[str]:
        """The scripts that are done and need not be run again."""
        failed = {name for name, why in self.data["failed"].items() if why != NOT_IN_TIME}
        return {row["example"] for row in self.data["rows"]} | failed

    def keep(self, name: str, reason: str) -> str:
        """Store a script's result; returns a line for the terminal."""
        self.data["rows"] = [row for row in self.data["rows"] if row["example"] != name]
        self.data["failed"].pop(name, None)
        if not reason:
            report = json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))
            rows = rows_of(name, report)
            is_cut = any("interrupted" in note for note in report["fix"]["notes"])
            if is_cut and all(row["real_s"] is None for row in rows):
                reason = NOT_IN_TIME
            else:
                self.data["rows"] += rows
                reason = "" if rows else "; ".join(report["fix"]["notes"]) or "none of its findings has a cure"
            self.data |= {"device": report["device"], "date": datetime.now(UTC).date().isoformat(), "commit": _commit()}
        if reason:
            self.data["failed"][name] = reason
        half = self._file.with_suffix(".half")
        half.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        half.replace(self._file)
        return reason or "done"


def in_order(known: Mapping[str, Case]) -> list[str]:
    """Those first that the last table has no row of, then those of which its row no longer says what is predicted."""
    last = json.loads((ROOT / "benchmarks" / "explain_fix_h200.json").read_text(encoding="utf-8"))
    rows = {row["example"] for row in last["rows"]}
    return sorted(known, key=lambda name: (name in rows, known[name].kind != "seen"))


def take_limits(out: Path, file: Path | None) -> None:
    """Once a machine and folder: all predictions come from the same limits. Those of a file, or measured now."""
    if file is not None:
        shutil.copy(file, out / LIMITS)
    words = [sys.executable, "-m", "sublight", "limits", "--quick", "--json", str((out / LIMITS).resolve())]
    if not (out / LIMITS).exists():
        subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts; all that DIR has no rows of, unless named")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=1800.0, help="end by this time (1800)")
    parser.add_argument("--limits", type=Path, metavar="FILE", help="of this GPU; measured, unless DIR has them")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"scripts under way at a time ({JOBS})")
    parser.add_argument("--cures", choices=("main", "all"), default="main", help="of each script (main)")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--try", dest="script", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.script:
        return try_one(args.script, args.out, args.cures)
    deadline_s, began_s = time.monotonic() + args.seconds - GRACE_S, time.monotonic()
    known = cases()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such script: {', '.join(unknown)}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    store = Store(args.out)
    wanted = [] if args.table else args.names or [name for name in in_order(known) if name not in store.done]
    if wanted:
        take_limits(args.out, args.limits)

    def begin(name: str) -> str:
        if time.monotonic() + LEAST_S > deadline_s:
            return NOT_IN_TIME
        return run(known[name], args.out, args.cures, deadline_s)

    with alone.Referee() as referee, ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(begin, name): name for name in wanted}
        for each in as_completed(running):
            word = store.keep(running[each], each.result())
            print(f"{running[each]}: {word} after {time.monotonic() - began_s:.0f} s", flush=True)
    if referee.turns_s:
        print(f"{len(referee.turns_s)} times a script was alone, {sum(referee.turns_s):.0f} s in all")
    print(table(store.data["rows"], store.data["failed"], known))


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
