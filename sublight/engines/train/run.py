"""A run is a folder: what it is (run.json), its tokens, its checkpoints, its log. All of it resumes from there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
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
TOKENS = "tokens"


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
        return self.folder / TOKENS

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
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"cannot open {folder}: {error.strerror}") from None
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


@contextlib.contextmanager
def new(words: str, held: contextlib.ExitStack) -> Iterator[Path]:
    """A folder for a new run: the one that was named, or the next number in runs/. Nobody else begins or trains there
    until `held` ends. If the block fails, what it made is removed: a refused run leaves nothing."""
    folder, made = _made(words)
    held.enter_context(alone(folder))
    _refuse_second(folder)
    tokens = folder / TOKENS
    is_first = not tokens.exists()
    try:
        yield folder
    except BaseException:
        if is_first:
            shutil.rmtree(tokens, ignore_errors=True)
        for each in made:
            with contextlib.suppress(OSError):  # another run began in it meanwhile
                each.rmdir()
        raise


def _made(words: str) -> tuple[Path, list[Path]]:
    """The folder, and what had to be made for it, the innermost first. A number is taken by making its folder: of two
    that start at once each gets its own."""
    number = 0 if words else 1 + max((int(each.name) for each in RUNS.glob("*") if each.name.isdecimal()), default=0)
    while True:
        folder = Path(words) if words else RUNS / f"{number:03d}"
        _refuse_second(folder)
        made = [] if folder.parent.exists() else [folder.parent]
        try:
            folder.mkdir(parents=True)
            return folder, [folder, *made]
        except FileExistsError:
            if words and folder.is_dir():
                return folder, made
            if words:
                raise BadInput(f"{folder} is a file: name a folder with --out") from None
            number += 1
        except OSError as error:
            raise BadInput(f"cannot make {folder}: {error.strerror}; name another with --out") from None


def _refuse_second(folder: Path) -> None:
    if (folder / NAME).exists():
        raise BadInput(f"{folder} holds a run: `sublight train --resume --out {folder}` goes on, or name another")


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
