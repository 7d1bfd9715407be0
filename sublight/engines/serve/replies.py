"""Answers in OpenAI's form: whole, or in pieces as they come."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sublight.engines.generate.sampling import Logprobs
from sublight.engines.generate.vocabulary import Vocabulary
from sublight.engines.generate.writer import BROKEN, Writer
from sublight.engines.serve.protocol import Ask
from sublight.engines.serve.tools import Call, Calls
from sublight.engines.serve.worker import Event

DONE = "data: [DONE]\n\n"
LEAST = -9999.0  # of a log-probability


@dataclass(slots=True)
class Choice:
    """What has come of one choice so far."""

    writer: Writer  # of the tokens whose log-probabilities went out, without stop words
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    told: int = 0  # characters of the writer's text
    calls: Calls | None = None  # where tools were offered
    finish: str = ""


class Reply:
    """One request's answer. `add` takes an event and gives the piece that a stream sends for it."""

    def __init__(self, ask: Ask, model: str, words: Vocabulary) -> None:
        self.ask, self.words = ask, words
        self.choices = [self._choice(at) for at in range(len(ask.prompts) * ask.n)]
        self.is_chat = ask.kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def _choice(self, index: int) -> Choice:
        before = self.ask.prompts[index // self.ask.n] if self.ask.goes_on else ()
        return Choice(Writer(self.words, before=before), calls=Calls() if self.ask.may_call else None)

    def first(self) -> list[dict[str, Any]]:
        """Pieces that a stream begins with."""
        if self.is_chat:
            role = {"role": "assistant", "content": ""}
            return [self._piece({"index": at, "delta": role, "finish_reason": None}) for at in range(len(self.choices))]
        return [
            self._piece({"index": at, "text": self._echo(at), "logprobs": None, "finish_reason": None})
            for at in range(len(self.choices))
            if self.ask.echoes
        ]

    def add(self, index: int, event: Event) -> dict[str, Any] | None:
        choice = self.choices[index]
        choice.prompt_logprobs += event.prompt_logprobs
        if self.ask.only_prompt:
            event = replace(event, text="", tokens=(), logprobs=())
        calls: list[Call] = []
        if choice.calls is not None:
            text, calls = choice.calls.add(event.text, is_last=bool(event.finish))
            finish = "tool_calls" if choice.calls.calls and event.finish == "stop" else event.finish
            event = replace(event, text=text, finish=finish)
        choice.text += event.text
        choice.tokens += event.tokens
        choice.logprobs += event.logprobs
        choice.finish = event.finish
        if not event.text and not calls and not event.finish and not event.logprobs:
            return None
        logprobs = self._logprobs(event.tokens, event.logprobs, choice)
        row: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": event.finish or None}
        if self.is_chat:
            row["delta"] = {"content": event.text} if event.text else {}
            if calls and choice.calls is not None:
                first = len(choice.calls.calls) - len(calls)
                row["delta"]["tool_calls"] = [{"index": first + at, **call.row} for at, call in enumerate(calls)]
        else:
            row["text"] = event.text
        return self._piece(row)

    def whole(self) -> dict[str, Any]:
        rows = []
        for at, choice in enumerate(self.choices):
            row: dict[str, Any] = {"index": at, "finish_reason": choice.finish}
            row["logprobs"] = self._whole_logprobs(at)
            if self.is_chat:
                row["message"] = {"role": "assistant", "content": choice.text}
                if choice.calls is not None and choice.calls.calls:
                    row["message"]["content"] = choice.text or None
                    row["message"]["tool_calls"] = [call.row for call in choice.calls.calls]
            else:
                row["text"] = self._echo(at) + choice.text
            rows.append(row)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": rows, "usage": self.usage}

    def _whole_logprobs(self, index: int) -> dict[str, Any] | None:
        """With those of a prompt that is repeated; of its first token there are none."""
        choice, so_far = self.choices[index], self._choice(index)
        if not self.ask.echoes or self.ask.samplings[0].logprobs is None:
            return self._logprobs(choice.tokens, choice.logprobs, so_far)
        first, *rest = self.ask.prompts[index // self.ask.n]
        so_far = Choice(Writer(self.words))
        self._offset(first, so_far)
        parts = [self._logprobs(rest, choice.prompt_logprobs, so_far)]
        parts.append(self._logprobs(choice.tokens, choice.logprobs, so_far))
        begin = {"tokens": self.words.decode([first]), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [value, *(x for part in parts if part for x in part[name])] for name, value in begin.items()}

    def last(self) -> list[dict[str, Any]]:
        return [{**self._piece(None), "usage": self.usage}] if self.ask.with_usage else []

    @property
    def usage(self) -> dict[str, int]:
        new = sum(len(choice.tokens) for choice in self.choices)
        prompt = self.ask.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _echo(self, index: int) -> str:
        return self.ask.echoes[index // self.ask.n] if self.ask.echoes else ""

    def _piece(self, row: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        usage = {"usage": None} if self.ask.with_usage else {}  # only the last piece has one
        return {**self._head, "object": kind, "choices": [] if row is None else [row], **usage}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprobs], choice: Choice) -> dict[str, Any] | None:
        if self.ask.samplings[0].logprobs is None:
            return None
        words = [self.words.decode([token]) for token in tokens]
        if self.is_chat:
            rows = [
                {**_named(word, each.chosen), "top_logprobs": [_named(self.words.decode([t]), p) for t, p in each.best]}
                for word, each in zip(words, logprobs, strict=True)
            ]
            return {"content": rows}
        offsets = [self._offset(token, choice) for token in tokens]
        best = [self._by_text(each.best) for each in logprobs]
        chances = [_finite(each.chosen) for each in logprobs]
        return {"tokens": words, "token_logprobs": chances, "top_logprobs": best, "text_offset": offsets}

    def _offset(self, token: int, choice: Choice) -> int:
        """Where a token's text begins in the choice's; the token is added. Several may make one character, and a
        token by itself may lack the space that it has in a text."""
        begin = choice.told
        choice.writer.add(token)
        choice.told += len(choice.writer.take())
        return begin

    def _by_text(self, best: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Two tokens may have one text, as halves of characters have: the likelier one's chance stays."""
        found: dict[str, float] = {}
        for token, value in best:
            found.setdefault(self.words.decode([token]), _finite(value))
        return found


def _named(word: str, value: float) -> dict[str, Any]:
    bytes_of = None if BROKEN in word else list(word.encode())  # half a character: its bytes are not those of "\ufffd"
    return {"token": word, "logprob": _finite(value), "bytes": bytes_of}


def _finite(value: float) -> float:
    """JSON has no infinity, and no NaN.

    >>> _finite(-0.5), _finite(float("-inf")), _finite(float("nan"))
    (-0.5, -9999.0, -9999.0)
    """
    return max(value, LEAST) if value == value else LEAST


def sent(piece: dict[str, Any]) -> str:
    """As a stream of events has it."""
    return f"data: {json.dumps(piece)}\n\n"
