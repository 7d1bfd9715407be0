"""Where measured limits and compiled kernels are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """SUBLIGHT_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("SUBLIGHT_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "sublight"
    try:
        return Path.home() / ".cache" / "sublight"
    except RuntimeError:  # a user without a home, as some containers have
        return Path(tempfile.gettempdir()) / "sublight"
