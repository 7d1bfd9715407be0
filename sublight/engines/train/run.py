"""A run is a folder: what it is (run.json), its tokens, its checkpoints, its log. All of it resumes from there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sublight import __version__
from sublight.engines.train import checkpoint
from sublight.engines.train.settings import Settings
from sublight.engines.train.shape import Shape
from sublight.errors import BadInput
from sublight.results import write_json

RUNS = Path("runs")
NAME = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a folder says of its run."""

    folder: Path
    shape: Shape
    settings: Settings
    weights: str = ""  # a Hugging Face folder that it starts from

    def write(self) -> None:
        data = {"version": __version__, "shape": asdict(self.shape), "settings": self.settings.to_json()}
        write_json({**data, "weights": self.weights}, self.folder / NAME)

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    @property
    def best(self) -> Path:
        """The file with the best weights, without the optimizer's state."""
        return self.checkpoints / "best.pt"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def opened(folder: Path) -> Run:
    path = folder / NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        shape, settings = Shape(**data["shape"]), Settings.from_json(data["settings"])
    except OSError:
        raise BadInput(f"{folder} holds no run: `sublight train --out {folder}` starts one") from None
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: start again with another --out") from None
    return Run(folder=folder, shape=shape, settings=settings, weights=data.get("weights", ""))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else trains there meanwhile: two would write over each other's log and checkpoints. The system lets go of
    the lock when this process ends, whatever ends it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another process trains in {folder}: wait for it, or end it, and --resume then") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def new_folder(words: str) -> Path:
    """A folder without a run: the one that was named, or the next number in runs/."""
    if words:
        folder = Path(words)
        if (folder / NAME).exists():
            raise BadInput(f"{folder} holds a run: `sublight train --resume --out {folder}` goes on, or name another")
        return folder
    taken = [int(each.name) for each in RUNS.glob("*") if each.name.isdecimal()]
    return RUNS / f"{max(taken, default=0) + 1:03d}"


def newest_folder(words: str) -> Path:
    """The run that was named, or the one whose checkpoint is the newest."""
    if words:
        return Path(words)
    found = [path.parent for path in RUNS.glob(f"*/{NAME}")]
    if not found:
        raise BadInput("there is no run in runs/ to resume: name its folder, as in --resume --out runs/001")
    return max(found, key=_last_change)


def _last_change(folder: Path) -> float:
    files = [checkpoint.path_of(folder / "checkpoints", step) for step in checkpoint.steps(folder / "checkpoints")]
    return max(file.stat().st_mtime for file in (folder / NAME, *files))
