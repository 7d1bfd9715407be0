"""OpenAI's requests, read by hand: each field is known, has its type, and is refused by name where it is not.

No web framework here: a body's JSON in, an `Ask` out, or a `Failure` with OpenAI's words.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from sublight.engines.generate.sampling import Sampling
from sublight.engines.generate.vocabulary import Vocabulary
from sublight.engines.serve import tools
from sublight.engines.serve.chat import Template
from sublight.engines.serve.failures import Failure, invalid
from sublight.errors import BadInput, nearest

Kind = Literal["completion", "chat"]
MOST_CHOICES = 128  # of one request
MOST_STOPS = 16
PLAIN_NEW = 16  # tokens of a completion that does not say
ROLES = ("system", "developer", "user", "assistant", "tool")
SHARED = (
    *("model", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "max_tokens", "logprobs"),
    *("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids"),  # beyond OpenAI's, as vLLM has them
)
FIELDS: dict[Kind, tuple[str, ...]] = {
    "completion": (*SHARED, "prompt", "echo", "best_of"),
    "chat": (
        *(*SHARED, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),  # vLLM's
    ),
}
IGNORED = (  # what changes no text: who asks, what is kept, how a provider goes about it
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
NOT_HERE: dict[str, Any] = {  # OpenAI's and vLLM's, which we have not, and the value that asks for nothing
    **{"suffix": "", "tools": [], "functions": [], "function_call": "none", "modalities": ["text"], "audio": {}},
    **{"prediction": {}, "reasoning_effort": "none", "verbosity": "", "web_search_options": None},
    **{"min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "bad_words": []},
    **{"include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1, "allowed_token_ids": []},
    **{"prompt_logprobs": None, "truncate_prompt_tokens": None, "structured_outputs": {}, "documents": []},
    **{"guided_json": None, "guided_regex": "", "guided_choice": [], "guided_grammar": ""},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: prompts, `n` choices of each, and how they are told."""

    kind: Kind
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    most_new: int
    samplings: tuple[Sampling, ...]  # of each choice: seeds differ
    stops: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    is_stream: bool = False
    with_usage: bool = False
    echoes: tuple[str, ...] = ()  # the prompts, where they are repeated
    only_prompt: bool = False  # no new token is shown
    goes_on: bool = False  # a prompt's text; else the answer is a text by itself
    may_call: bool = False  # tools were offered: the answer's calls are told apart from its text
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", sum(map(len, self.prompts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What requests are read against."""

    name: str
    words: Vocabulary
    vocab: int
    longest: int
    ends: frozenset[int]
    template: Template | None = None


