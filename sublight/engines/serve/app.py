"""The web's side: paths, the key, streams, clients that go away. Everything else is in the modules it calls."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sublight.engines.serve import protocol
from sublight.engines.serve.failures import Failure
from sublight.engines.serve.protocol import Ask, Kind, Served
from sublight.engines.serve.replies import DONE, Reply, sent
from sublight.engines.serve.worker import Emit, Event, Job, Worker

MOST_BODY_BYTES = 16 << 20
MOST_BODY_S = 60.0
GONE = 499  # nobody reads this status; it is counted
Feed = asyncio.Queue[tuple[int, Event]]


def app_of(served: Served, make_worker: Callable[..., Worker], *, key: str = "") -> FastAPI:
    """`make_worker(deliver=…)` is called when the server starts; `key` is what clients must send, if any."""
    begun = int(time.time())
    state: dict[str, Worker] = {}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(events: list[tuple[Emit, Event]]) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(lambda: [emit(event) for emit, event in events])

        worker = state["worker"] = make_worker(deliver=deliver)
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    model = {"id": served.name, "object": "model", "created": begun, "owned_by": "sublight"}

    app.add_middleware(Gate, key=key, count=lambda path, status: state["worker"].metrics.answered(path, status))

    @app.exception_handler(Failure)
    async def on_failure(_: Request, failure: Failure) -> Response:
        return answer(failure)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        words = f"{request.method} {request.url.path}: {error.detail}; paths are {', '.join(PATHS)}"
        return answer(Failure(error.status_code, words[:500]))

    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return answer(Failure(500, f"the server failed at this request: {type(error).__name__}"))

    @app.get("/health")
    async def health() -> Response:
        failure = state["worker"].failure
        return as_json({"status": failure or "ok"}, 503 if failure else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        worker = state["worker"]
        return PlainTextResponse(worker.metrics.text(worker.gauges), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        return as_json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != served.name:
            words = f"there is no model {name[:200]!r}: this is {served.name}"
            raise Failure(404, words, param="model", code="model_not_found")
        return as_json(model)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await reply(request, "completion")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await reply(request, "chat")

    async def reply(request: Request, kind: Kind) -> Response:
        body = await body_of(request)
        ask = await asyncio.to_thread(ask_of, body, kind, served)  # a long prompt takes a while to take apart
        feed: Feed = asyncio.Queue()
        jobs = jobs_of(ask, feed)
        state["worker"].submit(jobs)
        made = Reply(ask, served.name, served.words)
        if ask.is_stream:
            return Stream(made, jobs, feed, state["worker"])
        return await whole(request, made, jobs, feed, state["worker"])

    return app


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")


class Gate:
    """Around every request: the key is looked at, the answer's status is counted. Streams pass as they are."""

    def __init__(self, app: Any, *, key: str, count: Callable[[str, int], None]) -> None:
        self.app, self.count = app, count
        self.expected = f"Bearer {key}".encode() if key else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = path if path in PATHS else "other"  # a path of a stranger's making is no label
                self.count(known, message["status"])
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if self.expected and path.startswith("/v1/") and not hmac.compare_digest(given, self.expected):
            words = "the API key is missing or wrong: send Authorization: Bearer KEY"
            await answer(Failure(401, words, code="invalid_api_key"))(scope, receive, counted)
        else:
            await self.app(scope, receive, counted)


def answer(failure: Failure) -> Response:
    headers = {"Retry-After": "1"} if failure.status == 429 else {}
    return as_json(failure.body, failure.status, headers)


def as_json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: a text may hold half of a surrogate pair, which UTF-8 cannot encode."""
    return Response(json.dumps(data), status, headers, media_type="application/json")


def ask_of(body: bytes, kind: Kind, served: Served) -> Ask:
    return protocol.read(protocol.parse(body), kind, served)


async def body_of(request: Request) -> bytes:
    parts, size = [], 0
    too_large = Failure(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB: send less")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > MOST_BODY_BYTES:
        raise too_large  # without waiting for what would not be read
    try:
        async with asyncio.timeout(MOST_BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise Failure(408, f"the body was not here within {MOST_BODY_S:g} s: send it at once") from None
    except ClientDisconnect:
        raise Failure(GONE, "the client went away before its request was here") from None
    return b"".join(parts)


def jobs_of(ask: Ask, feed: Feed) -> list[Job]:
    def emit(index: int, event: Event) -> None:
        feed.put_nowait((index, event))

    return [
        Job(
            prompt=ask.prompts[at // ask.n],
            most_new=ask.most_new,
            sampling=sampling,
            emit=partial(emit, at),
            ends=ask.ends,
            stops=ask.stops,
            goes_on=ask.goes_on,
            with_prompt=bool(ask.echoes) and sampling.logprobs is not None,
        )
        for at, sampling in enumerate(ask.samplings)
    ]


class Stream(StreamingResponse):
    """Events as they come. Whatever ends it, even before the first, cancels what is left."""

    def __init__(self, made: Reply, jobs: list[Job], feed: Feed, worker: Worker) -> None:
        stream = pieces(made, len(jobs), feed)
        super().__init__(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._cancel = partial(worker.cancel, jobs)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


async def pieces(made: Reply, left: int, feed: Feed) -> AsyncIterator[str]:
    for piece in made.first():
        yield sent(piece)
    while left:
        index, event = await feed.get()
        if event.failure is not None:
            yield sent(event.failure.body)
            return
        left -= event.is_last
        if (new := made.add(index, event)) is not None:
            yield sent(new)
    for piece in made.last():
        yield sent(piece)
    yield DONE


async def whole(request: Request, made: Reply, jobs: list[Job], feed: Feed, worker: Worker) -> Response:
    """All choices, unless the client goes away before."""

    async def collect() -> None:
        left = len(jobs)
        while left:
            index, event = await feed.get()
            if event.failure is not None:
                raise event.failure
            left -= event.is_last
            made.add(index, event)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(collect()), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return Response(status_code=GONE)
        tasks[0].result()
        return as_json(made.whole())
    finally:
        for task in tasks:
            task.cancel()
        worker.cancel(jobs)
