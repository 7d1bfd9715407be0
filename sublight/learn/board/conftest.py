"""A sandbox that works here, and a PostgreSQL server; or the reason why there is none."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublight.learn.board import jail, processes
from sublight.learn.board.jail import Way


@pytest.fixture(autouse=True)
def no_processes_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others in this process may keep theirs: a grader's crew lasts for the session."""
    every, others = processes._below, set(processes.below(os.getpid()))

    def mine(process: int) -> dict[int, str]:
        return {each: state for each, state in every(process).items() if each not in others}

    monkeypatch.setattr(processes, "_below", mine)


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """In memory, as the server has it; other users may go through it."""
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="sublight-board-test-", dir=room))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def way(home: Path) -> Way:
    found, reason = jail.usable(home)
    if found is None:
        pytest.skip(f"no sandbox can be had here: {reason}")
    return found


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The one that SUBLIGHT_TEST_POSTGRES names, or one that is started for the tests; a URL without a database."""
    psycopg = pytest.importorskip("psycopg", reason="no psycopg here: pip install 'sublight[postgres]'")
    if named := os.environ.get("SUBLIGHT_TEST_POSTGRES"):
        yield named
        return
    folders = [*os.get_exec_path(), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    initdb, postgres = (shutil.which(name, path=os.pathsep.join(folders)) for name in ("initdb", "postgres"))
    if not initdb or not postgres:
        pytest.skip("no PostgreSQL server here: install one, or name one in SUBLIGHT_TEST_POSTGRES")
    folder = tempfile.mkdtemp(prefix="sublight-postgres-")
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if os.geteuid() == 0:  # whom PostgreSQL refuses
        names = {each.pw_name for each in pwd.getpwall()}
        options["user"] = "postgres" if "postgres" in names else "nobody"
        shutil.chown(folder, options["user"])
    data = os.path.join(folder, "data")
    made = [initdb, "-D", data, "-U", "board", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    subprocess.run(made, check=True, **options)
    server = subprocess.Popen([postgres, "-D", data, "-k", folder, "-h", "", "-F"], **options)
    url = f"postgresql://board@/?host={folder}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(url, dbname="postgres").close()
                break
            except psycopg.OperationalError:
                assert server.poll() is None and time.monotonic() < until, "the server does not start"
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """An empty database of a test's own."""
    import psycopg

    name = f"board_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_server, dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield postgres_server.replace("/?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
