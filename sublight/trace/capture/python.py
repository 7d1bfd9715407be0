"""The samples of Python's stacks as the trace file keeps them: files by the names that the user knows them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sublight.sampling import Samples
from sublight.trace.capture.source import is_users, shown_path


def described(samples: Samples, steps: Mapping[str, int], *, script: str = "") -> dict[str, Any]:
    """Samples as JSON; `mine`: which frames are the user's code; `steps`: how many each label saw."""
    data = samples.to_json()
    mine = [frame.file == script or is_users(frame.file) for frame in samples.frames]
    for row, is_mine in zip(data["frames"], mine, strict=True):
        row[0] = shown_path(row[0]) if is_mine else library_path(row[0])
    return {**data, "mine": mine, "steps": dict(steps)}


def library_path(file: str) -> str:
    """A library's file from its package on.

    >>> library_path("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py")
    'torch/nn/modules/linear.py'
    >>> library_path("/usr/lib/python3.11/json/decoder.py")
    'json/decoder.py'
    """
    for folder in ("site-packages/", "dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    parts = file.split("/")
    named = [at for at, part in enumerate(parts) if part.startswith("python3.")]
    return "/".join(parts[named[-1] + 1 :]) if named else file
