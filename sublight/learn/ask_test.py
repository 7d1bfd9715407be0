"""Questions: what is in the prompt, and a small server that answers in good ways and bad ones."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublight.cli import main as cli
from sublight.errors import BadInput
from sublight.learn import ask
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.progress_test import verdict
from sublight.learn.texts import text_of
from sublight.learn.verdict import Fault, KernelFigures, Verdict

CODE = "import triton\n\ndef copy(x, out):\n    pass  # ```\n"
KERNEL = KernelFigures(
    name="copy_kernel",
    registers=40,
    spill_bytes=8,
    occupancy=0.5,
    limited_by="registers",
    sectors=64,
    ideal_sectors=32,
    programs=7,
    seconds=1e-3,
    sentence="half of each sector is unused",
)
Reply = tuple[int, str, list[bytes]]  # status, content type, what is written, one piece after the other


def failed() -> Verdict:
    fault = Fault(kind="values", line=4, text="out[7] is 0, expected 1", case="numel = 9, float32")
    return replace(verdict("copy", passed=False), faults=(fault,), source=CODE, kernels=(KERNEL,), gpu="h200",
                   printed="n is 9", goal_fraction=0.9, goal_case="2**28 float32")  # fmt: skip


def event(words: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': words}}]})}\n\n".encode()


GOOD = (200, "text/event-stream", [b": a comment\n\n", event("Look at "), event("line 4\x1b[2J."), b"data: [DONE]\n\n"])


@contextlib.contextmanager
def served(*replies: Reply, places: dict[str, str] | None = None) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives these replies, one a request; its address, and the requests it got."""
    got: list[Any] = []
    left = list(replies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.path, self.headers.get("Authorization"), body))
            status, kind, pieces = left.pop(0)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            for name, value in (places or {}).items():
                self.send_header(name, value)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)

        def log_message(self, *words: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_prompt_holds_everything_but_the_solution() -> None:
    exercise = find("copy")
    prompt = ask.prompt_of(exercise, text_of(exercise, "en"), CODE, failed(), question="why a mask?", note="")
    for words in ("why a mask?", text_of(exercise, "en").sections["task"], "````python", CODE.rstrip(), "n is 9",
                  "line 4, `pass  # ```", "out[7] is 0, expected 1 (at numel = 9", "40 registers; 8 B spilled",
                  "64 sectors of 32 B, ideally 32", "half of each sector is unused", "copy(x, out)"):  # fmt: skip
        assert words in prompt, words
    solution = [line for line in exercise.solution().splitlines() if "tl.store" in line]
    assert solution and not any(line.strip() in prompt for line in solution)
    paper = next(each for each in EXERCISES if each.kind == "paper")
    assert "no kernel runs" in ask.prompt_of(paper, text_of(paper, "en"), CODE, None, question="", note="")
    assert "中文" in ask.prompt_of(exercise, text_of(exercise, "zh"), CODE, None, question="", note="no Linux")


def test_an_answer_comes_piece_by_piece_as_plain_text() -> None:
    with served(GOOD) as (url, got):
        address = ask.address_of({ask.URL: url, ask.KEY: "secret", ask.MODEL: "m"})
        assert address is not None
        assert list(ask.answer_of(address, "Why?")) == ["Look at ", "line 4[2J."]
    [(path, key, body)] = got
    assert path == "/v1/chat/completions" and key == "Bearer secret" and body["model"] == "m" and body["stream"]
    assert body["messages"] == [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("reply", "places", "complaint"),
    [
        ((401, "application/json", [b'{"error": {"message": "a \\u001b[31mkey"}}']), {}, r"answered 401: a \[31mkey"),
        ((302, "text/html", []), {"Location": "http://127.0.0.1:9/elsewhere"}, "answered 302"),
        ((200, "text/event-stream", [b"data: {}\n\n"]), {}, "not what OpenAI's protocol has"),
        ((200, "text/event-stream", [b'data: {"error": "busy"}\n\n']), {}, "busy"),
        ((200, "text/event-stream", [b"data: [DONE]\n\n"]), {}, "answered nothing"),
        ((200, "text/event-stream", [event("word " * 50_000)]), {}, "does not stop"),
    ],
)  # fmt: skip
def test_bad_answers_are_one_line(reply: Reply, places: dict[str, str], complaint: str) -> None:
    with served(reply, places=places) as (url, got), pytest.raises(BadInput, match=complaint):
        list(ask.answer_of(ask.Address(url=url, model="m", key="k"), "Why?"))
    assert len(got) == 1


def test_an_answer_that_does_not_stream() -> None:
    whole = json.dumps({"choices": [{"message": {"content": "All."}}]}).encode()
    with served((200, "application/json", [whole])) as (url, _):
        assert list(ask.answer_of(ask.Address(url=url, model="m"), "Why?")) == ["All."]


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({ask.URL: "file:///etc/passwd", ask.MODEL: "m"}, "write an address"),
        ({ask.URL: "http://example.org", ask.KEY: "k", ask.MODEL: "m"}, "unencrypted"),
        ({ask.URL: "https://example.org"}, ask.MODEL),
    ],
)
def test_bad_addresses(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        ask.address_of(environment)
    assert ask.address_of({}) is None


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`sublight learn` of someone whose learn/copy.py is checked by a stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    for name in (ask.URL, ask.KEY, ask.MODEL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sublight.cli.learn._checked", lambda *args: failed())
    monkeypatch.setattr("sublight.learn.grade.crew.Crew", lambda: contextlib.nullcontext())
    (tmp_path / "learn").mkdir()
    (tmp_path / "learn" / "copy.py").write_text(CODE)

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(["learn", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def test_on_the_command_line(learner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, out, err = learner("ask", "copy", "--gpu", "h200", "--question", "[b]why[/b]?")
    assert status == 0 and "My question: [b]why[/b]?" in out and ask.URL in err
    assert max(map(len, out.splitlines())) > 200  # lines are not broken: this goes to a clipboard
    assert learner("ask", "copy", "--out", "prompt.md")[0] == 0
    assert "out[7] is 0" in (tmp_path / "prompt.md").read_text()
    with served(GOOD, GOOD) as (url, got):
        monkeypatch.setenv(ask.URL, url)
        monkeypatch.setenv(ask.MODEL, "m")
        status, out, err = learner("ask", "copy")
        assert status == 0 and out == "Look at line 4[2J.\n" and "m at http://127.0.0.1" in err
        status, out, _ = learner("ask", "copy", "--json", "-")
        assert (
            json.loads(out)["answer"] == "Look at line 4[2J." and "out[7] is 0" in got[1][2]["messages"][0]["content"]
        )
    status, _, err = learner("ask", "copy")
    assert status == 2 and "cannot be reached" in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("ask", "sofmax"), "did you mean softmax"),
        (("ask", "add"), "there is no learn/add.py"),
        (("hint", "copy", "--out", "x"), "go with `sublight learn ask"),
        (("ask", "copy", "--out", "learn/copy.py"), "named twice"),
        (("ask", "copy", "--out", "learn"), "cannot write"),
    ],
)
def test_bad_words(learner: Callable[..., Any], words: tuple[str, ...], complaint: str) -> None:
    status, _, err = learner(*words)
    assert status == 2 and complaint in err and len(err.splitlines()) == 1
