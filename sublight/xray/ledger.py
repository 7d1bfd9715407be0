"""What each of our kernels compiled to, by a hash of all that went in: what has not changed is not compiled again.

Compiling every kernel takes minutes; most changes touch none. `compiled.json` beside this file holds registers, spilled
bytes, shared memory and narrow accesses, for one version of Triton. `python -m sublight.xray.compile --quick --write`
writes it anew; `make check-compile` compiles everything, and fails where the file is not what it found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from sublight.backend.record import Launch

FILE = Path(__file__).with_name("compiled.json")
Figures = tuple[int, int, int, tuple[str, ...]]  # registers, spilled bytes, shared bytes, narrow accesses


def key_of(launch: Launch, target: int, *, look_for_narrow: bool) -> str:
    """A hash of the kernel's source and that of all it calls, its place, types, constants and options."""
    text = f"{launch.jit.cache_key} {launch.key} {target} {look_for_narrow}"
    return f"{launch.kernel} sm_{target} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read(path: Path = FILE) -> dict[str, Figures]:
    """Empty where there is no such file, or another Triton compiled it."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["triton"] != _triton():
        return {}
    return {key: (*figures[:3], tuple(figures[3:])) for key, figures in kept["compiled"].items()}


def write(found: Mapping[str, Figures], path: Path = FILE) -> None:
    lines = [f"  {json.dumps(key)}: {json.dumps([*found[key][:3], *found[key][3]])}" for key in sorted(found)]
    text = f'{{"triton": {json.dumps(_triton())}, "compiled": {{\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(text, encoding="utf-8")


def _triton() -> str:
    import triton

    return str(triton.__version__)
