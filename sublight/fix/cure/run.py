"""Run a script in a process and a folder of its own, with cures or without, and read what that gave.

Each run gets a fresh scratch copy of the working folder, a fence around it and a time limit; whatever ends the run, all
its processes end with it, and the copy goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from sublight import units
from sublight.fix.cure import diff as diffs
from sublight.fix.cure import fence
from sublight.fix.cure.record import Outcome
from sublight.fix.cure.scratch import Scratch, is_below
from sublight.trace.capture.interrupt import Handlers, Shield

LEAST_LIMIT_S, MOST_LIMIT_S = 120.0, 3600.0
TIMES = 2.0  # the first run's time: a cure that compiles takes longer to begin, and the run ends after a few steps
GO_ON_S = 60.0  # after its steps were timed, a script with a diff is watched for so long
DEVICES = ("/dev", "/proc", "/sys/fs/cgroup")  # nobody's results
CACHES = {  # variable: where it is unless set, from home; empty: below another of them
    "XDG_CACHE_HOME": ".cache",
    "TRITON_HOME": "",
    "TRITON_CACHE_DIR": ".triton",
    "CUDA_CACHE_PATH": ".nv",
    "MPLCONFIGDIR": ".config/matplotlib",
    "HF_HOME": "",
    "HF_HUB_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TORCH_HOME": "",
    "TORCH_EXTENSIONS_DIR": "",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "NUMBA_CACHE_DIR": "",
    "SUBLIGHT_CACHE": "",
    "WANDB_CONFIG_DIR": ".config/wandb",
    "WANDB_DATA_DIR": ".local/share/wandb",
}
QUIET = {"GIT_OPTIONAL_LOCKS": "0", "PYTHONDONTWRITEBYTECODE": "1"}  # git reads without renewing its index
OFFLINE = {"WANDB_MODE": "offline"}  # unless the user has set it: a trial is no run that anybody wants to see
SITE = """\
import importlib.machinery, importlib.util, os, sys
spec = importlib.util.spec_from_file_location("sublight_fence", {file!r})
sys.modules["sublight_fence"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.FENCE = module.started()
here = os.path.dirname(os.path.abspath(__file__))
others = [path for path in sys.path if os.path.abspath(path) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec and spec.loader:  # the one that this file stands in front of
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def limit_after(first_run_s: float) -> float:
    """How long a trial may take, unless the user says it."""
    return min(max(TIMES * first_run_s, LEAST_LIMIT_S), MOST_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What is run again: the same interpreter and arguments, in a fresh scratch copy each time."""

    target: str
    args: tuple[str, ...]
    module: bool
    scratch: Scratch
    limit_s: float = LEAST_LIMIT_S

    @property
    def folder(self) -> str:
        return self.scratch.folder

    def run(self, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
        """With these cures, or with this diff made in the copy. What the script prints is not shown a second time."""
        try:
            files = diffs.applied(diff, self.folder)
            diffs.check_with_git(diff, self.folder, files)
            with interrupting(), self.scratch.copied() as copy:
                for name, content in files.items():
                    _write(Path(copy, name), content, copy)
                outcome = self._run(names, copy, goes_on_s=GO_ON_S if diff else 0.0)
        except (OSError, ValueError) as error:  # a folder that changes meanwhile, a disk that is full
            return Outcome(error=f"{type(error).__name__}: {error}")
        edits = tuple(replace(edit, file=self.scratch.out_of(edit.file, copy)) for edit in outcome.edits)
        return replace(outcome, edits=edits, error=outcome.error.replace(copy, self.folder))

    def _run(self, names: Sequence[str], copy: str, *, goes_on_s: float) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="sublight-run-", ignore_cleanup_errors=True) as home:
            own = Path(os.path.realpath(home))
            result, errors, log = own / "result.json", own / "stderr", own / "refused"
            (target,) = self.scratch.arguments([self.target], copy)
            request = {
                "target": target,
                "args": self.scratch.arguments(self.args, copy),
                "module": self.module,
                "names": list(names),
                "result": str(result),
                "folders": [self.folder, copy],
                "goes_on_s": goes_on_s,
            }
            words = [sys.executable, "-P", "-m", "sublight.fix.cure.child", json.dumps(request)]  # -P: ours, not theirs
            environment = self._environment(own, copy)
            status, is_late = self._wait(words, copy, environment, errors)
            refused = tuple(dict.fromkeys(log.read_text("utf-8", "replace").splitlines())) if log.exists() else ()
            if is_late and not result.exists():
                error = f"it was ended after {units.text(self.limit_s, 's')}, the limit of a run (--limit)"
                return Outcome(error=error, refused=refused)
            if result.exists():
                outcome = replace(Outcome.from_json(json.loads(result.read_text("utf-8"))), refused=refused)
                crashed = f"the process ended with status {status}" if status and not is_late else ""
                return replace(outcome, error=outcome.error or crashed)
            lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return Outcome(error=lines[-1] if lines else f"the process ended with status {status}", refused=refused)

    def _wait(self, words: list[str], copy: str, environment: dict[str, str], errors: Path) -> tuple[int, bool]:
        """Its exit status, and whether its time ran out. None of its processes is left, whatever happens here."""
        process = None
        try:
            with errors.open("wb") as stderr, Shield():
                process = subprocess.Popen(
                    words,
                    cwd=copy,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # a group of its own, which can be ended as a whole
                )
            return process.wait(self.limit_s), False
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, True
        finally:
            if process is not None:
                with Shield():
                    _end(process)

    def _environment(self, own: Path, copy: str) -> dict[str, str]:
        caches, elsewhere = self._caches(own)
        environment = {**OFFLINE, **os.environ, **QUIET, **elsewhere, "PWD": copy}
        for folder in (own / "tmp", own / "site", own / "caches"):
            folder.mkdir()
        (own / "site" / "sitecustomize.py").write_text(SITE.format(file=fence.__file__), encoding="utf-8")
        package = str(Path(__file__).parents[3])  # where ours is imported from, whatever the folder
        theirs = [self.scratch.into(path, copy) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        settings = {
            "roots": [copy, str(own), *DEVICES, *self.scratch.allow, *caches],
            "temporary": ["/tmp", "/var/tmp", tempfile.gettempdir()],
            "protected": self.folder,
            "log": str(own / "refused"),
            "began_s": time.time(),
        }
        return environment | {
            "TMPDIR": str(own / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(own / "site"), package, *theirs]),
            fence.VARIABLE: json.dumps(settings),
        }

    def _caches(self, own: Path) -> tuple[list[str], dict[str, str]]:
        """Those that a run may write to; and variables that move the others: what is not there, or is the folder's."""
        shared = os.path.join(tempfile.gettempdir(), f"torchinductor_{_user()}")  # as PyTorch has it: TMPDIR is another
        os.makedirs(shared, exist_ok=True)
        places = {name: os.path.join(os.path.expanduser("~"), default) for name, default in CACHES.items() if default}
        places |= {"TORCHINDUCTOR_CACHE_DIR": shared}
        places |= {name: os.environ[name] for name in CACHES if os.environ.get(name)}
        kept = {
            name: where
            for name, path in places.items()
            if os.path.exists(where := os.path.realpath(path))
            and not is_below(where, self.folder)
            and not is_below(self.folder, where)
        }
        moved = {name: str(own / "caches" / name.lower()) for name in places if name not in kept}
        if "TORCHINDUCTOR_CACHE_DIR" in kept:
            moved["TORCHINDUCTOR_CACHE_DIR"] = kept["TORCHINDUCTOR_CACHE_DIR"]
        return list(kept.values()), moved


def _write(file: Path, content: bytes, copy: str) -> None:
    """Into the copy: a link in it may lead to the user's own file."""
    if not is_below(os.path.realpath(file), copy):
        raise ValueError(f"{file.name} is no part of the scratch copy, so the diff was not tried")
    file.write_bytes(content)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a number without a name
        return str(os.getuid())


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its whole group, of which some may be left when it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run under way: its process group does not get them from the terminal."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    handlers = Handlers()
    handlers.replace(lambda number, first: interrupt)
    try:
        yield
    finally:
        handlers.put_back()
