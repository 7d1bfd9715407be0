"""The board's server: pages for people, JSON for `sublight learn submit`."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from sublight.errors import BadInput
from sublight.gpus import UnknownGpu
from sublight.gpus import find as find_gpu
from sublight.learn.board import pages
from sublight.learn.board.database import Unreachable
from sublight.learn.board.store import Account, State, Store
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.record import Exercise
from sublight.learn.target import DEFAULT

COOKIE = "sublight_board"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How much one sender may ask for."""

    source_bytes: int = 64 * 1024
    body_bytes: int = 256 * 1024
    body_s: float = 20.0  # until all of it is there
    requests_a_minute: int = 300  # of one address
    attempts_a_minute: int = 10  # of one address: tokens that are none, and new accounts
    entries_an_hour: int = 60  # of one account
    entries_waiting: int = 10  # of one account


@dataclass(slots=True)
class Meter:
    """How often each address came within the last minute."""

    most: int
    window_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, list[float]] = field(default_factory=dict)

    def is_over(self, key: str, *, counts: bool = True) -> bool:
        now = self.clock()
        if len(self._seen) > 10_000:  # addresses that are gone
            self._seen = {name: times for name, times in self._seen.items() if times[-1] > now - self.window_s}
        times = [each for each in self._seen.get(key, []) if each > now - self.window_s]
        if len(times) >= self.most:
            self._seen[key] = times
            return True
        if counts:
            self._seen[key] = [*times, now]
        return False


