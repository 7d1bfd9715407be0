"""Two hundred submissions to a board, with the scan left out: honest ones among endless, forking and greedy ones.

    python benchmarks/board_load.py --json board_load.json
    python benchmarks/board_load.py --db postgresql://board@127.0.0.1:5432/board

The server is the real one, over HTTP, with the real grader and the real sandbox; only the scan, which would refuse most
of these before they run, is switched off. Meanwhile the pages are asked for, and a file, a process and a listening
socket beside the server are watched. A PostgreSQL database that is named must be empty. It fails unless the server
answered all the time, every entry has the outcome that its kind must have, and nothing is left behind. Half an hour on
two busy cores; `--count 40` takes a fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sublight.learn.board import jail, processes, runner
from sublight.learn.board.app import Allowance, make_app
from sublight.learn.board.database import is_url
from sublight.learn.board.runner import Rules, Runner
from sublight.learn.board.store import Store
from sublight.learn.exercises import find
from sublight.learn.grade.sandbox import Budget
from sublight.results import write_json

RULES = Rules(budget=Budget(cpu_s=3.0, wall_s=30.0, memory_bytes=2**29), wall_s=300.0, memory_bytes=2 * 2**30)
ACCOUNTS = 20
SLOW_S = 5.0  # an answer that took longer counts as none
AT_GOAL = "if out.numel() > 10**6:"  # in the process that compiles, which may start programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is sent, how often of 200, and how it must end."""

    name: str
    count: int
    before: str = ""  # in copy(x, out), in front of the honest code
    state: str = "rejected"
    words: tuple[str, ...] = ("",)  # one of them stands in the reason


def reaching(place: str | Path) -> str:
    """Code that is after the board's rows: it reads their file, or connects to their server."""
    if not is_url(place):
        return f"open({str(place)!r}).read()"
    server = urllib.parse.urlsplit(str(place))
    return f"import socket; socket.create_connection(({server.hostname or '127.0.0.1'!r}, {server.port or 5432}), 2)"


