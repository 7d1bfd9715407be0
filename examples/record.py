"""Time each example plain and with --fixed, unprofiled, then keep a trace of both: the data of the proof.

    python examples/record.py --out DIR [names...]

DIR is what `examples/recorded/<machine>` is, but for the limits: `sublight limits --json DIR/limits.json`.
DIR/times.json is written after each example, so that a run cut short keeps what it did; a run into the same DIR renews
the examples that it names and keeps the others. An example that fails leaves its error there, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parent
TIME_OUT_S = 180
TRACE_BYTES = 1_500_000  # a trace that is to be kept in the repository should not be larger
WHICH_DEVICE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
_STEP = re.compile(r"^step: ([\d.]+) ms$", re.MULTILINE)
_RESULT = re.compile(r"^(?:loss|checksum): (\S+)$", re.MULTILINE)

Version = Literal["plain", "fixed"]
FLAGS: dict[Version, tuple[str, ...]] = {"plain": (), "fixed": ("--fixed",)}


class Failed(Exception):
    """An example, or the explanation of one, that did not end well; says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    name: str
    finding: str
    devices: tuple[str, ...]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def versions(self) -> tuple[Version, ...]:
        return ("plain",) if self.finding == "healthy" else ("plain", "fixed")


def examples() -> dict[str, Example]:
    """All examples by name, as expected.toml lists them."""
    listed = tomllib.loads((FOLDER / "expected.toml").read_text(encoding="utf-8"))
    by_name = {}
    for file, row in listed.items():
        name = file.removesuffix(".py")
        by_name[name] = Example(name=name, finding=row["finding"], devices=tuple(row["devices"]))
    return by_name


def run(command: list[str], folder: Path) -> str:
    """What the command printed; Failed where it does not end, or ends badly."""
    path = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in command)
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=TIME_OUT_S
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{shown}: not done after {TIME_OUT_S} s") from None
    if done.returncode:
        raise Failed(f"{shown}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def parse(output: str) -> tuple[float, float]:
    """The time of a step in seconds, and the result that plain and fixed must share.

    >>> parse("loss: 0.25\\nstep: 12.50 ms\\n")
    (0.0125, 0.25)
    """
    step, result = _STEP.search(output), _RESULT.search(output)
    if step is None or result is None:
        raise Failed(f"no `step:` line or no result in what it printed:\n{output[-2000:]}")
    return float(step[1]) / 1e3, float(result[1])


def time_example(example: Example, device: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Median step times, unprofiled. Versions take turns, so that a machine that drifts does so for both."""
    times: dict[Version, list[float]] = {version: [] for version in example.versions}
    row: dict[str, Any] = {}
    for _ in range(repeats):
        for version in example.versions:
            printed = run([sys.executable, str(example.path), "--device", device, *FLAGS[version]], folder)
            step_s, row[f"{version}_result"] = parse(printed)
            times[version].append(step_s)
    return row | {f"{version}_s": statistics.median(samples) for version, samples in times.items()}


def trace_example(example: Example, version: Version, device: str, out: Path, folder: Path) -> Path:
    """Let `sublight explain` run it; keeps the trace, and what it said."""
    stem = example.name if version == "plain" else f"{example.name}.fixed"
    trace = out / f"{stem}.json.gz"
    explain = [sys.executable, "-m", "sublight", "explain", str(example.path), "--trace", str(trace)]
    output = run([*explain, "--", "--device", device, *FLAGS[version]], folder)
    (out / f"{stem}.txt").write_text(output, encoding="utf-8")
    if not trace.exists():
        raise Failed(f"explain wrote no trace {trace.name}")
    return trace


def write(times: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(times, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


def record(example: Example, *, device: str, device_name: str, repeats: int, out: Path) -> dict[str, Any]:
    """One row of times.json; errors are part of it."""
    row: dict[str, Any] = {"finding": example.finding, "device": device_name}
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:  # where explain leaves its page
        try:
            row |= time_example(example, device, repeats, Path(scratch))
        except Failed as failed:
            errors.append(str(failed))
        for version in example.versions:
            try:
                trace = trace_example(example, version, device, out, Path(scratch))
            except Failed as failed:
                errors.append(str(failed))
                continue
            row[f"{version}_trace_bytes"] = trace.stat().st_size
    return row | ({"errors": errors} if errors else {})


def show(name: str, row: dict[str, Any]) -> str:
    def ms(key: str) -> str:
        return f"{1e3 * row[key]:9.2f}" if key in row else f"{'-':>9}"

    saved = f"{1 - row['fixed_s'] / row['plain_s']:7.0%}" if "fixed_s" in row and "plain_s" in row else f"{'-':>7}"
    sizes = [row[key] for key in ("plain_trace_bytes", "fixed_trace_bytes") if key in row]
    size = f"{max(sizes) / 1e6:6.2f}" + ("!" if max(sizes) > TRACE_BYTES else " ") if sizes else f"{'-':>6} "
    line = f"{name:20}{ms('plain_s')}{ms('fixed_s')}{saved}{size}  {row['finding']}"
    return "\n".join([line, *(f"    {error.strip().splitlines()[-1]}" for error in row.get("errors", ()))])


def main() -> int:
    known = examples()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="examples, as in launch_bound; all of them by default")
    parser.add_argument("--out", type=Path, required=True, help="the folder for traces and times.json")
    parser.add_argument("--repeats", type=int, default=2, help="unprofiled runs of each version")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    times_path = out / "times.json"
    times = json.loads(times_path.read_text(encoding="utf-8")) if times_path.exists() else {}
    device_name = run([sys.executable, "-c", WHICH_DEVICE], out).strip()
    device = "cpu" if device_name == "cpu" else "cuda"
    chosen = [known[name] for name in args.names or known]
    print(f"{device_name}\n{'example':20}{'plain ms':>9}{'fixed ms':>9}{'saved':>7}{'MB':>6}   finding", flush=True)
    done = {}
    for example in chosen:
        if device not in example.devices:
            continue
        done[example.name] = times[example.name] = record(
            example, device=device, device_name=device_name, repeats=args.repeats, out=out
        )
        write(times, times_path)
        print(show(example.name, done[example.name]), flush=True)
    return int(any("errors" in row for row in done.values()))


if __name__ == "__main__":
    sys.exit(main())