class Refused(Exception):
    """What the sender did wrong, with its status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def make_app(
    store: Store, *, why_not_run: str = "", is_open: bool = False, allowance: Allowance | None = None
) -> FastAPI:
    """`why_not_run`: why this server runs no code; empty where it does."""
    allowed = allowance or Allowance()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, title="sublight board")
    requests = Meter(allowed.requests_a_minute)
    attempts = Meter(allowed.attempts_a_minute)

    @app.middleware("http")
    async def guard(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        if requests.is_over(_sender(request)):
            response: Response = _trouble(request, 429, "too many requests: wait a minute")
        else:
            response = await proceed(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return _trouble(request, error.status, str(error))

    @app.exception_handler(BadInput)
    async def bad_input(request: Request, error: BadInput) -> Response:
        return _trouble(request, 400, str(error))

    @app.exception_handler(Unreachable)
    async def unreachable(request: Request, error: Unreachable) -> Response:
        return _trouble(request, 503, "the board cannot reach its database: try again in a minute")

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(404)
    async def nowhere(request: Request, error: Exception) -> Response:
        return _trouble(request, 404, "there is no such page")

    def account_of(request: Request, token: str) -> Account | None:
        if not token:
            return None
        if attempts.is_over(_sender(request), counts=False):
            raise Refused(429, "too many tokens that are none: wait a minute")
        account = store.account_of(token[:200])
        if account is None:
            attempts.is_over(_sender(request))
        return account

    def viewer_of(request: Request) -> Account | None:
        """Who is signed in, by cookie; or by token."""
        return account_of(request, request.cookies.get(COOKIE, "") or _bearer(request))

    adding = threading.Lock()

    async def body_of(request: Request) -> bytes:
        """No more than is allowed, whatever its header says; a sender who is slow keeps no connection from others."""
        try:
            return await asyncio.wait_for(read_of(request), allowed.body_s)
        except TimeoutError:
            raise Refused(408, f"it was not there after {allowed.body_s:g} s: nothing was kept") from None
        except ClientDisconnect:
            raise Refused(400, "its sender hung up: nothing was kept") from None

    async def read_of(request: Request) -> bytes:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > allowed.body_bytes:
                raise Refused(413, f"more than {allowed.body_bytes} bytes: nothing was kept")
        return body

    # ------------------------------------------------------------------------------------------------ pages

    @app.get("/style.css")
    def style() -> Response:
        return Response(pages.STYLE, media_type="text/css")

    @app.get("/")
    def index(request: Request) -> HTMLResponse:
        counts = {each.name: store.counts(each.name) for each in EXERCISES if each.goal}
        return HTMLResponse(pages.index(counts, status(), viewer_of(request)))

    @app.get("/exercise/{name}")
    def exercise_page(request: Request, name: str, gpu: str = "") -> HTMLResponse:
        exercise, viewer = _exercise(name), viewer_of(request)
        gpus = store.gpus(name)
        chosen = _gpu(gpu) if gpu else (gpus or [DEFAULT])[0]
        return HTMLResponse(
            pages.exercise_page(
                exercise,
                chosen,
                gpus,
                store.ranking(name, chosen),
                store.unranked(name, chosen),
                viewer=viewer,
                sees_code=viewer is not None and store.has_passed(viewer, name),
            )
        )

    @app.get("/entry/{number}")
    def entry_page(request: Request, number: int) -> HTMLResponse:
        viewer = viewer_of(request)
        entry = store.entry(number) if 0 < number < 2**62 else None
        if entry is None:
            raise Refused(404, "there is no such entry")
        is_own = viewer is not None and viewer.name == entry.account
        sees_code = is_own or (viewer is not None and store.has_passed(viewer, entry.exercise))
        return HTMLResponse(pages.entry_page(entry, viewer=viewer, sees_code=sees_code, sees_verdict=is_own))

    @app.get("/login")
    def login_page() -> HTMLResponse:
        return HTMLResponse(pages.login())

    @app.post("/login")
    async def login(request: Request) -> Response:
        form = urllib.parse.parse_qs((await body_of(request)).decode(errors="replace"))
        token = (form.get("token") or [""])[0].strip()
        if await run_in_threadpool(account_of, request, token) is None:
            return HTMLResponse(pages.login("This token is not known here."), status_code=403)
        response = RedirectResponse("/", status_code=303)
        is_secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_secure, max_age=30 * 86400)
        return response

    @app.post("/logout")
    def logout() -> Response:
        response = RedirectResponse("/", status_code=303)
        response.delete_cookie(COOKIE)
        return response

    # ------------------------------------------------------------------------------------------------ for programs

    @app.get("/api/status")
    def status() -> dict[str, Any]:
        sentence = (
            f"This server runs no code: {why_not_run}. Entries are kept as their senders describe them."
            if why_not_run
            else "Every entry that is ranked was run here, in a sandbox, by the same grader as `sublight learn check`."
        )
        return {"runs_code": not why_not_run, "sentence": sentence, "is_open": is_open, "entries": store.counts()}

    @app.post("/api/accounts")
    async def add_account(request: Request) -> JSONResponse:
        if not is_open:
            raise Refused(403, "accounts are made by whoever runs this board: `sublight board --add NAME`")
        if attempts.is_over(_sender(request)):
            raise Refused(429, "too many new accounts: wait a minute")
        name = _fields(await body_of(request), {"name": str})["name"]
        token = await run_in_threadpool(store.add_account, name)
        return JSONResponse({"name": name, "token": token}, status_code=201)

    @app.post("/api/entries")
    async def add_entry(request: Request) -> JSONResponse:
        account = await run_in_threadpool(account_of, request, _bearer(request))
        if account is None:
            raise Refused(401, "this token is not known here: set SUBLIGHT_BOARD_TOKEN")
        data = _fields(await body_of(request), {"exercise": str, "gpu": str, "source": str, "claim": dict})
        if len(data["source"].encode(errors="replace")) > allowed.source_bytes:
            raise Refused(413, f"the code has more than {allowed.source_bytes} bytes: nothing was kept")
        number, is_new = await run_in_threadpool(_added, account, data)
        entry = await run_in_threadpool(store.entry, number)
        assert entry is not None
        body = {**entry.to_json(), "is_new": is_new, "page": f"/entry/{number}"}
        return JSONResponse(body, status_code=202 if is_new else 200)

    def _added(account: Account, data: dict[str, Any]) -> tuple[int, bool]:
        exercise, gpu, claim = _exercise(data["exercise"]).name, _gpu(data["gpu"]), _claim(data["claim"])
        try:
            data["source"].encode()
        except UnicodeEncodeError:
            raise Refused(400, "the code is no text in UTF-8") from None
        if "\0" in data["source"]:
            raise Refused(400, "the code holds a zero byte, which no Python file may")
        state: State = "not_rerun" if why_not_run else "queued"
        with adding:  # else several at a time would each find room for one more
            made, waiting = store.recent(account, 3600)
            if made >= allowed.entries_an_hour:
                raise Refused(429, f"{allowed.entries_an_hour} entries an hour are the most: come back later")
            if waiting >= allowed.entries_waiting:
                raise Refused(429, f"{waiting} of your entries wait: send more when they are graded")
            return store.add_entry(account, exercise, gpu, data["source"], claim, state=state, reason=why_not_run)

    @app.get("/api/entries/{number}")
    def entry(request: Request, number: int) -> dict[str, Any]:
        """What everybody may know; its sender also the verdict."""
        viewer = viewer_of(request)
        found = store.entry(number) if 0 < number < 2**62 else None
        if found is None:
            raise Refused(404, "there is no such entry")
        if viewer is not None and viewer.name == found.account:
            return {**found.to_json(), "verdict": found.verdict}
        return {**found.to_json(), "reason": ""}

    @app.get("/api/exercises/{name}")
    def ranking(name: str, gpu: str = DEFAULT) -> dict[str, Any]:
        exercise, chosen = _exercise(name).name, _gpu(gpu)
        ranked = [{**each.to_json(), "reason": ""} for each in store.ranking(exercise, chosen)]
        others = [each.to_json() for each in store.unranked(exercise, chosen)]
        return {"exercise": exercise, "gpu": chosen, "ranking": ranked, "not_rerun": others}

    return app


def _sender(request: Request) -> str:
    return request.client.host if request.client else ""


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _trouble(request: Request, status: int, words: str) -> Response:
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": words}, status_code=status)
    return HTMLResponse(pages.problem(words), status_code=status)


def _exercise(name: str) -> Exercise:
    try:
        found = find(name)
    except BadInput as error:
        raise Refused(404, str(error)) from None
    if found.goal is None:
        raise Refused(404, f"{name} is right or wrong, and has no ranking")
    if found.kind == "cuda":
        raise Refused(404, f"{name} is CUDA C++, which this board does not take: send {found.function} in Triton")
    return found


def _gpu(name: str) -> str:
    try:
        return find_gpu(name[:80]).key
    except (UnknownGpu, BadInput) as error:
        raise Refused(400, str(error)) from None


def _fields(body: bytes, wanted: dict[str, type]) -> dict[str, Any]:
    try:
        data = json.loads(body)
        if not isinstance(data, dict) or any(not isinstance(data.get(name), kind) for name, kind in wanted.items()):
            raise ValueError
    except (ValueError, RecursionError):
        kinds = ", ".join(f"{name} ({kind.__name__})" for name, kind in wanted.items())
        raise Refused(400, f"send JSON with {kinds}") from None
    return data


def _claim(data: dict[str, Any]) -> dict[str, Any]:
    """What a sender says of machine and result, no more of it than is shown."""
    fraction, versions = data.get("fraction"), data.get("versions")
    is_number = isinstance(fraction, float | int) and not isinstance(fraction, bool) and 0 < fraction <= 1.02
    kept = versions if isinstance(versions, dict) else {}
    return {
        "fraction": float(fraction) if is_number and fraction is not None else None,
        "machine": _short(data.get("machine")),
        "versions": {_short(name, 40): _short(value, 40) for name, value in list(kept.items())[:8]},
        "timed": _timed(data.get("timed")),
    }


def _timed(data: Any) -> dict[str, float] | None:
    """A GPU's time by the sender's own grader, if it can be one."""
    values: list[Any] = [data.get(name) for name in ("seconds", "fraction")] if isinstance(data, dict) else []
    if not values or not all(isinstance(each, float) and 0 < each <= 1.02 for each in values):
        return None
    return dict(zip(("seconds", "fraction"), values, strict=True))


def _short(words: Any, most: int = 100) -> str:
    """A text as one line, without characters that cannot be encoded."""
    return " ".join(str(words or "").encode(errors="replace").decode().split())[:most]