def kinds(database: str | Path, port: int, canary: int, secret: Path) -> list[Kind]:
    """With what they are after."""
    fork = "import os\n        while True:\n            os.fork()"
    eat = (
        "import os, time\n        for _ in range(8):\n            if not os.fork():\n                break\n"
        "        x = b'x' * (300 * 2**20)\n        time.sleep(600)"
    )
    cut = (
        "import os\n    folder = os.environ['TMPDIR']\n    for name in os.listdir(folder):\n"
        "        if '-' in name:\n            os.truncate(os.path.join(folder, name), 0)\n    return"
    )
    link = (
        "import os\n    folder = os.environ['TMPDIR']\n    for i in range(9):\n        for k in ('in', 'out'):\n"
        f"            try: os.symlink({str(secret)!r}, f'{{folder}}/{{i}}-{{k}}-0')\n            except OSError: pass\n"
        f"    os.remove(folder + '/printed'); os.symlink({str(secret)!r}, folder + '/printed')"
    )
    refused = ("FileNotFoundError", "PermissionError")
    return [
        Kind(name="honest", count=80, state="verified"),
        Kind(name="wrong", count=30, before="return", words=("no kernel was launched", "never written")),
        Kind(name="endless", count=20, before="while True: pass", words=("processor time",)),
        Kind(name="waiting", count=5, before="import time; time.sleep(600)", words=("nothing came back",)),
        Kind(name="forking", count=15, before=f"{AT_GOAL}\n        {fork}", words=("",)),
        Kind(name="memory", count=15, before="x = bytearray(2**33)", words=("MemoryError",)),
        Kind(name="memory of many", count=5, before=f"{AT_GOAL}\n        {eat}", words=("of memory in all",)),
        Kind(name="database", count=10, before=reaching(database), words=refused),
        Kind(name="network", count=5, words=refused,
             before=f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"),
        Kind(name="killing", count=5, words=("ProcessLookupError",), before=f"import os; os.kill({canary}, 9)"),
        Kind(name="cutting files", count=5, before=cut, 
             words=("ended the grader", "crashed", "killed", "was changed")),
        Kind(name="linking files", count=5, before=link, state="any"),
    ]  # fmt: skip


def source_of(kind: Kind, number: int) -> str:
    """The solution, with something in front of it; each is another text."""
    head, _, body = find("copy").solution().partition("    n = x.numel()")
    before = f"    {kind.before}\n" if kind.before else ""
    return f"{head}{before}    n = x.numel()  # {number}{body}"


class Prober(threading.Thread):
    """Asks for pages all the time."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.seconds, self.failures, self.is_done = url, [], 0, threading.Event()  # type: ignore[var-annotated]

    def run(self) -> None:
        while not self.is_done.wait(0.25):
            began = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{self.url}/exercise/copy", timeout=30) as reply:
                    reply.read()
            except OSError:
                self.failures += 1
            self.seconds.append(time.perf_counter() - began)


def send(url: str, token: str, source: str) -> int:
    entry = {"exercise": "copy", "gpu": "h200", "source": source, "claim": {}}
    request = urllib.request.Request(
        f"{url}/api/entries",
        json.dumps(entry).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return int(json.loads(reply.read())["id"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--graders", type=int, default=2)
    parser.add_argument("--db", default="", metavar="URL", help="An empty PostgreSQL database; else a SQLite file.")
    parser.add_argument("--sandbox", default="", choices=("", *jail.WAYS))
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    import uvicorn

    runner.GRADER = "sublight.learn.board.unscanned_fakes"
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="board-load-") as folder, tempfile.TemporaryDirectory(dir=room) as home:
        os.chmod(home, 0o711)
        way, reason = jail.usable(Path(home), chosen.sandbox)
        if way is None:
            print(f"no sandbox: {reason}", file=sys.stderr)
            return 2
        store = Store(chosen.db or Path(folder, "board.sqlite"))
        secret = Path(folder, "secret")
        secret.write_text("a secret of the server's\n")
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        allowance = Allowance(requests_a_minute=10**6, entries_waiting=10**4, entries_an_hour=10**4)
        server = uvicorn.Server(uvicorn.Config(make_app(store, allowance=allowance), log_level="error"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()
        canary = subprocess.Popen(["sleep", "36000"])
        tokens = [store.add_account(f"person-{number}") for number in range(ACCOUNTS)]
        every = kinds(store.place, listener.getsockname()[1], canary.pid, secret)
        order = [kind for kind in every for _ in range(max(1, round(kind.count * chosen.count / 200)))]
        order = [order[place * 73 % len(order)] for place in range(len(order))] if len(order) % 73 else order
        prober = Prober(url)
        prober.start()
        began = time.perf_counter()
        sent = {send(url, tokens[n % ACCOUNTS], source_of(kind, n)): kind for n, kind in enumerate(order)}
        sent_s = time.perf_counter() - began
        running = Runner(store, way, Path(home), graders=chosen.graders, rules=RULES)
        running.start()
        most_bytes = 0
        while store.counts().keys() & {"queued", "running"}:
            most_bytes = max(most_bytes, sum(map(processes.memory_bytes, processes.below(os.getpid()))))
            time.sleep(0.5)
            print(f"\r{time.perf_counter() - began:6.0f} s  {store.counts()}    ", end="", file=sys.stderr, flush=True)
        running.stop()
        graded_s = time.perf_counter() - began
        prober.is_done.set()
        prober.join()
        server.should_exit = True
        serving.join()
        left = {
            "processes": [each for each in processes.below(os.getpid()) if each != canary.pid],
            "files": os.listdir(home),
            "canary": canary.poll(),
            "secret": secret.read_text() == "a secret of the server's\n",
        }
        canary.kill()
        canary.wait()
        rows, wrong = judged(store, sent)
    pages = sorted(prober.seconds)
    data: dict[str, Any] = {
        "database": "postgresql" if is_url(store.place) else "sqlite",
        "sandbox": way,
        "graders": chosen.graders,
        "sent": len(sent),
        "sent_s": sent_s,
        "graded_s": graded_s,
        "kinds": rows,
        "pages": {"asked": len(pages), "failures": prober.failures, "median_s": statistics.median(pages),
                  "p99_s": pages[int(len(pages) * 0.99)], "largest_s": pages[-1]},
        "most_memory_bytes": most_bytes,
        "left": left,
        "wrong": wrong,
    }  # fmt: skip
    if chosen.json:
        write_json(data, Path(chosen.json))
    print()
    for row in rows:
        print(f"{row['kind']:16} {row['sent']:4}  {row['states']}  {'; '.join(row['reasons'])[:110]}")
    print(f"{len(sent)} graded in {graded_s:.0f} s; pages: {data['pages']}; most memory {most_bytes >> 20} MiB")
    is_clean = not left["processes"] and not left["files"] and left["canary"] is None and left["secret"]
    answered = not prober.failures and pages[-1] < SLOW_S
    print(f"left behind: {left}; wrong: {wrong}")
    return 0 if is_clean and answered and not wrong and sum(row["sent"] for row in rows) == len(sent) else 1


def judged(store: Store, sent: dict[int, Kind]) -> tuple[list[dict[str, Any]], list[str]]:
    """By kind: states and reasons; and what is not as it must be."""
    rows, wrong = [], []
    for kind in dict.fromkeys(sent.values()):
        entries = [store.entry(number) for number, each in sent.items() if each == kind]
        states: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for entry in entries:
            assert entry is not None
            states[entry.state] += 1
            if entry.reason:
                reasons[entry.reason[:90]] += 1
            is_right = kind.state in (entry.state, "any") and any(words in entry.reason for words in kind.words)
            if entry.state in ("queued", "running", "not_rerun") or not is_right or "secret" in str(entry.verdict):
                wrong.append(f"{kind.name} {entry.id}: {entry.state}: {entry.reason[:90]}")
        rows.append({"kind": kind.name, "sent": len(entries), "states": dict(states), "reasons": list(reasons)})
    return rows, wrong


if __name__ == "__main__":
    sys.exit(main())
