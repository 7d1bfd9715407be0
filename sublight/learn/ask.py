"""A question to the learner's own assistant: exercise, code, what the check has shown and what its kernels compile to.

The prompt is plain Markdown, for a clipboard or a file; or it goes to an address that speaks OpenAI's protocol, which
the environment names, and the answer comes back word by word. The solution is never in it.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sublight import units
from sublight.errors import BadInput
from sublight.learn.address import checked, opener, plain
from sublight.learn.record import Exercise
from sublight.learn.texts import LANGUAGES, Text
from sublight.learn.verdict import Verdict

URL, KEY, MODEL = "SUBLIGHT_ASK_URL", "SUBLIGHT_ASK_KEY", "SUBLIGHT_ASK_MODEL"
SILENCE_S = 120.0  # between two words of an answer
LINE_BYTES, ANSWER_CHARACTERS = 1 << 20, 200_000
PRINTED_CHARACTERS = 2000
_ROLE = (
    "I am learning to write GPU kernels in Triton with the exercises of `sublight learn`. Below are the exercise, my "
    "code and what the check says of it. Help me to the next step: say what is wrong and why, at which line, and what "
    "to look at; let me write it myself, and do not write the whole solution for me. "
)
_RULES = {
    "kernel": "Only `torch` for buffers, `triton` and `math` may be used, and the function writes into the tensors "
    "that it is given.",
    "paper": "This one is arithmetic in plain Python: the function returns its results, and no kernel runs.",
}


def prompt_of(exercise: Exercise, text: Text, source: str, verdict: Verdict | None, *, question: str, note: str) -> str:
    """The prompt as Markdown; `note` says why there is no verdict, where there is none."""
    role = _ROLE + _RULES[exercise.kind]
    parts = [role if text.language == "en" else f"{role} Please answer in {LANGUAGES[text.language]}."]
    if question:
        parts.append(f"My question: {question}")
    parts += [_lowered(text.page), "## My code", _fenced(source, "python")]
    parts += ["## What the check says", "\n".join(_outcome(verdict)) if verdict else note]
    if verdict and verdict.kernels:
        parts += [f"## What my kernels compile to on the {verdict.gpu} (`xray`)", "\n".join(_figures(verdict))]
    if verdict and verdict.printed.strip():
        parts += ["## What my code printed", _fenced(verdict.printed[-PRINTED_CHARACTERS:], "text")]
    return "\n\n".join([*parts, f"The function that is graded: `{exercise.signature}`."]) + "\n"


def _lowered(page: str) -> str:
    """The exercise's page, its headings one level lower than this prompt's own title would be."""
    lines = page.splitlines()
    return "\n".join([f"## The exercise: {lines[0].removeprefix('# ')}", *(line.replace("## ", "### ", 1)
                     if line.startswith("## ") else line for line in lines[1:])])  # fmt: skip


def _fenced(words: str, language: str) -> str:
    """A block that no line of its own closes."""
    fence = "```"
    while fence in words:
        fence += "`"
    return f"{fence}{language}\n{words.rstrip()}\n{fence}"


def _outcome(verdict: Verdict) -> Iterator[str]:
    yield verdict.sentence
    for fault in verdict.faults:
        place = f"line {fault.line}, `{verdict.line(fault)}`: " if fault.line else ""
        yield f"- {fault.kind}: {place}{fault.text}" + (f" (at {fault.case})" if fault.case else "")
    if verdict.cases:
        yield f"- right at: {'; '.join(verdict.cases)}"
    for words in verdict.notes:
        yield f"- note: {words}"


def _figures(verdict: Verdict) -> Iterator[str]:
    reached = f"it allows {units.percent(verdict.fraction)}" if verdict.fraction else "it is not known"
    yield f"Goal: {units.percent(verdict.goal_fraction)} of the limit at {verdict.goal_case}; {reached}."
    for each in verdict.kernels:
        sectors = f"{each.sectors} sectors of 32 B, ideally {each.ideal_sectors}" if each.ideal_sectors else ""
        occupancy = f"occupancy {units.percent(each.occupancy)}, limited by {each.limited_by}" if each.occupancy else ""
        spills = f"{each.spill_bytes} B spilled" if each.spill_bytes else "no spills"
        figures = (
            f"{each.registers} registers",
            spills,
            occupancy,
            f"{each.programs} programs",
            sectors,
            each.sentence,
        )
        yield f"- `{each.name}`: {'; '.join(filter(None, figures))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where questions go: anything that speaks OpenAI's chat completions, such as a server on this machine."""

    url: str
    model: str
    key: str = ""


def address_of(environment: Mapping[str, str] = os.environ) -> Address | None:
    """What the environment names; None where it names nothing."""
    url, key, model = (environment.get(name, "").strip() for name in (URL, KEY, MODEL))
    if not url:
        return None
    whole = checked(URL, url, "http://localhost:11434/v1", KEY, key)
    if not model:
        raise BadInput(f"{URL} is set and {MODEL} is not: name the model to ask")
    ending = "/chat/completions"
    return Address(url=whole if whole.endswith(ending) else whole + ending, model=model, key=key)


def answer_of(address: Address, prompt: str) -> Iterator[str]:
    """The answer, piece by piece as it comes, without what steers a terminal."""
    body = {"model": address.model, "stream": True, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if address.key:
        headers["Authorization"] = f"Bearer {address.key}"
    request = urllib.request.Request(address.url, json.dumps(body).encode(), headers)
    length = 0
    try:
        with opener().open(request, timeout=SILENCE_S) as response:
            for piece in _pieces(response):
                piece = plain(piece)
                length += len(piece)
                if length > ANSWER_CHARACTERS:
                    raise BadInput(f"{address.url} does not stop answering: {ANSWER_CHARACTERS} characters were read")
                yield piece
    except urllib.error.HTTPError as error:
        raise BadInput(f"{address.url} answered {error.code}: {_complaint(error)}; see {URL}, {KEY}, {MODEL}") from None
    except urllib.error.URLError as error:
        raise BadInput(f"{address.url} cannot be reached: {error.reason}; see {URL}") from None
    except (OSError, http.client.HTTPException) as error:
        raise BadInput(f"{address.url} broke off: {error or type(error).__name__}; ask again") from None
    if not length:
        raise BadInput(f"{address.url} answered nothing: does it know the model {address.model}?")


def _pieces(response: Any) -> Iterator[str]:
    """The answer's pieces, from a stream of events, or from one JSON object where a server does not stream."""
    if "json" in response.headers.get("Content-Type", ""):
        yield _content(response.read(LINE_BYTES), "message")
        return
    while line := response.readline(LINE_BYTES):
        data = line.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:") and data:
            yield _content(data, "delta")


def _content(data: bytes, kind: str) -> str:
    try:
        found = json.loads(data)
        if "error" in found:
            raise BadInput(f"the assistant's server says: {plain(str(found['error']))[:200]}")
        choices = found["choices"]
        return str(choices[0][kind].get("content") or "") if choices else ""  # the last event may count tokens alone
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise BadInput(
            f"the answer is not what OpenAI's protocol has: {plain(data[:80].decode(errors='replace'))}"
        ) from None


def _complaint(error: urllib.error.HTTPError) -> str:
    words = error.read(2000).decode(errors="replace")
    try:
        reply = json.loads(words)["error"]
        words = reply["message"] if isinstance(reply, dict) else str(reply)
    except (ValueError, KeyError, TypeError):
        pass
    return plain(" ".join(words.split()))[:200] or str(error.reason)
