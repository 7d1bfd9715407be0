"""The board over HTTP: accounts, limits, who sees what, and that nothing a person writes becomes HTML."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from sublight.errors import BadInput
from sublight.learn.board import pages
from sublight.learn.board.app import COOKIE, Allowance, Meter, make_app
from sublight.learn.board.store import Account, Store
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.progress_test import verdict
from sublight.learn.submit import TOKEN, URL, Board, board_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAPER = next(each.name for each in EXERCISES if each.goal is None)
ATTACK = "</code></pre><script>document.title='attacked'</script><img src=x onerror=\"document.title='attacked'\">"
CLAIM = {"fraction": 0.93, "machine": f"my {ATTACK}", "versions": {"torch": ATTACK[:40], ATTACK[:20]: "1"}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "board.sqlite")


@pytest.fixture
def tokens(store: Store) -> dict[str, str]:
    return {name: store.add_account(name) for name in ("ann", "bob", "eve")}


@pytest.fixture
def client(store: Store) -> TestClient:
    return TestClient(make_app(store), follow_redirects=False)


def sent(client: TestClient, token: str, source: str = "code", **changes: Any) -> Any:
    entry = {"exercise": "copy", "gpu": "h200", "source": source, "claim": CLAIM, **changes}
    return client.post("/api/entries", json=entry, headers={"Authorization": f"Bearer {token}"})


def passed(store: Store, number: int, fraction: float = 0.95) -> None:
    kernel = {"name": ATTACK, "registers": 32, "occupancy": 1.0, "sentence": ATTACK}
    store.finish(number, "verified", fraction=fraction, reason="", verdict={"kernels": [kernel]})


def test_a_database_that_is_away_is_no_fault_of_the_visitor_and_keeps_its_name(
    client: TestClient, tokens: dict[str, str], store: Store, tmp_path: Path
) -> None:
    (tmp_path / "board.sqlite").unlink()
    (tmp_path / "board.sqlite").mkdir()
    for reply in (client.get("/exercise/copy"), client.get("/api/status"), sent(client, tokens["ann"])):
        assert reply.status_code == 503 and "try again" in reply.text and "board.sqlite" not in reply.text


def test_an_entry_waits_and_is_the_same_when_it_comes_again(client: TestClient, tokens: dict[str, str]) -> None:
    first = sent(client, tokens["ann"])
    assert first.status_code == 202 and first.json()["state"] == "queued" and first.json()["is_new"]
    again = sent(client, tokens["ann"])
    assert again.status_code == 200 and again.json()["id"] == first.json()["id"]
    assert first.json()["claim"]["fraction"] == 0.93 and len(first.json()["claim"]["machine"]) <= 100
    assert client.get("/api/status").json()["entries"] == {"queued": 1}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"exercise": "../etc"}, 404, "unknown exercise"),
        ({"exercise": PAPER}, 404, "has no ranking"),
        ({"gpu": "voodoo"}, 400, "unknown GPU"),
        ({"source": 3}, 400, "send JSON"),
        ({"source": "x" * 65537}, 413, "65536 bytes"),
        ({"source": "\ud800"}, 400, "UTF-8"),
        ({"claim": []}, 400, "send JSON"),
    ],
)
def test_bad_entries(client: TestClient, tokens: dict[str, str], changes: Any, status: int, words: str) -> None:
    entry = {"exercise": "copy", "gpu": "h200", "source": "code", "claim": {}, **changes}
    found = client.post("/api/entries", content=json.dumps(entry), headers={"Authorization": f"Bearer {tokens['ann']}"})
    assert found.status_code == status and words in found.json()["error"]
    assert client.get("/api/status").json()["entries"] == {}


def test_limits(store: Store, tokens: dict[str, str]) -> None:
    few = Allowance(body_bytes=2000, entries_an_hour=2, entries_waiting=1, attempts_a_minute=2, requests_a_minute=12)
    client = TestClient(make_app(store, allowance=few))
    assert sent(client, tokens["ann"], "x" * 3000).status_code == 413
    assert sent(client, tokens["ann"], "1").status_code == 202
    assert "wait" in sent(client, tokens["ann"], "2").json()["error"]
    passed(store, 1)
    assert sent(client, tokens["ann"], "2").status_code == 202
    passed(store, 2)
    assert "an hour" in sent(client, tokens["ann"], "3").json()["error"]
    assert sent(client, tokens["bob"], "3").status_code == 202  # each has limits of their own
    for _ in range(2):
        assert sent(client, "no token").status_code == 401
    assert sent(client, "no token").status_code == 429
    assert client.post("/api/accounts", json={"name": "dan"}).status_code == 403
    assert client.get("/").status_code == 200
    found = [client.get("/").status_code for _ in range(3)]
    assert found[-1] == 429


def test_several_at_once_are_no_more_than_are_allowed(
    store: Store, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recent = Store.recent

    def slowly(self: Store, account: Account, seconds: float) -> tuple[int, int]:
        counts = recent(self, account, seconds)
        time.sleep(0.02)  # time enough for another to look
        return counts

    monkeypatch.setattr(Store, "recent", slowly)
    client = TestClient(make_app(store, allowance=Allowance(entries_waiting=3)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: sent(client, tokens["ann"], str(number)).status_code, range(16)))
    assert sorted(found) == [202] * 3 + [429] * 13


def test_a_body_that_never_comes_is_not_waited_for(store: Store, tokens: dict[str, str]) -> None:
    async def ask(pieces: list[dict[str, Any]]) -> int:
        """The status of an entry whose body comes so; after the last piece nothing comes."""
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return pieces.pop(0) if pieces else await asyncio.sleep(60, {})

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"authorization", b"Bearer " + tokens["ann"].encode())]
        scope = {"type": "http", "method": "POST", "path": "/api/entries", "headers": headers, "query_string": b"",
                 "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http"}  # fmt: skip
        await make_app(store, allowance=Allowance(body_s=0.1))(scope, receive, send)
        return statuses[0]

    begun = {"type": "http.request", "body": b"{", "more_body": True}
    assert asyncio.run(ask([dict(begun)])) == 408
    assert asyncio.run(ask([dict(begun), {"type": "http.disconnect"}])) == 400


def test_a_meter_forgets() -> None:
    now = 0.0
    meter = Meter(2, clock=lambda: now)
    assert [meter.is_over("a") for _ in range(3)] == [False, False, True] and not meter.is_over("b")
    now = 61.0
    assert not meter.is_over("a")


def test_an_open_board_gives_accounts(store: Store) -> None:
    client = TestClient(make_app(store, is_open=True))
    made = client.post("/api/accounts", json={"name": "dan"})
    assert made.status_code == 201 and store.account_of(made.json()["token"])
    assert client.post("/api/accounts", json={"name": "dan"}).status_code == 400
    assert client.post("/api/accounts", json={"name": "<b>"}).status_code == 400


def test_a_server_that_runs_nothing_says_so(store: Store, tokens: dict[str, str]) -> None:
    client = TestClient(make_app(store, why_not_run="no sandbox can be had here (none)"))
    assert sent(client, tokens["ann"]).json()["state"] == "not_rerun"
    assert "runs no code: no sandbox" in client.get("/").text
    shown = client.get("/exercise/copy").text
    assert "Not run by this server" in shown and "93 %" in shown and "Nobody has passed yet" in shown


def test_code_is_shown_to_those_who_have_passed(client: TestClient, store: Store, tokens: dict[str, str]) -> None:
    mine, others = (sent(client, tokens[name], f"code of {name}").json()["id"] for name in ("ann", "bob"))
    passed(store, others)
    page = f"/entry/{others}"
    assert "code of bob" not in client.get(page).text  # nobody is signed in
    assert client.post("/login", data={"token": "wrong"}).status_code == 403
    arrived = client.post("/login", data={"token": tokens["ann"]})
    cookie = arrived.headers["set-cookie"]
    assert arrived.status_code == 303 and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert "code of bob" not in client.get(page).text and "code of ann" in client.get(f"/entry/{mine}").text
    passed(store, mine)
    assert "code of bob" in client.get(page).text and ">you<" in client.get("/exercise/copy").text
    assert "reason" in client.get(f"/api/entries/{others}").json()
    assert "verdict" not in client.get(f"/api/entries/{others}").json()
    assert "verdict" in client.get(f"/api/entries/{mine}").json()
    client.post("/logout")
    assert "code of bob" not in client.get(page).text and COOKIE not in client.cookies


def test_the_same_code_sent_later_is_marked(client: TestClient, store: Store, tokens: dict[str, str]) -> None:
    for name, fraction in (("bob", 0.95), ("ann", 0.95)):
        passed(store, sent(client, tokens[name], "code").json()["id"], fraction)
    assert client.get("/exercise/copy").text.count("the same code as bob, later") == 1
    ranked = client.get("/api/exercises/copy").json()["ranking"]
    assert [each["account"] for each in ranked] == ["bob", "ann"] and "source" not in ranked[0]


@pytest.mark.parametrize(
    "path", ["/", "/exercise/copy", "/entry/1", "/login", "/nowhere", "/entry/x", f"/exercise/{PAPER}"]
)
def test_pages_allow_no_script(client: TestClient, store: Store, tokens: dict[str, str], path: str) -> None:
    passed(store, sent(client, tokens["ann"], ATTACK).json()["id"])
    client.cookies.set(COOKIE, tokens["ann"])
    found = client.get(path)
    assert "<script" not in found.text and "<img" not in found.text and "Traceback" not in found.text
    assert found.headers["content-security-policy"].startswith("default-src 'none'")
    assert found.headers["x-content-type-options"] == "nosniff"


def test_every_word_of_a_page_is_text() -> None:
    assert pages.text(ATTACK).count("<") == 0 and pages.text("'\"") == "&#x27;&quot;"
    assert "<script" not in pages.problem(ATTACK)


@pytest.fixture
def served(store: Store) -> Iterator[str]:
    """A real server in a thread."""
    uvicorn = pytest.importorskip("uvicorn")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(store), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in (Debian: chromium)")
def test_in_a_browser(served: str, store: Store, tokens: dict[str, str], tmp_path: Path) -> None:
    """What somebody sent is there to be read, and did not run."""
    ann = store.account_of(tokens["ann"])
    assert ann is not None
    number, _ = store.add_entry(ann, "copy", "h200", ATTACK, CLAIM, state="queued", reason="")
    passed(store, number)
    done = subprocess.run(
        [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=2000", "--dump-dom", f"{served}/exercise/copy"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "<title>copy</title>" in done.stdout and "95 %" in done.stdout and "<rect" in done.stdout
    assert "my &lt;/code&gt;&lt;/pre&gt;&lt;script&gt;" in done.stdout and "<script" not in done.stdout


def test_submit(served: str, store: Store, tokens: dict[str, str]) -> None:
    board = board_of({URL: served, TOKEN: tokens["ann"]})
    entry = board.send(verdict("copy", passed=True), find("copy").solution())
    assert entry["state"] == "queued" and entry["claim"]["versions"]["sublight"]

    def graded(seconds: float) -> None:
        passed(store, entry["id"])

    assert board.outcome(entry["id"], sleep=graded)["fraction"] == 0.95
    with pytest.raises(BadInput, match="401: this token is not known"):
        Board(url=served, token="none").send(verdict("copy", passed=True), "code")
    with pytest.raises(BadInput, match="cannot be reached"):
        Board(url="http://127.0.0.1:9", token="none").send(verdict("copy", passed=True), "code")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "to which board"),
        ({URL: "https://board.example.org"}, TOKEN),
        ({URL: "http://board.example.org", TOKEN: "t"}, "unencrypted"),
        ({URL: "board", TOKEN: "t"}, "write an address"),
        ({URL: "http://localhost:port", TOKEN: "t"}, "write an address"),
    ],
)
def test_bad_boards(environment: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        board_of(environment)
