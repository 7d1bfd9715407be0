"""sublight: how far below its limits a GPU runs, why, and how to close the gap.

Everything loads when it is first used: `import sublight` costs milliseconds and brings neither torch nor triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = ("bench_ops", "explain", "measure", "measure_limits", "profile", "range", "step", "why")  # of sublight.api
_OPS_FOLDER = Path(__file__).parent / "ops"
_MODULES = ("bench", "gpus", "limits", "ops", "results", "units")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _FUNCTIONS:
        return getattr(importlib.import_module("sublight.api"), name)
    if name in _MODULES:
        return importlib.import_module(f"sublight.{name}")
    if _is_op(name):  # asked of the folder, not of OPS: a mistyped name must not cost an import of torch
        return importlib.import_module("sublight.ops").find(name).call
    raise AttributeError(f"module 'sublight' has no attribute {name!r}")


def __dir__() -> list[str]:
    ops = [path.stem for path in _OPS_FOLDER.iterdir() if _is_op(path.stem)]
    return sorted({"__version__", *_FUNCTIONS, *_MODULES, *ops})


def _is_op(name: str) -> bool:
    """An op's file is named after it and ends in its record; the folder's helpers hold none."""
    files = (_OPS_FOLDER / f"{name}.py", _OPS_FOLDER / name / "__init__.py")
    return any(file.is_file() and " = Op(" in file.read_text(encoding="utf-8") for file in files)
