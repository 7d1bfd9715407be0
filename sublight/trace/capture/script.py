"""Run a user's script in this process as Python itself would: its arguments, its folder, its exit, its traceback."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import os
import re
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from sublight.errors import BadInput
from sublight.trace.capture.interrupt import INTERRUPTED, Interrupts, Terminated, not_swallowed
from sublight.trace.capture.steps import CALL

# what must find CUDA untouched: a script that chooses its devices, or forks children that use them
_WAKES_CUDA_ITSELF = re.compile(rb"CUDA_VISIBLE_DEVICES|multiprocessing|\bos\.fork\b|\bvllm\b|\bray\b")
_OURS = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be run, checked before anything starts."""

    name: str
    args: tuple[str, ...]
    module: bool
    file: str  # "" where a module has none

    @property
    def command(self) -> str:
        words = [*(["-m"] if self.module else []), self.name, *self.args]
        return " ".join(word if re.fullmatch(r"[\w./:=@%+,-]+", word) else repr(word) for word in words)

    @property
    def minds_cuda(self) -> bool:
        """The script must be the first to touch CUDA."""
        try:
            return bool(_WAKES_CUDA_ITSELF.search(Path(self.file).read_bytes()))
        except OSError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the script ended."""

    exit_code: int = 0
    error: BaseException | None = None
    interrupted: bool = False
    module: ModuleType | None = None  # what the script made is in it: to be let go of last


def check(name: str, args: Sequence[str], *, module: bool, needs_torch: bool = True) -> Target:
    """One clear line where it cannot be run."""
    file = _module_file(name) if module else _script_file(name)
    if needs_torch and importlib.util.find_spec("torch") is None:
        raise BadInput("torch is not installed here and a script needs it: pip install 'sublight[torch]'")
    return Target(name=name, args=tuple(args), module=module, file=file)


def _script_file(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        raise BadInput(f"{name} is a folder: name the script in it, or use -m for a package")
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"no such script: {name}") from None
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror}") from None
    try:
        compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:  # a .py file may have one, and Python tells where better than we do
        if path.suffix not in (".py", ".pyw") or b"\0" in source:
            where = f" (line {error.lineno}: {error.msg})" if b"\0" not in source and error.lineno else ""
            raise BadInput(f"{name} is not Python{where}: name a script, or a trace as .json or .sqlite") from None
    except ValueError:  # null bytes, before 3.12
        raise BadInput(f"{name} is not Python: name a script, or a trace as .json or .sqlite") from None
    return os.path.abspath(name)


def _module_file(name: str) -> str:
    with _first_on_path(os.getcwd()):
        spec = _spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package runs its __main__
            spec = _spec(f"{name}.__main__")
            if spec is None:
                raise BadInput(f"{name} is a package without a __main__: name one of its modules")
    if spec is None:
        raise BadInput(f"no module named {name}: it must be importable from here")
    return spec.origin or ""


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def run(target: Target, interrupts: Interrupts | None = None) -> Ended:
    """Run it as `__main__`; what it prints, raises and returns to the shell stays as it is.

    From the script's end on, signals are `interrupts`' to answer; without one, they do what they did before.
    """
    stages = interrupts or Interrupts()
    main = ModuleType("__main__")
    before = sys.argv
    folder = os.getcwd() if target.module else os.path.dirname(target.file)
    sys.argv = [target.name, *target.args]
    try:
        try:
            with _first_on_path(folder), not_swallowed():
                stages.hand_over()
                if target.module:
                    runpy.run_module(target.name, run_name="__main__", alter_sys=True)
                else:
                    _run_file(target, main)
                _wait_for_threads()
        finally:
            while stages.stage != "report":
                with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a second one, right behind the first
                    stages.hold()
    except SystemExit as exit:
        was_signal = isinstance(exit, Terminated)
        return Ended(exit_code=_exit_code(exit), error=exit, interrupted=was_signal, module=main)
    except KeyboardInterrupt as error:
        return Ended(exit_code=INTERRUPTED, error=error, interrupted=True, module=main)
    except BaseException as error:
        _print(error)
        return Ended(exit_code=1, error=error, module=main)
    finally:
        sys.argv = before
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if interrupts is None:
            stages.put_back()
    return Ended(module=main)


def _wait_for_threads() -> None:
    """As Python does before it exits: a script may leave its work to threads, and end.

    The threads of an executor end only when Python tells them that it exits: these are waited for until they have
    nothing to do.
    """
    pools = sys.modules.get("concurrent.futures.thread")
    queues = dict(getattr(pools, "_threads_queues", {}))
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in queues:
            thread.join()
    while not all(queue.empty() and _is_idle(thread) for thread, queue in queues.items()):
        time.sleep(0.01)


def _is_idle(thread: threading.Thread) -> bool:
    """Whether an executor's thread waits for work: `_worker` takes it from a queue that is written in C."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is None or frame.f_code.co_name == "_worker"


@contextlib.contextmanager
def watching_exit(leave: Callable[[int], None], *, first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """`os._exit` ends a process without a word: `leave` is called before it does; not in children, which end so.
    `first` is called before everything else, in children, too."""
    exit_now, process = os._exit, os.getpid()

    def _exit(status: int) -> NoReturn:
        first()
        if os.getpid() == process:
            leave(status)
        exit_now(status)

    os._exit = _exit
    try:
        yield
    finally:
        os._exit = exit_now


def _run_file(target: Target, main: ModuleType) -> None:
    """As `python script.py`: `__file__` is absolute and sys.argv[0] as typed, where runpy has one for both."""
    main.__file__ = os.path.abspath(target.name)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    main.__dict__["__builtins__"] = builtins
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main  # where pickle and spawned children look for it
    try:
        exec(compile(Path(target.name).read_bytes(), main.__file__, "exec", dont_inherit=True), main.__dict__)
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code
    print(exit.code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    """As Python prints it, through the script's own hook where it set one, without the frames that we added."""
    strip(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)


def strip(error: BaseException) -> None:
    """Take our frames, and runpy's at the top, out of an exception's traceback and of those it came from."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_ours(one.__traceback__)
        queue += [one.__cause__, one.__context__]


def _without_ours(top: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    while top is not None:
        file = top.tb_frame.f_code.co_filename
        ours = file.startswith(_OURS) or top.tb_frame.f_code.co_qualname == CALL
        if not ours and (frames or not file.endswith(("<frozen runpy>", "runpy.py"))):
            frames.append(top)
        top = top.tb_next
    if not frames:
        return None
    for frame, below in zip(frames, [*frames[1:], None], strict=True):
        frame.tb_next = below
    return frames[0]
