"""What `sublight board` does: find a sandbox that works, start the graders, serve pages until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from sublight.cli import output
from sublight.errors import BadInput
from sublight.learn.board.database import is_url
from sublight.learn.board.store import Store, check_name

MOST_GRADERS = 64
LOOK_S = 0.5


def add_account(db: str, name: str, json: str) -> None:
    check_name(name)  # before there is a file
    token = _store(db).add_account(name)
    words = f"{name}'s token, which is not shown again: {token}"
    output.show(words, {"name": name, "token": token}, json, whole_lines=True)


def serve(db: str, *, host: str, port: int, graders: int, is_open: bool, sandbox: str) -> None:
    try:
        import uvicorn  # noqa: F401

        from sublight.learn.board import app  # noqa: F401
    except ImportError:
        raise BadInput("this needs FastAPI and uvicorn: pip install 'sublight[board]'") from None
    if not 1 <= graders <= MOST_GRADERS:
        raise BadInput(f"--graders {graders}: give 1 to {MOST_GRADERS}")
    with contextlib.closing(_listener(host, port)) as listener:  # first: a refused address leaves no file
        _serve(_store(db), listener, host, graders=graders, is_open=is_open, sandbox=sandbox)


def _serve(store: Store, listener: socket.socket, host: str, *, graders: int, is_open: bool, sandbox: str) -> None:
    """Serve the board's pages, and run its entries where a sandbox works, until a signal ends it."""
    import uvicorn

    from sublight.learn.board import jail
    from sublight.learn.board.app import make_app
    from sublight.learn.board.runner import Runner

    home, stop = _home(), _stop_by_signal()
    runner: Runner | None = None
    try:
        way, reason = jail.usable(home, sandbox)
        why_not = f"no sandbox can be had here ({reason})" if way is None else why_not_graded()
        if way is not None and not why_not:
            runner = Runner(store, way, home, graders=graders)
            runner.start()
        address = f"http://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}"
        ran = f"entries are run in {way}, {graders} at a time" if runner else f"no code is run: {why_not}"
        print(f"sublight: {address}; {ran}", file=sys.stderr, flush=True)
        app = make_app(store, why_not_run=why_not, is_open=is_open)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, limit_concurrency=256))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()  # in a thread, where it leaves signals alone: it would end the process before all is put away
        while serving.is_alive() and not stop.wait(LOOK_S):
            pass
        server.should_exit = True
        serving.join()
    finally:
        if runner is not None:
            runner.stop()
        shutil.rmtree(home, ignore_errors=True)


def _home() -> Path:
    """A folder for sandboxes, in memory where possible; other users may pass through it. Where there is a GPU, Triton
    must be able to load from it what it compiles."""
    from sublight.learn.board.jail import gpu_devices

    is_in_memory = os.access("/dev/shm", os.W_OK)
    if is_in_memory and gpu_devices():
        is_in_memory = not os.statvfs("/dev/shm").f_flag & os.ST_NOEXEC
    room = "/dev/shm" if is_in_memory else None
    home = Path(tempfile.mkdtemp(prefix="sublight-board-", dir=room))
    home.chmod(0o711)
    return home


def _stop_by_signal() -> threading.Event:
    """An event that Ctrl-C or SIGTERM sets."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def why_not_graded() -> str:
    """Which packages of the grader are not installed, found without importing them; empty where none is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    return f"the grader needs {' and '.join(missing)}, which this server has not" if missing else ""


def _store(db: str) -> Store:
    from sublight.learn.board import jail

    if is_url(db):  # a database server is out of a sandbox's reach, which has no network
        return Store(db)
    file = Path(db).expanduser().resolve()
    if jail.is_shown(file):
        raise BadInput(f"--db {db}: code in a sandbox could read it there; name a file outside of Python's folders")
    if file.is_dir() or not file.parent.is_dir():
        raise BadInput(f"--db {db}: name a file in a folder that is there")
    before = os.umask(0o077)  # tokens' hashes and everybody's code
    try:
        return Store(file)
    finally:
        os.umask(before)


def _listener(host: str, port: int) -> Any:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)  # from here on clients may connect, before the address is printed
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot listen on {host}, port {port}: {error}; use --host and --port") from None
    return listener
