"""The native path: calls of our ops in C++ (`call.cpp`), built in the background where there is a compiler.

Nothing needs it: without it calls go through Python, 5 to 10 µs slower each. It is built once for a version of PyTorch
and of this file, on the first call of an op on a GPU, by a process of its own with low priority, and kept in the user's
cache. `SUBLIGHT_NATIVE=0` turns it off; `sublight doctor` says where it stands.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sublight import folder

SOURCE = Path(__file__).with_name("call.cpp")
NAME = "sublight_native"
_WAITING: list[Callable[[Any], None]] = []  # callbacks for when the module is loaded
_LOCK = threading.Lock()


class State:
    """Where the native path stands, for this process."""

    module: Any = None
    reason = "no op was called on a GPU yet"
    thread: threading.Thread | None = None
    pauses = 0  # how many `paused` blocks are open: in them every launch goes through Python


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, every call goes through Python."""
    _pause(1)
    try:
        yield
    finally:
        _pause(-1)


def _pause(more: int) -> None:
    with _LOCK:
        State.pauses += more
        if State.module is not None:
            State.module.pause(more)


def hooks() -> list[list[Any]]:
    """Triton's lists of functions that are called around each launch, as its profiler sets them."""
    if importlib.util.find_spec("triton") is None:
        return []
    from triton import knobs

    chains = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return [chain.calls for chain in chains if isinstance(getattr(chain, "calls", None), list)]


def when_ready(use: Callable[[Any], None]) -> None:
    """Call `use` with the native module: now, or once it has been built; never if it cannot be built."""
    with _LOCK:
        if State.module is None:
            _WAITING.append(use)
            return
    use(State.module)


def is_wanted(x: Any) -> bool:
    """Whether calls on such tensors may run natively; the first one on a GPU starts the build."""
    if State.module is not None:
        return True
    if x.is_cuda and State.thread is None:
        start()
    return False


def start(*, cuda: bool = True) -> threading.Thread | None:
    """Load the module, after building it where needed, in a thread; at most once for a process."""
    with _LOCK:
        if State.thread is None and State.module is None and not (reason := why_not(cuda=cuda)):
            State.thread = threading.Thread(target=_provide, args=(cuda,), name="sublight-native", daemon=True)
            State.reason = "being built"
            State.thread.start()
        elif State.thread is None and State.module is None:
            State.reason = reason
        return State.thread


def wait(time_limit_s: float = 300.0) -> bool:
    """Wait until the module is loaded or its build has failed; returns whether it is loaded."""
    thread = start()
    if thread is not None:
        thread.join(time_limit_s)
    return State.module is not None


def why_not(*, cuda: bool = True) -> str:
    """Why there will be no native path; empty where there is one, or may still be one."""
    if os.environ.get("SUBLIGHT_NATIVE", "1") == "0":
        return "turned off by SUBLIGHT_NATIVE=0"
    if sys.platform != "linux":
        return f"not built on {sys.platform}"
    if file_of(cuda=cuda).exists():
        return ""
    if compiler() is None:
        return "no C++ compiler (g++ or clang++): install one, and calls take 5 to 10 µs less"
    if cuda and cuda_headers() is None:
        return "no CUDA headers (cuda_runtime_api.h): install the CUDA toolkit, and calls take 5 to 10 µs less"
    return ""


def _provide(cuda: bool) -> None:
    try:
        file = file_of(cuda=cuda)
        if not file.exists():
            build(file, cuda=cuda)
        module = load(file)
    except Exception as error:  # whatever goes wrong, calls go through Python; doctor shows the reason
        State.reason = f"{type(error).__name__}: {error}"
        return
    for calls in hooks():
        module.watch(calls)
    with _LOCK:
        module.pause(State.pauses)
        State.module, State.reason = module, ""
        waiting = [*_WAITING]
        _WAITING.clear()
    for use in waiting:
        use(module)


def load(file: Path, name: str = NAME) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(file: Path, *, cuda: bool) -> None:
    compile_into(file, lambda half: command(half, cuda=cuda))


def compile_into(file: Path, command: Callable[[Path], list[str]], *, time_limit_s: float = 600.0) -> None:
    """Compile into the cache: under another name first, so that nobody loads half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(f".{os.getpid()}.tmp")
    words = command(half)
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=time_limit_s)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
            raise RuntimeError(f"{next(word for word in words if word != 'nice')} failed: {first.strip()}")
        half.replace(file)
    finally:
        half.unlink(missing_ok=True)


def command(out: Path, *, cuda: bool) -> list[str]:
    import torch
    from torch.utils import cpp_extension

    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = ["torch", "torch_cpu", "torch_python", "c10"]
    defines = [f"TORCH_EXTENSION_NAME={NAME}"]
    if cuda:
        folder_of_headers = cuda_headers()
        headers += [str(folder_of_headers)] if folder_of_headers else []
        libraries += ["c10_cuda"]
        defines += ["SUBLIGHT_CUDA"]
    return [
        *(["nice"] if shutil.which("nice") else []), str(compiler()), "-O2", "-std=c++20", "-fPIC", "-shared",
        "-fvisibility=hidden", *(f"-D{name}" for name in defines), *(f"-isystem{folder}" for folder in headers),
        str(SOURCE), f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in libraries), "-ldl",
        "-o", str(out),
    ]  # fmt: skip


def file_of(*, cuda: bool) -> Path:
    """Where the built module lies: one for each PyTorch, Python and version of the source."""
    import torch

    words = (torch.__version__, sys.version, SOURCE.read_text(encoding="utf-8"), str(cuda), os.uname().machine)
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return folder.cache_folder() / "native" / f"{NAME}-{digest}.so"


@functools.cache
def compiler() -> str | None:
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


@functools.cache
def cuda_headers() -> Path | None:
    """The folder of cuda_runtime_api.h: of the toolkit, or of the packages that PyTorch's wheels bring."""
    from torch.utils.cpp_extension import CUDA_HOME

    folders = [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders += sorted(packages.glob("*/include")) if packages.exists() else []
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").exists()), None)
