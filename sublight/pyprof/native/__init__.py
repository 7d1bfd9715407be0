"""The profilers' C part, built on first use with the compiler at hand and kept in the user's cache.

Nothing needs it: without it looks are made by `sublight.sampling`, which costs more and cannot tell who waits for the
interpreter's lock, and calls are traced in Python, which costs much more. `SUBLIGHT_NATIVE=0` turns it off.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sublight.backend import native
from sublight.folder import cache_folder

NAME = "sublight_pyprof"
SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("sampler.c", "waits.c", "tracer.c", "breaker.c", "ending.c", "module.c")
)
HEADER = Path(__file__).with_name("native.h")
BUILD_S = 120.0


class Native:
    """The module, or the reason why there is none; asked once for a process."""

    module: Any = None
    reason = ""
    was_asked = False


def module(say: Callable[[str], None] = lambda line: None) -> Any:
    """The C part, after building it where needed; None where it cannot be (`why_not` says why)."""
    if not Native.was_asked:
        Native.was_asked = True
        Native.reason = why_not()
        if not Native.reason:
            try:
                file = file_of()
                if not file.exists():
                    say("building the profiler's C part, once: some seconds")
                    native.compile_into(file, command, time_limit_s=BUILD_S)
                Native.module = native.load(file, NAME)
            except Exception as error:  # whatever goes wrong, Python does it, and the report says so
                Native.reason = f"{type(error).__name__}: {error}"
    return Native.module


def why_not() -> str:
    if os.environ.get("SUBLIGHT_NATIVE", "1") == "0":
        return "turned off by SUBLIGHT_NATIVE=0"
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        return f"not built for {sys.implementation.name} on {sys.platform}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "not built for a Python without a lock"
    if file_of().exists():
        return ""
    if compiler() is None:
        return "no C compiler (cc, gcc or clang)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h (Debian: python3-dev)"
    return ""


@functools.cache
def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def command(out: Path) -> list[str]:
    include = sysconfig.get_paths()["include"]
    headers = [f"-I{include}", f"-I{include}/internal"]
    flags = ["-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", *headers]
    return [str(compiler()), *flags, *map(str, SOURCES), "-o", str(out)]


@functools.cache
def file_of() -> Path:
    """The path of the built module: one for each Python and version of the sources."""
    texts = [file.read_text(encoding="utf-8") for file in (*SOURCES, HEADER)]
    digest = hashlib.sha256("\0".join([sys.version, os.uname().machine, *texts]).encode()).hexdigest()[:16]
    return cache_folder() / "native" / f"{NAME}-{digest}.so"