def parse(body: bytes) -> dict[str, Any]:
    """The body's object."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    try:
        data = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise invalid("the body is no JSON object: send {…} with the request's fields")
    return data


def read(data: Mapping[str, Any], kind: Kind, served: Served) -> Ask:
    for name, value in data.items():
        if name in NOT_HERE and name not in FIELDS[kind] and _is_wanted(value, NOT_HERE[name]):
            raise invalid(f"{name} is not supported here: leave it out", name)
        if name not in FIELDS[kind] and name not in IGNORED and name not in NOT_HERE:
            raise _unknown(name[:60], FIELDS[kind])
    if (model := data.get("model")) not in (None, served.name):
        raise Failure(
            404, f"there is no model {_shown(model)}: this is {served.name}", param="model", code="model_not_found"
        )
    prompts, echoes = _prompts(data, served) if kind == "completion" else (_messages(data, served), ())
    n = _whole(data, "n", 1, 1, MOST_CHOICES)
    if n * len(prompts) > MOST_CHOICES:
        raise invalid(f"{n} choices of {len(prompts)} prompts: ask for {MOST_CHOICES} at most", "n")
    if _whole(data, "best_of", n, 1, MOST_CHOICES) != n:
        raise invalid("best_of is not supported: leave it out, or make it n", "best_of")
    most_new = _most_new(data, kind, prompts, served)
    options = data.get("stream_options")
    if options is not None and (not isinstance(options, dict) or set(options) - {"include_usage"}):
        raise invalid("stream_options has include_usage alone", "stream_options")
    with_usage = _flag(options or {}, "include_usage")
    is_stream = _flag(data, "stream")
    return Ask(
        kind=kind,
        prompts=prompts,
        n=n,
        most_new=most_new,
        samplings=_samplings(data, kind, n * len(prompts), served.vocab),
        stops=_stops(data),
        ends=_ends(data, served),
        is_stream=is_stream,
        with_usage=is_stream and with_usage,
        echoes=echoes,
        only_prompt=bool(echoes) and data.get("max_tokens") == 0,
        goes_on=kind == "completion" or _flag(data, "continue_final_message"),
        may_call=kind == "chat" and bool(data.get("tools")) and data.get("tool_choice") != "none",
    )


def _unknown(name: str, known: Sequence[str]) -> Failure:
    words = nearest(name, list(known))
    advice = f"use {words}" if words.endswith("…") else f"did you mean {words}?"
    return invalid(f"unknown field {name!r}: {advice}", name)


def _is_wanted(value: Any, nothing: Any) -> bool:
    """Whether a field asks for something: not null, nor what asks for nothing, nor as empty as that.

    >>> _is_wanted([], []), _is_wanted(None, []), _is_wanted(False, True), _is_wanted({}, [])
    (False, False, True, False)
    """
    return value is not None and value != nothing and (nothing is None or bool(nothing) or bool(value))


def _prompts(data: Mapping[str, Any], served: Served) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """A text, token numbers, or several of either; and the texts, where they are to be repeated."""
    given = data.get("prompt")
    if given is None:
        raise invalid("there is no prompt: send a text, or token numbers", "prompt")
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(several) > MOST_CHOICES:
        raise invalid(f"{len(several)} prompts: send {MOST_CHOICES} at most", "prompt")
    prompts = tuple(_tokens(each, served) for each in several)
    if not _flag(data, "echo"):
        return prompts, ()
    if data.get("logprobs") is not None and _flag(data, "stream"):
        raise invalid("echo with logprobs is not for streams: leave one of the three out", "echo")
    return prompts, tuple(x if isinstance(x, str) else served.words.decode(x) for x in several)


def _tokens(prompt: Any, served: Served) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encoded(prompt, served, "prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        if not all(0 <= token < served.vocab for token in prompt):
            raise invalid(f"a token is outside of 0 to {served.vocab - 1}", "prompt")
        if not prompt:
            raise invalid("a prompt without tokens gives a model nothing to go on", "prompt")
        return tuple(prompt)
    raise invalid("a prompt is a text, or a list of token numbers", "prompt")


def _encoded(text: str, served: Served, param: str, *, is_whole: bool = False) -> tuple[int, ...]:
    if len(text) > 64 * served.longest + 4096:  # a token has seldom more characters: not worth taking apart
        raise _too_long(f"about {len(text) // 4}", served, param)
    try:
        tokens = tuple(served.words.encode(text, is_whole=is_whole))
    except BadInput as error:
        raise invalid(str(error), param) from None
    if not tokens:
        raise invalid("a prompt without tokens gives a model nothing to go on", param)
    return tokens


def _messages(data: Mapping[str, Any], served: Served) -> tuple[tuple[int, ...], ...]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid('messages is a list of at least one: [{"role": "user", "content": "…"}]', "messages")
    if served.template is None:
        raise invalid(f"{served.name} has no chat template: use /v1/completions", "messages")
    if data.get("response_format") not in (None, {"type": "text"}):
        raise invalid("response_format is text alone here", "response_format")
    offered = tools.offered(data, served.template, served.words)
    options = _given(data, "chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise invalid('chat_template_kwargs is an object: {"enable_thinking": false}', "chat_template_kwargs")
    goes_on = _flag(data, "continue_final_message")
    if goes_on and _flag(data, "add_generation_prompt"):
        raise invalid("add_generation_prompt begins a message, which continue_final_message does not", "messages")
    begins = not goes_on and data.get("add_generation_prompt") is not False
    try:
        read = [_message(each, place) for place, each in enumerate(messages)]
        text = served.template.prompt(read, options, begins_reply=begins, goes_on=goes_on, tools=offered)
    except BadInput as error:
        raise invalid(str(error), "messages") from None
    return (_encoded(text, served, "messages", is_whole=True),)


def _message(message: Any, place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} is no object with role and content", where)
    if message.get("role") not in ROLES:
        raise invalid(f"{where} has role {_shown(message.get('role'))}: use {', '.join(ROLES)}", f"{where}.role")
    content, calls = message.get("content"), message.get("tool_calls") or None
    if calls is not None:
        if message["role"] != "assistant":
            raise invalid(f"{where} has tool_calls, which are an assistant's", f"{where}.tool_calls")
        message = {**message, "tool_calls": tools.shown(calls, where)}
        content = "" if content is None else content
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise invalid(f"{where} has a part that is no text: this model takes text alone", f"{where}.content")
        content = "".join(parts)  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise invalid(f"{where} has no content: send a text", f"{where}.content")
    return {**message, "content": content}


def _ends(data: Mapping[str, Any], served: Served) -> frozenset[int]:
    more = _given(data, "stop_token_ids", [])
    if not isinstance(more, list) or any(type(each) is not int for each in more):
        raise invalid("stop_token_ids is a list of token numbers", "stop_token_ids")
    if not all(0 <= token < served.vocab for token in more):
        raise invalid(f"stop_token_ids has a token outside of 0 to {served.vocab - 1}", "stop_token_ids")
    return frozenset(more) | (frozenset() if _flag(data, "ignore_eos") else served.ends)


def _most_new(data: Mapping[str, Any], kind: Kind, prompts: Sequence[Sequence[int]], served: Served) -> int:
    longest = max(map(len, prompts))
    room = served.longest - longest
    if room < 1:
        raise _too_long(str(longest), served, "prompt" if kind == "completion" else "messages")
    name = "max_completion_tokens" if data.get("max_completion_tokens") is not None else "max_tokens"
    usual = min(PLAIN_NEW, room) if kind == "completion" else room
    least = 0 if kind == "completion" and _flag(data, "echo") else 1
    wanted = max(1, _whole(data, name, usual, least, 2**31))
    if wanted > room:
        words = f"{longest} tokens of prompt and {wanted} new ones are more than this model's {served.longest}"
        raise invalid(f"{words}: lower {name}, or shorten the prompt", name, "context_length_exceeded")
    return wanted


def _too_long(tokens: str, served: Served, param: str) -> Failure:
    words = f"the prompt has {tokens} tokens, and this model's context is {served.longest}: shorten it"
    return invalid(words, param, "context_length_exceeded")


def _samplings(data: Mapping[str, Any], kind: Kind, count: int, vocab: int) -> tuple[Sampling, ...]:
    bias = _given(data, "logit_bias", {})
    if not isinstance(bias, dict):
        raise invalid('logit_bias is an object: {"token number": bias}', "logit_bias")
    if not all(re.fullmatch(r"-?(0|[1-9][0-9]{0,18})", token) for token in bias):  # int() takes more, "5_0" as 50
        raise invalid("logit_bias has a key that is no token number", "logit_bias")
    shifts = {int(token): _as_number(value, "logit_bias") for token, value in bias.items()}
    if not all(0 <= token < vocab for token in shifts):
        raise invalid(f"logit_bias has a token outside of 0 to {vocab - 1}", "logit_bias")
    seed = _whole(data, "seed", -1, -(2**63), 2**63 - 1) % 2**62 if data.get("seed") is not None else None
    first = secrets.randbits(62) if seed is None else seed
    try:
        return tuple(
            Sampling(
                temperature=_number(data, "temperature", 1.0),
                top_k=max(0, _whole(data, "top_k", 0, -1, 2**31)),
                top_p=_number(data, "top_p", 1.0),
                min_p=_number(data, "min_p", 0.0),
                seed=(first + place) % 2**62,
                repetition=_number(data, "repetition_penalty", 1.0),
                presence=_number(data, "presence_penalty", 0.0),
                frequency=_number(data, "frequency_penalty", 0.0),
                bias=shifts,
                logprobs=_logprobs(data, kind),
            )
            for place in range(count)
        )
    except BadInput as error:
        raise invalid(str(error), str(error).split()[0].rstrip(":")) from None


def _logprobs(data: Mapping[str, Any], kind: Kind) -> int | None:
    if kind == "completion":
        return None if data.get("logprobs") is None else _whole(data, "logprobs", 0, 0, 20)
    if not _flag(data, "logprobs"):
        if data.get("top_logprobs") is not None:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return _whole(data, "top_logprobs", 0, 0, 20)


def _stops(data: Mapping[str, Any]) -> tuple[str, ...]:
    given = _given(data, "stop", [])
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop is a text, or a list of texts, none of them empty", "stop")
    if len(stops) > MOST_STOPS or any(len(stop) > 1000 for stop in stops):
        raise invalid(f"stop: give {MOST_STOPS} texts at most, of 1000 characters at most", "stop")
    return tuple(stops)


def _given(data: Mapping[str, Any], name: str, usual: Any) -> Any:
    """Null is as good as left out; 0, false and an empty text are not."""
    value = data.get(name)
    return usual if value is None else value


def _whole(data: Mapping[str, Any], name: str, usual: int, least: int, most: int) -> int:
    value = data.get(name)
    if value is None:
        return usual
    if type(value) is not int or not least <= value <= most:
        raise invalid(f"{name} is {_shown(value)}: send a whole number from {least} to {most}", name)
    return value


def _number(data: Mapping[str, Any], name: str, usual: float) -> float:
    value = data.get(name)
    return usual if value is None else _as_number(value, name)


def _as_number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or abs(value) > 1e300:  # beyond, it is no float
        raise invalid(f"{name} is {_shown(value)}: send a number", name)
    return float(value)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value not in (None, True, False) or type(value) in (int, float):
        raise invalid(f"{name} is {_shown(value)}: send true or false", name)
    return bool(value)


def _shown(value: Any) -> str:
    """
    >>> _shown("a"), _shown([[1]])
    ('"a"', 'a list')
    """
    if isinstance(value, list | dict):  # which may be deeper than can be written
        return "a list" if isinstance(value, list) else "an object"
    words = json.dumps(value)
    return words if len(words) <= 40 else f"{words[:40]}…"
