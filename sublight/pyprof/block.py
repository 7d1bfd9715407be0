"""A piece of code under a profiler, in this process: a notebook's cell."""

from __future__ import annotations

import os
import platform
import time
from types import CodeType
from typing import Any

from sublight.pyprof import children, recorder
from sublight.pyprof.record import PythonProfile
from sublight.pyprof.recorder import Options


def run_code(code: CodeType, names: dict[str, Any], options: Options, *, command: str) -> tuple[PythonProfile, Any]:
    """The profile, and what the code raised (None where nothing): the caller decides what becomes of it."""
    one = recorder.make(options, program=(code.co_filename,))
    one.abandon()  # what an earlier cell left
    error: BaseException | None = None
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    one.start()
    try:
        exec(code, names)
    except BaseException as raised:  # an interrupt ends the cell with its profile
        error = raised
    process = children.compact(one.stop())
    profile = PythonProfile(
        mode=options.mode,
        command=command,
        python=platform.python_version(),
        hz=options.hz if options.mode == "sample" else 0.0,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        processes=(process,),
        notes=("children are not followed in a notebook",) if children_of(os.getpid()) else (),
    )
    return profile, error


def children_of(pid: int) -> bool:
    """Whether this process has children now; where the system does not tell, no."""
    try:
        with open(f"/proc/self/task/{pid}/children") as file:
            return bool(file.read().strip())
    except OSError:
        return False
