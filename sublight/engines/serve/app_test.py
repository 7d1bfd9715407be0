"""The server as a client meets it: a real socket, streams, clients that go away."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
from starlette.requests import ClientDisconnect

from sublight.engines.generate.engine import Engine, Request
from sublight.engines.serve.app import app_of
from sublight.engines.serve.chat import Template
from sublight.engines.serve.fakes import CONFIG, VOCAB, Letters, tiny_engine, tiny_model
from sublight.engines.serve.protocol import Served
from sublight.engines.serve.worker import Worker

KEY, PAGES = "secret", 40
TEMPLATE = Template("{% for m in messages %}{{ m.content }}{% endfor %}", {})
SERVED = Served(
    name="tiny", words=Letters(), vocab=VOCAB, longest=CONFIG.longest, ends=frozenset(), template=TEMPLATE
)  # fmt: skip


class Site:
    """A server on a port of its own, and its engine."""

    def __init__(self) -> None:
        self.model = tiny_model()
        self.engine: Engine = tiny_engine(self.model, pages=PAGES, most_texts=4)
        self.slow = threading.Event()  # while it is set, a step takes a while: texts are under way when tests look
        step = self.engine.step

        def slowed() -> Any:
            if self.slow.is_set():
                time.sleep(0.02)
            return step()

        self.engine.step = slowed  # type: ignore[method-assign]
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        app = app_of(SERVED, lambda **how: Worker(self.engine, SERVED.words, most_waiting=2, **how), key=KEY)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        )
        until(lambda: self.server.started)

    def post(self, path: str, **data: Any) -> Any:
        return self.client.post(f"/v1/{path}", json=data)

    def greedy(self, prompt: str, new: int) -> str:
        request = Request(Letters().encode(prompt), new)
        list(tiny_engine(self.model).run([request]))
        return Letters().decode(request.new)

    @property
    def cancelled(self) -> int:
        found = re.search(r"^sublight_cancelled_total (\d+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert found
        return int(found[1])

    @property
    def is_quiet(self) -> bool:
        return self.engine.scheduler.is_idle and self.engine.scheduler.pages.free == PAGES


def until(is_so: Callable[[], bool], most_s: float = 60.0) -> None:
    end = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.client.close()
    made.server.should_exit = True
    made.thread.join(30)
    assert not made.thread.is_alive()


def lines_of(text: str) -> list[Any]:
    """What a stream sent: objects, then [DONE]."""
    sent = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [each if each == "[DONE]" else json.loads(each) for each in sent]


def test_completions_whole_and_streamed(site: Site) -> None:
    expected = site.greedy("hello", 9)
    whole = site.post("completions", prompt="hello", max_tokens=9, temperature=0).json()
    assert whole["choices"] == [{"index": 0, "finish_reason": "length", "logprobs": None, "text": expected}]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    fields = {"prompt": "hello", "max_tokens": 9, "temperature": 0, "stream": True}
    *pieces, last, done = lines_of(site.post("completions", **fields, stream_options={"include_usage": True}).text)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-2:] == [None, "length"]
    assert done == "[DONE]" and last["usage"] == whole["usage"] and last["choices"] == []
    stop = expected[4]
    stopped = site.post("completions", prompt="hello", max_tokens=9, temperature=0, stop=stop).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (expected.split(stop)[0], "stop")
    echo = site.post("completions", prompt=["hello", "b"], max_tokens=2, n=2, echo=True, temperature=0).json()
    assert [each["text"] for each in echo["choices"]] == [f"hello{expected[:2]}"] * 2 + [f"b{site.greedy('b', 2)}"] * 2


def test_chat_whole_and_streamed(site: Site) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 3, "n": 2}
    whole = site.post("chat/completions", **fields, logprobs=True, top_logprobs=2).json()
    texts = [each["message"]["content"] for each in whole["choices"]]
    assert whole["object"] == "chat.completion" and all(len(text) == 5 for text in texts) and texts[0] != texts[1]
    rows = whole["choices"][0]["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == texts[0] and all(row["logprob"] <= 0 for row in rows)
    assert all(len(row["top_logprobs"]) == 2 for row in rows)
    *pieces, done = lines_of(site.post("chat/completions", **fields, stream=True).text)
    again = ["", ""]
    for piece in pieces:
        again[piece["choices"][0]["index"]] += piece["choices"][0]["delta"].get("content", "")
    assert again == texts and done == "[DONE]"
    assert [piece["choices"][0]["delta"]["role"] for piece in pieces[:2]] == ["assistant"] * 2


def test_errors_are_openais_and_serving_goes_on(site: Site) -> None:
    broken = site.client.post("/v1/completions", content=b'{"prompt": ')
    assert broken.status_code == 400 and "no JSON" in broken.json()["error"]["message"]
    long = site.post("completions", prompt="a" * 96)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert site.post("completions", prompt="a", typo=1).json()["error"]["param"] == "typo"
    assert site.post("completions", prompt="a", model="other").status_code == 404
    assert site.client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert site.client.get("/v1/completions").status_code == 405
    wrong = httpx.post(f"{site.client.base_url}/v1/completions", json={"prompt": "a"}, headers={"Authorization": "x"})
    assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{site.client.base_url}/health").json() == {"status": "ok"}
    assert site.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert site.client.get("/v1/models/other").status_code == 404
    text = httpx.get(f"{site.client.base_url}/metrics").text
    assert 'sublight_answers_total{path="/v1/completions",status="400"}' in text
    assert 'path="other",status="404"' in text and "nothing" not in text  # a stranger's paths are no labels
    assert f"sublight_pages_free {PAGES}" in text and "sublight_first_token_seconds_count" in text
    assert site.post("completions", prompt="a", max_tokens=2).status_code == 200


def test_a_full_queue_is_said(site: Site) -> None:
    site.slow.set()
    try:
        body = {"prompt": ["a"] * 5, "max_tokens": 50, "stream": True}  # 4 run, 2 may wait
        with site.client.stream("POST", "/v1/completions", json=body):
            refused = site.post("completions", prompt=["a"] * 2, max_tokens=50)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        never = site.post("completions", prompt=["a"] * 7, max_tokens=50)
        assert never.status_code == 400 and "retry-after" not in never.headers
    finally:
        site.slow.clear()
    assert site.is_quiet


def test_half_a_request_is_no_error_of_ours(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", site.port)) as client:
        client.sendall(half)
    until(lambda: 'status="499"' in site.client.get("/metrics").text)
    monkeypatch.setattr("sublight.engines.serve.app.MOST_BODY_S", 0.05)
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
        client.sendall(half)
        assert b" 408 " in client.recv(100)


def test_too_large_a_body_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublight.engines.serve.app.MOST_BODY_BYTES", 1 << 20)
    refused = site.post("completions", prompt="a" * (1 << 20))
    assert refused.status_code == 413 and "more than 1 MiB" in refused.json()["error"]["message"]
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:  # announced, and never sent
        announced = b"Authorization: Bearer secret\r\nContent-Length: 2000000\r\n\r\n{"
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + announced)
        assert b" 413 " in client.recv(100)
    pieces = (b"a" * (1 << 18) for _ in range(5))  # and without an announcement
    assert site.client.post("/v1/completions", content=pieces).status_code == 413


@pytest.mark.parametrize("is_stream", (True, False))
def test_a_client_that_goes_away_frees_its_pages(site: Site, is_stream: bool) -> None:
    before = site.cancelled
    site.slow.set()
    data = json.dumps({"prompt": "hello", "max_tokens": 80, "stream": is_stream}).encode()
    fields = (f"Authorization: Bearer {KEY}", "Host: x", f"Content-Length: {len(data)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    try:
        with socket.create_connection(("127.0.0.1", site.port)) as client:
            client.sendall(head.encode() + data)
            until(lambda: not site.engine.scheduler.is_idle)
            if is_stream:
                assert client.recv(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # as a killed process ends
        until(lambda: site.is_quiet, 30)
    finally:
        site.slow.clear()
    assert site.cancelled == before + 1  # it did not just come to its end


def test_a_stream_that_ends_before_its_first_piece_frees_its_pages() -> None:
    """A server that tells of a client that has gone by an error, as ASGI 2.4 has it: the stream is never begun."""
    engine, workers = tiny_engine(pages=PAGES), []
    app = app_of(SERVED, lambda **how: workers.append(Worker(engine, SERVED.words, **how)) or workers[0])
    body = json.dumps({"prompt": "hello", "max_tokens": 80, "stream": True}).encode()
    asgi = {"version": "3.0", "spec_version": "2.4"}
    scope = {
        "type": "http",
        "asgi": asgi,
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_: Any) -> None:
        raise OSError("gone")

    async def ask() -> None:
        async with app.router.lifespan_context(app):
            with pytest.raises(ClientDisconnect):
                await app(scope, receive, send)
            # idle is the scheduler before the job reaches it, too: the count says that it has been there
            await asyncio.to_thread(until, lambda: workers[0].metrics._counts["cancelled"] == 1)
            await asyncio.to_thread(until, lambda: engine.scheduler.is_idle)

    asyncio.run(ask())
    assert workers[0].metrics._counts["cancelled"] == 1 and engine.scheduler.pages.free == PAGES


def test_offsets_of_a_stream_are_those_of_the_whole(site: Site) -> None:
    """Also while the beginning of a stop word is held back."""
    text = site.greedy("hello", 6)
    fields: dict[str, Any] = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    fields["stop"] = f"{text[1:3]}\n"
    whole = site.post("completions", **fields).json()["choices"][0]["logprobs"]["text_offset"]
    *pieces, _ = lines_of(site.post("completions", **fields, stream=True).text)
    offsets = [at for piece in pieces for at in piece["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == whole == list(range(6))


def test_a_prompt_that_is_repeated_has_its_logprobs(site: Site) -> None:
    """As lm-eval asks for them: those of the prompt's second part say how likely it is behind the first."""
    fields: dict[str, Any] = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "logprobs": 1}
    plain = site.post("completions", **fields).json()["choices"][0]
    for prompt in ("hello", [Letters().encode("hello")] * 2):
        answer = site.post("completions", **{**fields, "prompt": prompt}, echo=True).json()
        for choice in answer["choices"]:
            found = choice["logprobs"]
            assert choice["text"] == "hello" + plain["text"] == "".join(found["tokens"])
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert found["text_offset"] == list(range(7)) and len(found["top_logprobs"]) == 7
            assert found["token_logprobs"][5:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    for place in range(1, 5):  # each is what the model would draw behind what stands before it
        before = {**fields, "prompt": "hello"[:place], "logit_bias": {str(Letters().encode("hello")[place]): 100}}
        drawn = site.post("completions", **before).json()["choices"][0]["logprobs"]
        assert found["token_logprobs"][place] == pytest.approx(drawn["token_logprobs"][0], abs=1e-4)
    alone = site.post("completions", **{**fields, "max_tokens": 0}, echo=True).json()
    assert alone["choices"][0]["text"] == "hello" and alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(found["token_logprobs"][:5], abs=1e-4)
    one = site.post("completions", **{**fields, "prompt": "h"}, echo=True).json()["choices"][0]["logprobs"]
    assert one["token_logprobs"][0] is None and len(one["tokens"]) == 3 == len(one["text_offset"])


def test_openais_own_client(site: Site) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{site.client.base_url}/v1", api_key=KEY, max_retries=0)
    expected = site.greedy("hello", 6)
    assert (
        client.completions.create(model="tiny", prompt="hello", max_tokens=6, temperature=0).choices[0].text == expected
    )
    messages = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == expected
    with pytest.raises(openai.BadRequestError, match="context is 96"):
        client.completions.create(model="tiny", prompt="a" * 200)
    assert [model.id for model in client.models.list()] == ["tiny"]
    client.close()
