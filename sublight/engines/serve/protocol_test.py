"""Requests as clients send them, and as they should not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jinja2")
from sublight.engines.serve import chat as templates
from sublight.engines.serve.chat import Template
from sublight.engines.serve.failures import Failure
from sublight.engines.serve.fakes import VOCAB, Letters
from sublight.engines.serve.protocol import Kind, Served, parse, read
from sublight.errors import BadInput

TEMPLATE = Template(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}a:",
    {"bos_token": "0"},
)
SERVED = Served(name="tiny", words=Letters(), vocab=VOCAB, longest=32, ends=frozenset({1}), template=TEMPLATE)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
HELLO = [{"role": "user", "content": "hi"}]


def test_a_completion_and_a_chat() -> None:
    ask = read({"prompt": "abc", "max_tokens": 4, "temperature": 0, "stop": "x", "seed": -1}, "completion", SERVED)
    assert ask.prompts == (tuple(Letters().encode("abc")),) and ask.most_new == 4 and ask.stops == ("x",)
    assert ask.samplings[0].is_greedy and ask.ends == {1} and not ask.is_stream
    chat = read({"model": "tiny", "messages": HELLO, "n": 2, "stream": True}, "chat", SERVED)
    assert chat.prompts == (tuple(Letters().encode("0u:hi;a:")),) and chat.most_new == 32 - 8
    assert len(chat.samplings) == 2 and chat.samplings[0].seed != chat.samplings[1].seed
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert read({"messages": parts}, "chat", SERVED).prompts == chat.prompts


def test_several_prompts_and_token_numbers() -> None:
    ask = read({"prompt": ["ab", "c"], "n": 2, "echo": True}, "completion", SERVED)
    assert len(ask.samplings) == 4 and ask.echoes == ("ab", "c") and ask.prompt_tokens == 3
    assert read({"prompt": [[3, 4], [5]]}, "completion", SERVED).prompts == ((3, 4), (5,))
    assert read({"prompt": [3, 4]}, "completion", SERVED).prompts == ((3, 4),)


def test_the_same_seed_is_the_same_draw() -> None:
    def seeds(**given: Any) -> list[int]:
        return [each.seed for each in read({"prompt": "a", "n": 2, **given}, "completion", SERVED).samplings]

    assert seeds(seed=5) == seeds(seed=5) != seeds(seed=6)
    assert seeds() != seeds()


@pytest.mark.parametrize(
    ("kind", "data", "words", "param"),
    [
        ("completion", {}, "there is no prompt", "prompt"),
        ("completion", {"prompt": ""}, "nothing to go on", "prompt"),
        ("completion", {"prompt": []}, "nothing to go on", "prompt"),
        ("completion", {"prompt": [1, "a"]}, "a list of token numbers", "prompt"),
        ("completion", {"prompt": [True]}, "a list of token numbers", "prompt"),
        ("completion", {"prompt": [64]}, "outside of 0 to 63", "prompt"),
        ("completion", {"prompt": {"a": 1}}, "a list of token numbers", "prompt"),
        ("completion", {"prompt": "a" * 32}, "context is 32", "prompt"),
        ("completion", {"prompt": "a" * 9999999}, "context is 32", "prompt"),
        ("completion", {"prompt": "a", "max_tokens": 32}, "more than this model's 32", "max_tokens"),
        ("completion", {"prompt": "a", "max_tokens": 0}, "max_tokens is 0", "max_tokens"),
        ("completion", {"prompt": "a", "max_tokens": 1.5}, "max_tokens is 1.5", "max_tokens"),
        ("completion", {"prompt": "a", "max_tokens": "9"}, 'max_tokens is "9"', "max_tokens"),
        ("completion", {"prompt": "a", "temperature": -1}, "temperature -1.0", "temperature"),
        ("completion", {"prompt": "a", "temperature": True}, "temperature is true", "temperature"),
        ("completion", {"prompt": "a", "temperature": 1e999}, "temperature is Infinity", "temperature"),
        ("completion", {"prompt": "a", "top_p": 0}, "top_p 0.0", "top_p"),
        ("completion", {"prompt": "a", "presence_penalty": 3}, "presence_penalty 3.0", "presence_penalty"),
        ("completion", {"prompt": "a", "n": 200}, "n is 200", "n"),
        ("completion", {"prompt": ["a"] * 100, "n": 2}, "2 choices of 100 prompts", "n"),
        ("completion", {"prompt": ["a"] * 500}, "500 prompts", "prompt"),
        ("completion", {"prompt": "a", "stream": 1}, "stream is 1", "stream"),
        ("completion", {"prompt": "a", "stop": [""]}, "none of them empty", "stop"),
        ("completion", {"prompt": "a", "stop": ["x"] * 99}, "16 texts at most", "stop"),
        ("completion", {"prompt": "a", "logit_bias": {"x": 1}}, "no token number", "logit_bias"),
        ("completion", {"prompt": "a", "logit_bias": {"64": 1}}, "outside of 0 to 63", "logit_bias"),
        ("completion", {"prompt": "a", "stream_options": {"include_usage": "x"}}, 'is "x"', "include_usage"),
        ("completion", {"prompt": "a", "x" * 10**6: 1}, "unknown field", "x" * 60),
        ("completion", {"prompt": "a", "\ud800": 1}, "unknown field", "\ud800"),
        ("completion", {"prompt": "a", "logit_bias": [1]}, "is an object", "logit_bias"),
        ("completion", {"prompt": "a", "logit_bias": {"5_0": 1}}, "no token number", "logit_bias"),
        ("completion", {"prompt": "a", "logit_bias": {"5": 1, "05": -1}}, "no token number", "logit_bias"),
        ("completion", {"prompt": "a", "logit_bias": 0}, "is an object", "logit_bias"),
        ("completion", {"prompt": "a", "stop": 0}, "stop is a text", "stop"),
        ("completion", {"prompt": "a", "stop_token_ids": 0}, "a list of token numbers", "stop_token_ids"),
        ("completion", {"prompt": "a", "stop_token_ids": [64]}, "outside of 0 to 63", "stop_token_ids"),
        ("completion", {"prompt": "a", "best_of": True}, "best_of is true", "best_of"),
        ("completion", {"prompt": "a", "logprobs": 21}, "logprobs is 21", "logprobs"),
        ("completion", {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "not for streams", "echo"),
        ("completion", {"prompt": "a", "echo": False, "max_tokens": 0}, "max_tokens is 0", "max_tokens"),
        ("completion", {"prompt": "a", "best_of": 3}, "best_of is not supported", "best_of"),
        ("completion", {"prompt": "a", "suffix": "b"}, "suffix is not supported", "suffix"),
        ("completion", {"prompt": "a", "temprature": 1}, "did you mean temperature", "temprature"),
        ("completion", {"prompt": "a", "stream_options": {"x": 1}}, "include_usage alone", "stream_options"),
        ("completion", {"prompt": "a", "temperature": 3e9}, "give a number from 0 to 100", "temperature"),
        ("chat", {}, "messages is a list", "messages"),
        ("chat", {"messages": []}, "messages is a list", "messages"),
        ("chat", {"messages": ["hi"]}, "messages[0] is no object", "messages[0]"),
        ("chat", {"messages": [{"role": "king", "content": "x"}]}, 'role "king"', "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "has no content", "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text alone",
         "messages[0].content"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "refuses these messages: no tools", "messages"),
        ("chat", {"messages": HELLO, "tools": [{}]}, "tools is a list", "tools"),
        ("chat", {"messages": HELLO, "tools": [TOOL]}, "writes no calls as <tool_call>", "tools"),
        ("chat", {"messages": HELLO, "tools": [STRICT]}, "cannot be strict", "tools"),
        ("chat", {"messages": HELLO, "tool_choice": "auto"}, "tool_choice needs tools", "tool_choice"),
        ("chat", {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}, "auto or none", "tool_choice"),
        ("chat", {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False}, "cannot be false",
         "parallel_tool_calls"),
        ("completion", {"prompt": "a", "tools": [TOOL]}, "tools is not supported", "tools"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, "needs logprobs", "top_logprobs"),
        ("chat", {"messages": HELLO, "response_format": {"type": "json_object"}}, "text alone", "response_format"),
        ("chat", {"messages": HELLO, "chat_template_kwargs": 0}, "is an object", "chat_template_kwargs"),
        ("chat", {"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort is not supported",
         "reasoning_effort"),
        ("chat", {"messages": HELLO, "web_search_options": {}}, "is not supported", "web_search_options"),
        ("completion", {"prompt": "a", "skip_special_tokens": False}, "is not supported", "skip_special_tokens"),
        ("completion", {"prompt": "a", "prompt_logprobs": 0}, "is not supported", "prompt_logprobs"),
        ("completion", {"prompt": "a", "zzz": 1}, "unknown field 'zzz': use model", "zzz"),
        ("completion", {"prompt": "a", "stop_token_ids": [True]}, "list of token numbers", "stop_token_ids"),
        ("completion", {"prompt": "a", "stop_token_ids": 5}, "list of token numbers", "stop_token_ids"),
        ("chat", {"messages": HELLO, "chat_template_kwargs": [1]}, "is an object", "chat_template_kwargs"),
        ("chat", {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "has messages", "messages"),
        ("chat", {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
         "begins a message", "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(kind: Kind, data: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(Failure) as caught:
        read(data, kind, SERVED)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and words in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    json.dumps(caught.value.body)


def test_another_model_is_not_found() -> None:
    with pytest.raises(Failure) as caught:
        read({"prompt": "a", "model": "gpt-9"}, "completion", SERVED)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"7", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 9999]
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Failure, match="the body is no JSON"):
        parse(body)


def test_a_value_that_can_be_read_but_is_too_deep_to_be_written_is_refused() -> None:
    for depth in range(800, 1010):  # somewhere there json.loads begins to refuse, and json.dumps before it
        with pytest.raises(Failure, match=r"the body is no JSON|n is a list: send a whole number"):
            read(parse(b'{"prompt": "a", "n": ' + b"[" * depth + b"]" * depth + b"}"), "completion", SERVED)


def test_what_changes_no_text_is_taken_and_what_asks_for_nothing() -> None:
    """As clients send it without being asked to."""
    idle = {"user": "me", "store": False, "service_tier": "auto", "metadata": {"a": "b"}, "tools": [], "suffix": None}
    idle |= {"min_tokens": 0, "skip_special_tokens": True, "modalities": ["text"], "parallel_tool_calls": False}
    plain = read({"messages": HELLO, "seed": 1}, "chat", SERVED)
    assert read({"messages": HELLO, "seed": 1, **idle}, "chat", SERVED) == plain


def test_tokens_that_end_a_text() -> None:
    def ends(**given: Any) -> frozenset[int]:
        return read({"prompt": "a", **given}, "completion", SERVED).ends

    assert ends(stop_token_ids=[5, 7]) == {1, 5, 7} and ends(stop_token_ids=[5], ignore_eos=True) == {5}


def test_a_template_gets_options_and_a_last_message_may_go_on() -> None:
    source = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}</{{ m.role[0] }}>{% endfor %}"
    source += "{% if add_generation_prompt %}<a>{% if mute is defined and mute %}-{% endif %}{% endif %}"
    served = replace(SERVED, template=Template(source, {}))
    reply = [*HELLO, {"role": "assistant", "content": "a"}]  # "a" stands in the tags, too

    def is_prompt(text: str, goes_on: bool, messages: Any = HELLO, **given: Any) -> bool:
        ask = read({"messages": messages, **given}, "chat", served)
        return ask.prompts == (tuple(Letters().encode(text)),) and ask.goes_on == goes_on

    assert is_prompt("<u>hi</u><a>", False)
    assert is_prompt("<u>hi</u><a>-", False, chat_template_kwargs={"mute": True})
    assert is_prompt("<u>hi</u>", False, add_generation_prompt=False)
    assert is_prompt("<u>hi</u><a>a", True, reply, continue_final_message=True)
    reply[-1]["content"] = "a "  # the template trims
    assert is_prompt("<u>hi</u><a>a", True, reply, continue_final_message=True)
    served = replace(SERVED, template=Template(source.replace(" | trim", ""), {}))
    assert is_prompt("<u>hi</u><a>a ", True, reply, continue_final_message=True)
    hidden = replace(SERVED, template=Template("{{ messages[0].role }}", {}))
    with pytest.raises(Failure, match="cannot go on"):
        read({"messages": HELLO, "continue_final_message": True}, "chat", hidden)


def test_a_template_has_what_transformers_gives_it() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
    source += "{% endgeneration %}{{ m | tojson(indent=1) }}{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true) }}"
    source += "{{ [1, 2] | tojson(separators=(',', ':')) }}{% endfor %}{{ documents is none }}{{ tools is none }}"
    theirs = render_jinja_template([HELLO * 3], chat_template=source)[0][0]
    assert transformers and Template(source, {}).prompt(HELLO * 3) == theirs and "hi{" in theirs


def test_templates_are_kept_in_a_box() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for x in y %}",
    ):
        with pytest.raises(BadInput, match="chat template"):
            Template(source, {}).prompt(HELLO)
    with pytest.raises(BadInput, match="fails: OverflowError"):
        Template("{% for x in range(10**9) %}a{% endfor %}", {}).prompt(HELLO)


@pytest.mark.parametrize("words", ["", "3", "[]", "[" * 100_000])
def test_settings_that_are_no_object_are_refused(words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(words)
    with pytest.raises(BadInput, match="cannot read"):
        templates.read(tmp_path)


def test_a_template_without_a_name_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": [1], "template": 3}, 4]}')
    assert templates.read(tmp_path) is None
