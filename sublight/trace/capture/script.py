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
from typing import Any, NoReturn

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
    packages: tuple[str, ...] = ()  # files of the packages that a module is in: Python runs these first

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for file in (self.file, *self.packages) if file)

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
    file, *packages = _module_files(name) if module else [_script_file(name)]
    if needs_torch and importlib.util.find_spec("torch") is None:
        raise BadInput("torch is not installed here and a script needs it: pip install 'sublight[torch]'")
    return Target(name=name, args=tuple(args), module=module, file=file, packages=tuple(packages))


def _script_file(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        raise BadInput(f"{name} is a folder: name the script in it, or use -m for a package")
    if name == "-" or (path.exists() and not path.is_file()):  # a pipe is empty when it is read again, to be run
        raise BadInput(f"{name} is not a regular file: save the script to one first")
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


def _module_files(name: str) -> list[str]:
    """The module's own file, then those of its packages."""
    with _first_on_path(os.getcwd()):
        specs = _specs(name)
        if specs and specs[-1].submodule_search_locations is not None:  # a package runs its __main__
            specs = _specs(f"{name}.__main__")
            if not specs:
                raise BadInput(f"{name} is a package without a __main__: name one of its modules")
    if not specs:
        raise BadInput(f"no module named {name}: it must be importable from here")
    *packages, own = (spec.origin or "" for spec in specs)
    return [own, *packages]


def _specs(name: str) -> list[importlib.machinery.ModuleSpec]:
    """Of the packages and the module, or none; nothing is imported, for what a package does is the program's work."""
    found: list[importlib.machinery.ModuleSpec] = []
    path: Sequence[str] | None = None
    parts = name.split(".")
    for at in range(len(parts)):
        full = ".".join(parts[: at + 1])
        spec = _spec(full, path)
        if spec is None:  # a package may find its modules in a way of its own
            return _specs_by_import(name) if found else []
        found.append(spec)
        path = getattr(sys.modules.get(full), "__path__", spec.submodule_search_locations)
        if path is None and full != name:
            return []
    return found


def _spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    try:
        return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, path)) is not None), None)
    except (ImportError, ValueError, KeyError):  # a folder without __init__.py asks for its parent
        return None


def _specs_by_import(name: str) -> list[importlib.machinery.ModuleSpec]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [spec] if spec is not None else []


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
                try:
                    if target.module:
                        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
                    else:
                        _run_file(target, main)
                except (KeyboardInterrupt, Terminated):
                    raise
                except SystemExit as exit:
                    code = _exit_code(exit)
                    _wait_for_threads()
                    return Ended(exit_code=code, error=exit, module=main)
                except BaseException as error:
                    _print(error)
                    _wait_for_threads()
                    return Ended(exit_code=1, error=error, module=main)
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
    queues = _executors_threads("concurrent.futures.thread", "_threads_queues")
    managers = _executors_threads("concurrent.futures.process", "_threads_wakeups")
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in {*queues, *managers}:
            thread.join()
    while any(thread.is_alive() and _has_work(thread, queues.get(thread)) for thread in {*queues, *managers}):
        time.sleep(0.01)


def _executors_threads(module: str, table: str) -> dict[threading.Thread, Any]:
    """What Python's own list of the threads that it stops at its exit holds; nothing where no executor was made."""
    return dict(getattr(sys.modules.get(module), table, {}))


def _has_work(thread: threading.Thread, queue: Any) -> bool:
    """Whether an executor's living thread has anything to do. One that waits for work is in `_worker`, which takes it
    from a queue that is written in C; the manager of processes has no such queue and keeps a table."""
    if queue is None:
        return bool(getattr(thread, "pending_work_items", ()))
    frame = sys._current_frames().get(thread.ident or 0)
    return not queue.empty() or (frame is not None and frame.f_code.co_name != "_worker")


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
