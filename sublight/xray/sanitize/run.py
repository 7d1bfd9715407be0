"""Races and bounds without a GPU: run a script that launches Triton kernels, and watch every load and store.

What is looked for, each at its source line:

- `out-of-bounds`: an address outside the tensor its pointer came from, whatever else lies there. A view holds the
  elements it reaches: the gaps of `x[:, :10]` are outside.
- `uninitialised-read`: a kernel reads what `torch.empty` made and nobody wrote.
- `unwritten-output`: a kernel stores to what `torch.empty` made, but not everywhere, and torch reads the rest, or the
  script ends. (A buffer of which only the written part is read is no fault, nor are programs that return early where
  nobody reads what they left out.)
- `race`: two programs of one launch meet on an address, one of them writes, and no atomic orders them. It is named at
  both lines. Where both write the same value it is information: harmless, and seldom meant. One store that names an
  address twice with different values, or with what it was and something more, is a race as well.
- `missing-barrier`: a program of several warps reads what other lanes of it wrote, or writes what they read, or tells
  other programs by an atomic that it has stored what they store, with no barrier between.
- `lock-kept`: a program waits for a lock (tl.atomic_cas) that one before it took and never gave back.
- `undefined-lanes`: a masked load without `other`, whose lanes without a value enter a reduction that is stored.
- `padded-lanes`: a masked load with `other`, whose filled lanes change a sum or win a maximum that is stored.
- `autotuned-in-place`: a second launch changes the result once more, and autotune makes many (see tuned.py).
- `offset-overflow`: 32-bit arithmetic wraps on its way to an address that is used, at the sizes that ran or at those of
  `at`.
- `does-not-compile`: the compiler refuses what the interpreter took (for sm_80 and sm_90; for one alone: information).
- `bf16-accumulation`, `bf16-truncation`: bf16 loses what should have been kept. bf16 is computed as a GPU does.
- `nondeterministic-atomics`: information.
- `not-interpreted`, `not-compiled`: information: what this could not look at, and why.
- `script-failed`: the script's own exception or exit status, such as an assertion that a CPU pass should have met.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sublight.errors import BadInput
from sublight.xray.record import Finding, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run of a script has shown."""

    script: Path
    findings: tuple[Finding, ...]
    kernels: tuple[str, ...]  # that were launched
    launches: int
    failure: str  # the script's own exception; empty where it ended well

    @property
    def is_clean(self) -> bool:
        """Nothing to mend in what was looked at."""
        return all(finding.is_information for finding in self.findings)

    @property
    def is_whole(self) -> bool:
        """Whether the script was looked at to its end."""
        return not self.failure and all(finding.id != "not-interpreted" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"findings": [finding.to_json() for finding in self.findings]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What to run, and the sizes to pretend."""

    file: Path
    args: Sequence[str] = ()
    at: Mapping[str, int] | None = None


def parse_sizes(text: str) -> dict[str, int]:
    """`--at` as it is written.

    >>> parse_sizes("n=3_000_000_000, rows=2**20")
    {'n': 3000000000, 'rows': 1048576}
    """
    sizes = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        base, _, power = value.partition("**")
        try:
            sizes[name] = int(base) ** int(power or 1)
        except ValueError:
            raise BadInput(f"--at {part}: write NAME=NUMBER, such as n=3_000_000_000") from None
        if not name or sizes[name] < 1:
            raise BadInput(f"--at {part}: write NAME=NUMBER, such as n=3_000_000_000")
    return sizes


def run(script: Path, args: Sequence[str] = (), *, at: Mapping[str, int] | None = None) -> Report:
    """Run a script under watch, in a process of its own. What it prints goes to stderr: stdout is for the answer."""
    [report] = run_all([Script(file=script, args=args, at=at)])
    if report.launches == 0 and report.failure:
        place = report.findings[0].place
        line = f", line {place.line}" if place and place.line else ""
        raise BadInput(f"{script}{line}: it ended before it launched a kernel: {report.failure}")
    if report.launches == 0:
        raise BadInput(
            f"{script} launches no Triton kernel: call kernel[grid](...) in it, in no benchmark and under no `if` that "
            "a CPU fails"
        )
    return report


def run_all(scripts: Sequence[Script]) -> list[Report]:
    """Several scripts one after another in one process, which saves loading torch for each."""
    for script in scripts:
        if not script.file.is_file():
            raise BadInput(f"{script.file} is not a file: name a Python script that launches Triton kernels")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = {
            "scripts": [
                {"file": str(script.file.resolve()), "args": list(script.args), "at": dict(script.at or {})}
                for script in scripts
            ],
            "answers": str(folder / "answers.json"),
            "jobs": str(folder / "jobs.pickle"),
        }
        (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
        with Compiler() as compiler:  # loads Triton while the scripts run
            status = _ended(_python("sublight.xray.sanitize.process", str(folder / "order.json"), interpret=True))
            if not (folder / "answers.json").is_file():
                names = ", ".join(str(script.file) for script in scripts)
                raise BadInput(f"{names}: {_death(status)} before it could answer; take out what ended it")
            answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
            refused = _refusals(folder, folder / "jobs.pickle", compiler)
    return [_report(script, answer, refusal) for script, answer, refusal in zip(scripts, answers, refused, strict=True)]


def _report(script: Script, answer: dict[str, Any], refused: list[Finding]) -> Report:
    if answer["unused"] and answer["launches"]:
        known = ", ".join(answer["arguments"])
        raise BadInput(f"--at {answer['unused'][0]}: no kernel of {script.file} has that number; they have {known}")
    findings = [
        Finding(
            id=each["id"],
            kernel=each["kernel"],
            place=None if each["file"] is None else Place(file=each["file"], line=each["line"]),
            detail=each["detail"],
            is_information=each["is_information"],
        )
        for each in answer["findings"]
    ]
    return Report(
        script=script.file,
        findings=(*findings, *refused),
        kernels=tuple(answer["kernels"]),
        launches=answer["launches"],
        failure=answer["failure"],
    )


class Compiler:
    """The process that compiles what the scripts launched; it has loaded Triton when the first job comes."""

    def __enter__(self) -> Compiler:
        self._process = _python("sublight.xray.sanitize.compile", interpret=False, stdin=subprocess.PIPE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # it has answered, or nobody wants to know
        self._process.communicate()

    def answer(self, jobs_file: Path, answers_file: Path) -> None:
        self._process.communicate(json.dumps([str(jobs_file), str(answers_file)]).encode())


def _refusals(folder: Path, jobs_file: Path, compiler: Compiler) -> list[list[Finding]]:
    """What the compiler refuses, script by script; every specialisation is asked about in one process."""
    scripts = pickle.loads(jobs_file.read_bytes())
    jobs = [job for script in scripts for job in script]
    if not jobs:
        return [[] for _ in scripts]
    (folder / "flat.pickle").write_bytes(pickle.dumps(jobs))
    compiler.answer(folder / "flat.pickle", folder / "refused.json")
    answered = folder / "refused.json"
    refusals = json.loads(answered.read_text(encoding="utf-8")) if answered.is_file() else [None] * len(jobs)
    answers = iter(zip(jobs, refusals, strict=True))
    findings = []
    for script in scripts:
        kept: dict[tuple[str, int], Finding] = {}
        for _ in script:
            job, refusal = next(answers)
            if refusal is None:
                continue
            if "unknown" in refusal:
                kept[job.kernel, 0] = Finding(
                    id="not-compiled",
                    kernel=job.kernel,
                    place=None,
                    detail=f"whether the compiler takes {job.kernel} was not found out: {refusal['unknown']}",
                    is_information=True,
                )
                continue
            where = "" if refusal["is_everywhere"] else f" (for sm_{refusal['targets'][0]} alone)"
            kept[refusal["file"], refusal["line"]] = Finding(
                id="does-not-compile",
                kernel=job.kernel,
                place=Place(file=refusal["file"], line=refusal["line"]),
                detail=f"the compiler refuses this{where}: {refusal['message']}",
                is_information=not refusal["is_everywhere"],
            )
        findings.append(list(kept.values()))
    return findings


def _death(status: int) -> str:
    """
    >>> _death(3), _death(-11)
    ('the process that ran it left with status 3', 'the process that ran it was killed (SIGSEGV)')
    """
    if status >= 0:
        return f"the process that ran it left with status {status}"
    return f"the process that ran it was killed ({signal.Signals(-status).name})"


def _python(module: str, *words: str, interpret: bool, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """Another Python, with or without the interpreter: Triton must know before it loads."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    sys.stderr.flush()
    python = [sys.executable, "-P", "-m", module]  # what lies in the working folder is not ours to import
    return subprocess.Popen([*python, *words], env=environment, stdin=stdin, stdout=_stderr())


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; returns its exit status. Ctrl-C here ends it, too."""
    try:
        return process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise


def _stderr() -> int:
    """The file that the script's prints go to."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced, as in a notebook or under pytest
        return 2
