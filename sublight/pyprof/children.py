"""Children are recorded, too: forked ones from the fork on, started ones through a `sitecustomize` before their own.

What a child recorded it writes into a folder of the parent's when it ends: by itself, by `os._exit`, as those of
multiprocessing do, by exec, or when it is told to end by SIGTERM, as a pool's workers are (only with the C part).
The environment of started children is set behind `os.environ`, which stays as the program knows it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from sublight.pyprof import native, recorder
from sublight.pyprof.record import PythonProcess, merged, process_from_json, process_to_json
from sublight.pyprof.recorder import Options, Recorder
from sublight.trace.capture.folder import is_alive
from sublight.trace.capture.interrupt import in_a_child

CHILD_EVENTS = 10_000
VARIABLE = "SUBLIGHT_PYPROF"
FOLDER = str(Path(__file__).with_name("child"))


class Following:
    """The recorder of this process, and what its children are told; one at a time."""

    current: Following | None = None
    hooked = False  # os.register_at_fork cannot be undone

    def __init__(self, options: Options, folder: Path, own: Recorder, paths: str | None = None) -> None:
        self.options, self.folder, self.recorder = options, folder, own
        self._paths = os.environ.get("PYTHONPATH", "") if paths is None else paths
        self._before: dict[str, Any] = {}
        self._is_child = False
        self._lock = threading.RLock()

    def begin(self) -> None:
        Following.current = self
        if not Following.hooked:
            os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
            Following.hooked = True
        settings = json.dumps({"folder": str(self.folder), **asdict(of_child(self.options))})
        os.putenv(VARIABLE, settings)
        others = [path for path in self._paths.split(os.pathsep) if path and path != FOLDER]
        os.putenv("PYTHONPATH", os.pathsep.join([FOLDER, *others]))

    def end(self) -> None:
        Following.current = None
        os.unsetenv(VARIABLE)
        if "PYTHONPATH" in os.environ:
            os.putenv("PYTHONPATH", os.environ["PYTHONPATH"])
        else:
            os.unsetenv("PYTHONPATH")

    def begin_child(self, own: Recorder) -> None:
        """Called in a forked child: record until the child ends, whichever way."""
        self.recorder, self._is_child = own, True
        (self.folder / f"{os.getpid()}.began").touch()
        exit_now = os._exit

        def _exit(status: int) -> NoReturn:
            self.write()
            exit_now(status)

        os._exit = _exit
        _before_exec(lambda name: self.write())
        if (module := native.module()) is not None:
            module.before_termination(self.write)
        own.start()

    def pause(self) -> None:
        """Before a fork no thread of ours runs: Python would warn of it."""
        self.recorder.pause()
        if (module := native.module()) is not None:
            module.termination_pause()

    def resume(self) -> None:
        self.recorder.resume()
        if (module := native.module()) is not None:
            module.termination_resume()

    def write(self) -> None:
        """Once: what this child has recorded so far. Whoever comes second waits: the process ends behind it."""
        with self._lock, contextlib.suppress(Exception):  # the folder may be gone; the child must end as it would
            if Following.current is not self or not self._is_child:
                return
            Following.current = None
            data = json.dumps(process_to_json(compact(self.recorder.stop())))
            half = self.folder / f"{os.getpid()}.half"
            half.write_text(data, encoding="utf-8")
            half.replace(self.folder / f"{os.getpid()}.json")


def of_child(options: Options) -> Options:
    """A child writes what it recorded while somebody waits for it to end."""
    return replace(options, events=min(options.events, CHILD_EVENTS))


def compact(process: PythonProcess) -> PythonProcess:
    return replace(process, samples=merged(process.samples)) if process.samples else process


def _before_fork() -> None:
    if Following.current is not None:
        Following.current.pause()


def _after_fork() -> None:
    following = Following.current
    if following is not None and (module := native.module()) is not None:
        module.after_fork(following.resume, __file__)
    elif following is not None:
        following.resume()


def _forked() -> None:
    following = Following.current
    if following is None:
        return
    try:
        in_a_child()
        following.recorder.abandon()
        child = Following(of_child(following.options), following.folder, following.recorder, following._paths)
        Following.current = child
        child.begin_child(recorder.make(child.options))
        atexit.register(child.write)
    except Exception as error:  # the child runs on without
        Following.current = None
        sys.stderr.write(f"sublight: a child is not in the profile: {type(error).__name__}: {error}\n")


def begin_spawned(settings: str, paths: str) -> None:
    """Called in a started child before its program runs."""
    data = json.loads(settings)
    folder = Path(data.pop("folder"))
    options = Options(**data)
    helper = any("multiprocessing.resource_tracker" in word for word in sys.orig_argv)
    if helper or not folder.is_dir():  # no work of the program's; or the profile is over
        return
    child = Following(options, folder, recorder.make(options), paths)
    child.begin()
    atexit.register(child.write)
    child.begin_child(child.recorder)


def _before_exec(leave: Callable[[str], None]) -> Callable[[], None]:
    """Call `leave` before this process becomes another program; gives what undoes that."""
    originals = {name: getattr(os, name) for name in ("execv", "execve")}

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(path: Any, *args: Any) -> Any:
            name = os.fsdecode(path)
            if os.access(name, os.X_OK):  # execvp tries one folder after the other
                leave(name)
            return original(path, *args)

        return start

    for name, original in originals.items():
        setattr(os, name, watched(original))

    def undo() -> None:
        for name, original in originals.items():
            setattr(os, name, original)

    return undo


@contextlib.contextmanager
def watching_exec(leave: Callable[[str], None]) -> Iterator[None]:
    """`leave` is called before this process, not a child of it, becomes another program."""
    process = os.getpid()
    undo = _before_exec(lambda name: leave(name) if os.getpid() == process else None)
    try:
        yield
    finally:
        undo()


def gather(folder: Path) -> tuple[list[PythonProcess], list[str]]:
    """What the children wrote, by their numbers, and a note on those that began and wrote nothing."""
    found: list[PythonProcess] = []
    running, silent = 0, 0
    for began in sorted(folder.glob("*.began"), key=lambda file: int(file.stem)):
        try:
            data = json.loads((folder / f"{began.stem}.json").read_bytes())
            found.append(process_from_json(data))
        except (OSError, ValueError, KeyError, TypeError):
            running += (alive := is_alive(int(began.stem)))
            silent += not alive
    notes = []
    if running:
        notes.append(f"{running} of its processes still run{'s' * (running == 1)}: not in here")
    if silent:
        notes.append(f"{silent} of its processes ended without a word (killed, or an old Python): not in here")
    return found, notes


def remove(folder: Path) -> None:
    """The files that are ours, and the folder if it is empty then."""
    for ending in ("began", "json", "half"):
        for file in folder.glob(f"*.{ending}"):
            if file.stem.isdigit():
                file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
