"""Run demonstrations on this machine's GPU: one in this process, or all, each in a process of its own.

    python -m sublight.extensions.demos.run NAME FILE    one, its figures to FILE as JSON

A context that a failed kernel has ruined, or a tool that hangs, costs one demonstration and not the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sublight import nvml
from sublight.errors import BadInput, one_of
from sublight.extensions import build
from sublight.extensions.demos import DEMOS
from sublight.extensions.demos.demo import Demo, Figures, Record, figures_of
from sublight.extensions.demos.gpu import Gpu, why_no_gpu

LIMIT_S = 150.0  # time limit of all demonstrations together, compilation included
EACH_LIMIT_S = 45.0
COMPILERS = 8


def find(name: str) -> Demo:
    names = [demo.name for demo in DEMOS]
    return DEMOS[names.index(one_of("demo", name.lower().replace("_", "-").replace(" ", "-"), names))]


def on_this_gpu(demo: Demo) -> Figures:
    """What the demonstration shows on this GPU; a failure becomes a line in `missing`."""
    try:
        return demo.run(Gpu(demo.source))
    except (RuntimeError, OSError, BadInput, subprocess.SubprocessError) as error:
        if not isinstance(error, BadInput):
            traceback.print_exc()
        return Figures(missing=(f"{demo.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",))


def without_a_gpu(demo: Demo) -> Figures | None:
    return demo.offline() if demo.offline else None


def run_all(progress: Callable[[str, int, int], None] | None = None, *, limit_s: float = LIMIT_S) -> dict[str, Figures]:
    """Every demonstration by its name, within the limit: those that it leaves no time for say so."""
    if reason := why_no_gpu():
        raise BadInput(f"no GPU to run on: {reason}; `sublight demo NAME` shows recorded figures")
    end = time.monotonic() + limit_s
    if progress:
        progress("compiling", 0, len(DEMOS))
    gpu = Gpu()
    with ThreadPoolExecutor(COMPILERS) as pool:
        for done in [pool.submit(build.cubin, source, gpu.capability) for source in {d.source for d in DEMOS} - {""}]:
            done.result()  # raises where a kernel does not compile: that is a mistake of ours
    figures = {}
    for index, demo in enumerate(DEMOS):
        if progress:
            progress(demo.name, index, len(DEMOS))
        figures[demo.name] = _in_a_process(demo, min(EACH_LIMIT_S, end - time.monotonic()))
    return figures


def _in_a_process(demo: Demo, limit_s: float) -> Figures:
    if limit_s <= 0:
        return Figures(missing=(f"{demo.name}: no time was left for it",))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "sublight.extensions.demos.run", demo.name, str(out)]
        try:
            done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Figures(missing=(f"{demo.name}: took more than {limit_s:.0f} s",))
        if done.returncode or not out.exists():
            return Figures(missing=(f"{demo.name}: its process ended with {done.returncode}",))
        return figures_of(json.loads(out.read_text(encoding="utf-8")))


def record(figures: dict[str, Figures], commit: str) -> Record:
    found = nvml.handle()
    driver = str(found[0].nvmlSystemGetDriverVersion()) if found else "unknown"
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return Record(gpu=Gpu().name, driver=driver, date=date, commit=commit, figures=figures)


def main(words: Sequence[str]) -> int:
    name, path = words
    Path(path).write_text(json.dumps(on_this_gpu(find(name)).to_json(), allow_nan=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
