"""Checkpoints: written beside, flushed to disk, then renamed, so that one is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from sublight.errors import BadInput

KEPT = 2  # the newest, and one before it in case the disk loses the newest
_NAME = re.compile(r"step-(\d+)\.pt")


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that exist, oldest first."""
    return sorted(int(match[1]) for file in folder.glob("step-*.pt") if (match := _NAME.fullmatch(file.name)))


def save(state: dict[str, Any], folder: Path, step: int) -> Path:
    """All of it, or the folder as it was; older ones beyond the last few go."""
    path = path_of(folder, step)
    save_file(state, path)
    for old in steps(folder)[:-KEPT]:
        path_of(folder, old).unlink(missing_ok=True)
    for left in folder.glob("step-*.part"):  # of a process that was killed
        left.unlink(missing_ok=True)
    return path


def save_file(state: dict[str, Any], path: Path) -> None:
    """All of it, or what was there before."""
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's own writer says by the second that a disk is full
        part.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or "is the disk full?"
        raise BadInput(f"cannot write {path}: {reason}; the checkpoint before it is whole") from None


def load(folder: Path) -> dict[str, Any] | None:
    """The newest that can be read; None where there is none."""
    found = steps(folder)
    for step in reversed(found):
        if state := load_file(path_of(folder, step), step):
            return state
    if found:
        raise BadInput(f"none of the {len(found)} checkpoints in {folder} can be read: start again with another --out")
    return None


def load_file(path: Path, step: int) -> dict[str, Any] | None:
    """None where it is not of this step, or torch finds anything wrong with it."""
    with contextlib.suppress(Exception):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, dict) and state.get("step") == step:
            return state
    return None


def random_states() -> dict[str, Any]:
    """The generators' states that dropout uses, on the CPU and each GPU; data order and samples have other seeds."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and len(states.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _flush_folder(folder: Path) -> None:
    """The rename itself must be on disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
