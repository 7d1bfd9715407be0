"""What `sublight serve` does: checks every option and takes the port before weights are read, then serves."""

from __future__ import annotations

import math
import os
import socket
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sublight.cli.engine_options import EngineOptions
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.engines.serve.protocol import Served

GRACE_S = 3  # how long streams may go on once the server must end


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command's words."""

    engine: EngineOptions
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    key: str = ""
    queue: int = 256
    time_limit_s: float = 600.0
    context: int = 0


def command(request: Request) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: threads that spin starve a busy machine
    try:
        import uvicorn

        from sublight.engines.serve.app import app_of
    except ImportError as error:
        if (error.name or "").startswith("sublight"):  # nothing that could be installed
            raise
        raise BadInput(f"serve needs {error.name}: pip install 'sublight[serve]'") from None
    from sublight.engines.serve.worker import Worker

    if request.queue < 0 or not 0 < request.time_limit_s < math.inf:
        raise BadInput(f"--queue {request.queue}, --time-limit {request.time_limit_s:g}: give 0 or more, and seconds")
    served = served_of(request)
    with taken(request.host, request.port) as listening:
        engine = request.engine.build(longest=request.context)
        room = engine.scheduler.pages.count * engine.scheduler.pages.size
        served = replace(served, longest=min(served.longest, room))  # no text may be longer than the cache

        workers: list[Worker] = []

        def worker(**how: Any) -> Worker:
            made = Worker(engine, served.words, most_waiting=request.queue, most_s=request.time_limit_s, **how)
            workers.append(made)
            return made

        class Server(uvicorn.Server):
            """Ends open streams on Ctrl-C or SIGTERM; uvicorn alone would wait for them, then log a traceback."""

            def handle_exit(self, sig: int, frame: Any) -> None:
                for each in workers:
                    each.end()
                super().handle_exit(sig, frame)

        app = app_of(served, worker, key=request.key)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S, access_log=False)
        host, port = listening.getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"{served.name} on {where}, {served.longest} tokens a text, {room} in the cache", flush=True)
        if host not in ("127.0.0.1", "::1") and not request.key:
            print("sublight: other machines may use it, and there is no --api-key", file=sys.stderr)
        Server(config).run(sockets=[listening])


def served_of(request: Request) -> Served:
    from sublight.engines.generate import config as configs
    from sublight.engines.generate import vocabulary
    from sublight.engines.serve import chat
    from sublight.engines.serve.protocol import Served

    folder = request.engine.folder
    config = configs.read(folder)
    return Served(
        name=request.name or folder.resolve().name,
        words=vocabulary.read(folder, config.vocab),
        vocab=config.vocab,
        longest=request.context or config.longest,
        ends=frozenset(config.ends),
        template=chat.read(folder),
    )


def taken(host: str, port: int) -> socket.socket:
    """Listen on the port; a BadInput where another program has it."""
    if not 0 <= port < 65536:
        raise BadInput(f"--port {port}: give a number from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadInput(f"--host {host}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart the port is free at once
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise BadInput(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listening
