"""Several ranks, each under `sublight explain`, as torchrun starts them: a report each, and a joint one by rank 0.

They meet in a folder beside the reports: a rank leaves its process number there when it begins, and its trace, or why
it has none, when it ends. Rank 0 takes what there is when all have ended, or are dead, or have taken too long.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sublight.trace.capture.folder import is_alive

WAIT_S = 60.0  # for ranks that still run when rank 0 has its own report
GRACE_S = 5.0  # for ranks that left no sign yet: they run on another machine, or died at once
LOOK_S = 0.1
STALE_S = 60.0  # the ranks of one run begin within this time
ENDINGS = (".json.gz", ".pt.trace.json", ".json", ".html", ".gz")
_FILE = re.compile(r"rank\d+\.(json|pid|none)(\.new)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """This process among the ranks of a run."""

    number: int
    world: int
    folder: Path  # the folder in which ranks meet
    since_s: float = field(default_factory=time.time)  # older files are another run's

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def file(self, ending: str, number: int | None = None) -> Path:
        return self.folder / f"rank{self.number if number is None else number}.{ending}"

    def begin(self) -> None:
        """Say that this rank is here."""
        self.folder.mkdir(exist_ok=True)
        for ending in ("json", "none"):  # left by a run that was killed
            self.file(ending).unlink(missing_ok=True)
        self._put("pid", f"{socket.gethostname()} {os.getpid()}".encode())

    def end(self, trace: Path | None, reason: str = "") -> None:
        """Leave the trace for rank 0, or why there is none."""
        with contextlib.suppress(OSError):
            if trace is None:
                self._put("none", reason.encode())
            else:
                shutil.copyfile(trace, new := self.file("json.new"))
                os.replace(new, self.file("json"))

    def wait(self, *, waiting: Callable[[list[int]], None], wait_s: float = WAIT_S) -> dict[int, str]:
        """Wait for the other ranks; returns what became of each without a trace. `waiting` gets those still missing."""
        began_s = time.monotonic()
        others = [number for number in range(self.world) if number != self.number]
        while True:
            left = {number: self._state(number) for number in others}
            elapsed_s = time.monotonic() - began_s
            open_ones = [
                number
                for number, state in left.items()
                if state == "runs" or (state == "unseen" and elapsed_s < GRACE_S)
            ]
            if not open_ones or elapsed_s > wait_s:
                return {number: _words(state, wait_s) for number, state in left.items() if state != "ended"}
            waiting(open_ones)
            time.sleep(LOOK_S)

    def traces(self) -> dict[int, Path]:
        """The other ranks' traces."""
        others = (number for number in range(self.world) if number != self.number)
        return {number: self.file("json", number) for number in others if self._state(number) == "ended"}

    def remove(self) -> None:
        """Remove the files of this meeting by name, then the folder if it is empty."""
        with contextlib.suppress(OSError):
            for file in self.folder.iterdir():
                if _FILE.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            self.folder.rmdir()

    def _put(self, ending: str, text: bytes) -> None:
        new = self.file(f"{ending}.new")
        new.write_bytes(text)
        os.replace(new, self.file(ending))

    def _state(self, number: int) -> str:
        here = self.file("pid", number)
        try:
            if here.stat().st_mtime < self.since_s - STALE_S:
                return "unseen"
            host, process = here.read_text().split()
        except (OSError, ValueError):
            return "unseen"
        if self.file("json", number).exists():
            return "ended"
        with contextlib.suppress(OSError):
            return self.file("none", number).read_text() or "it recorded nothing"
        return "runs" if host != socket.gethostname() or is_alive(int(process)) else "it died"


def _words(state: str, wait_s: float) -> str:
    return {
        "runs": f"it was not done {wait_s:.0f} s after rank 0",
        "unseen": "nothing was heard of it: it ran on another machine, or died at once",
    }.get(state, state)


def this_rank(folder: str, environment: Mapping[str, str] = os.environ) -> Rank | None:
    """This process's rank; None where it is the only process. `folder` is where the reports go."""
    try:
        number, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if world < 2 or not 0 <= number < world:
        return None
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    run = hashlib.sha256(" ".join(environment.get(name, "") for name in names).encode()).hexdigest()[:12]
    base = folder if os.access(folder, os.W_OK) else tempfile.gettempdir()
    return Rank(number=number, world=world, folder=Path(base) / f".sublight-ranks-{run}")


def name_of(file: str, rank: int) -> str:
    """The name of a rank's own file.

    >>> name_of("explain-train.html", 1), name_of("runs/a.json.gz", 0), name_of("-", 3)
    ('explain-train.rank1.html', 'runs/a.rank0.json.gz', '-')
    """
    if file in ("", "-", os.devnull):
        return file
    ending = next((ending for ending in ENDINGS if file.endswith(ending)), "")
    return f"{file[: len(file) - len(ending)]}.rank{rank}{ending}"
