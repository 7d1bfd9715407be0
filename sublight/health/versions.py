"""Which torch is installed, and with which CUDA, read from its files: importing it takes seconds and opens a GPU."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

from sublight.health.record import Unavailable, Versions

_ENTRY = re.compile(r"^(\w+)(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]*)['\"]", re.MULTILINE)


def with_torch(versions: Versions) -> Versions:
    """The driver's versions with torch's beside them."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        missing = Unavailable("torch is not installed")
        return replace(versions, torch=missing, torch_cuda=missing)
    try:
        entries = parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError as error:
        unread = Unavailable(f"torch/version.py cannot be read: {error.strerror}")
        return replace(versions, torch=unread, torch_cuda=unread)
    build = f"ROCm {entries['hip']}" if entries.get("hip") else "CPUs"
    return replace(
        versions,
        torch=entries.get("__version__") or Unavailable("torch/version.py names none"),
        torch_cuda=entries.get("cuda") or Unavailable(f"torch is built for {build}"),
    )


def parse(source: str) -> dict[str, str]:
    """The names that are strings.

    >>> parse("__version__ = '2.11.0'\\ncuda: Optional[str] = '12.8'\\nhip: Optional[str] = None")
    {'__version__': '2.11.0', 'cuda': '12.8'}
    """
    return dict(_ENTRY.findall(source))
