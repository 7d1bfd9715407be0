"""What `explain --fix` predicts, and what its cures really save: every example that a cure treats, and five scripts
that nothing was fitted to.

    python benchmarks/fixes.py --out DIR                   all of them, some 25 minutes on an H200
    python benchmarks/fixes.py --out DIR --seconds 540     as many as begin in that time; call it again for the others
    python benchmarks/fixes.py --out DIR unfused_norm      these
    python benchmarks/fixes.py --out DIR --table           what DIR holds

Each script runs from a folder of its own. DIR/NAME.json is its report, DIR/fixes.json the rows (the form of
benchmarks/explain_fix_h200.json), both written after each script, so that a call that is cut short keeps what it did.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WITHIN = 0.25
LIMIT_S = 240  # of one trial
TIME_OUT_S = 900  # of one script with all its trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script, and whether predictions were ever fitted to it."""

    path: Path
    is_new: bool

    @property
    def name(self) -> str:
        return self.path.stem


def cases() -> dict[str, Case]:
    """The examples whose finding a cure treats, then the new scripts."""
    sys.path.insert(0, str(ROOT))
    from sublight.fix.cure import CURES

    treated = {finding for cure in CURES for finding in cure.treats}
    listed = tomllib.loads((ROOT / "examples" / "expected.toml").read_text(encoding="utf-8"))
    found = [
        Case(path=ROOT / "examples" / file, is_new=False) for file, row in listed.items() if row["finding"] in treated
    ]
    found += [Case(path=path, is_new=True) for path in sorted((ROOT / "benchmarks" / "fix_scripts").glob("*.py"))]
    return {case.name: case for case in found}


def run(case: Case, out: Path) -> str:
    """Let `explain --fix` try the script; why there is no report, where there is none."""
    report = out / f"{case.name}.json"
    report.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(case.path, scratch)
        words = [sys.executable, "-m", "sublight", "explain", "--fix", "--yes", "--limit", f"{LIMIT_S}s"]
        words += ["--json", str(report), "--html", str(Path(scratch) / "page.html"), case.path.name]
        with (out / f"{case.name}.log").open("w", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    words,
                    cwd=scratch,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=TIME_OUT_S,
                )
            except subprocess.TimeoutExpired:
                return f"not done after {TIME_OUT_S} s"
    if report.exists():
        return ""
    last = (out / f"{case.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return f"exit status {done.returncode}: {''.join(last)}"


def rows_of(name: str, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each cure that was tried alone, and one for the diff."""
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
    """Of each script, the cure that ran with the largest prediction; of two with the same, the one that saved more."""
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
    """Predicted beside real, and how many are within the bound."""
    lines = [f"{'script':18} {'cure':18} {'step':>9} {'predicted':>9} {'real':>9} {'p/r':>6}  {'diff':10} verdict"]
    best = {row["example"]: row for row in best_rows(rows)}
    diffs = {row["example"]: row for row in rows if row.get("what") == "diff"}
    for name in known:
        mine = [row for row in rows if row["example"] == name]
        if row := best.get(name):
            ratio = f"{row['predicted_s'] / row['real_s']:.2f}" if row["real_s"] > 0 else "–"
            shown = f"{_ms(diffs[name]['real_s'])}" if name in diffs else "none"
            times = f"{_ms(row['again_s']):>9} {_ms(row['predicted_s']):>9} {_ms(row['real_s']):>9} {ratio:>6}"
            lines.append(f"{name:18} {row['cures'][0]:18} {times}  {shown:10} {row['verdict']}")
        elif name in failed:
            lines.append(f"{name:18} {failed[name]}")
        elif mine:
            why = "; ".join(f"{row['cures'][0]}: {row['verdict']}: {row['words']}" for row in mine)
            lines.append(f"{name:18} no cure ran: {why}")
    for words, is_new in (("examples", False), ("new scripts", True)):
        ran = [row for name, row in best.items() if name in known and known[name].is_new == is_new]
        right = sum(is_within(row) for row in ran)
        total = sum(case.is_new == is_new for case in known.values())
        lines.append(f"{words}: {right} of {len(ran)} that ran within {WITHIN:.0%}; {total} in all")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts; all that DIR has no report of, unless named")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no script after this time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    known = cases()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such script: {', '.join(unknown)}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    file, began_s = args.out / "fixes.json", time.monotonic()
    data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "failed": {}}
    done = {row["example"] for row in data["rows"]} | set(data["failed"])
    wanted = [] if args.table else args.names or [name for name in known if name not in done]
    for name in wanted:
        if time.monotonic() - began_s > args.seconds:
            print(f"not begun: {', '.join(wanted[wanted.index(name) :])}")
            break
        reason = run(known[name], args.out)
        data["rows"] = [row for row in data["rows"] if row["example"] != name]
        data["failed"].pop(name, None)
        if reason:
            data["failed"][name] = reason
        else:
            report = json.loads((args.out / f"{name}.json").read_text(encoding="utf-8"))
            fix = report.get("fix") or {"tried": [], "checked": None, "notes": ["no cure was tried"]}
            data["rows"] += rows_of(name, {**report, "fix": fix})
            if not fix["tried"]:
                data["failed"][name] = "; ".join(fix["notes"]) or "none of its findings has a cure"
            data |= {"device": report["device"], "date": datetime.now(UTC).date().isoformat(), "commit": _commit()}
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {reason or 'done'} after {time.monotonic() - began_s:.0f} s", flush=True)
    print(table(data["rows"], data["failed"], known))


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
