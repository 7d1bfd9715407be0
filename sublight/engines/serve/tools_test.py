"""Calls that a model writes become OpenAI's, however its text comes in pieces; what is no call is said as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jinja2")
from hypothesis import given
from hypothesis import strategies as st

from sublight.engines.generate.sampling import Sampling
from sublight.engines.serve.chat import Template
from sublight.engines.serve.failures import Failure
from sublight.engines.serve.protocol import Ask, Served, read
from sublight.engines.serve.replies import Reply
from sublight.engines.serve.tools import Calls
from sublight.engines.serve.worker import Event

QWEN = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ONE, TWO = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', '<tool_call>{"name": "g"}</tool_call>'


class Plain:
    """A character a token."""

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def served(source: str, words: Any = None) -> Served:
    made = Template(source, {})
    return Served(name="m", words=words or Plain(), vocab=1 << 20, longest=999, ends=frozenset(), template=made)


def parted(text: str, cuts: Sequence[int] = ()) -> tuple[str, list[tuple[str, str]]]:
    calls, said = Calls(), ""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        said += calls.add(text[begin:end], is_last=False)[0]
    said += calls.add("", is_last=True)[0]
    return said, [(call.name, call.arguments) for call in calls.calls]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (ONE, "", [("f", '{"a": "é"}')]),
        (f"Let me look.\n{ONE}\n{TWO}\n", "Let me look.", [("f", '{"a": "é"}'), ("g", "{}")]),
        (f"{TWO} and  then \n", "and  then", [("g", "{}")]),
        (ONE.removesuffix("</tool_call>"), "", [("f", '{"a": "é"}')]),
        ("a <tool_call>{}</tool_call> b\n", "a <tool_call>{}</tool_call> b\n", []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": 7}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, []),
        ("1 < 2 <tool \n ", "1 < 2 <tool \n ", []),
        ("", "", []),
    ],
)
def test_what_is_said_and_what_is_called(text: str, said: str | None, calls: list[tuple[str, str]]) -> None:
    assert parted(text) == (text if said is None else said, calls)


PARTS = [ONE, TWO, " ", "\n", "a", "<tool", "_call>", "<tool_call>", "</tool_call>", '{"name": "f"}', "<", "b c"]


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 300), max_size=30))
def test_pieces_give_what_the_whole_gives(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    assert parted(text, cuts) == parted(text) == parted(text, range(len(text)))
    if not parted(text)[1]:
        assert parted(text)[0] == text


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_reply_with_calls_whole_and_streamed(finish: str) -> None:
    ask = Ask(kind="chat", prompts=((1,),), most_new=99, samplings=(Sampling(),), may_call=True)
    text, reply = f"Hm.\n{ONE}\n{TWO}", Reply(ask, "m", Plain())
    pieces = [reply.add(0, Event(text=each)) for each in text] + [reply.add(0, Event(finish=finish))]
    choices = [piece["choices"][0] for piece in pieces if piece]
    (whole,) = reply.whole()["choices"]
    expected = "tool_calls" if finish == "stop" else "length"
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == expected
    assert whole["message"]["content"] == "".join(each["delta"].get("content", "") for each in choices) == "Hm."
    rows = [row for each in choices for row in each["delta"].get("tool_calls", [])]
    assert [row.pop("index") for row in rows] == [0, 1] and rows == whole["message"]["tool_calls"]
    assert rows[0]["function"] == {"name": "f", "arguments": '{"a": "é"}'} and rows[0]["id"] != rows[1]["id"]


def test_the_template_is_shown_tools_and_earlier_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    ask = read({"messages": messages, "tools": [TOOL], "tool_choice": "auto"}, "chat", served(QWEN))
    shown = 'user:hi;assistant:<tool_call>f{"a": 1}</tool_call>;tool:5;'
    assert ask.may_call and Plain().decode(ask.prompts[0]) == f"{json.dumps(TOOL)}<tool_call>{shown}"
    ask = read({"messages": messages, "tools": [TOOL], "tool_choice": "none"}, "chat", served(QWEN))
    assert not ask.may_call and Plain().decode(ask.prompts[0]) == shown
    assert not read({"messages": messages[:1], "tools": None}, "chat", served(QWEN)).may_call


class Silent(Plain):
    """To whom <tool_call> is a special token, whose text is left out."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace("<tool_call>", "")


@pytest.mark.parametrize(
    ("source", "words"),
    [("{{ tools }}", Plain()), (QWEN + "<function=", Plain()), (QWEN, Silent())],
    ids=["no calls", "another form", "a silent token"],
)
def test_other_forms_of_calls_are_refused(source: str, words: Plain) -> None:
    with pytest.raises(Failure, match="writes no calls as <tool_call>"):
        read({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}, "chat", served(source, words))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "user", "content": "a", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": ["f"], "arguments": "{}"}}]},
    ],
    ids=str,
)
def test_calls_of_another_form_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(Failure) as error:
        read({"messages": [message]}, "chat", served(QWEN))
    assert error.value.status == 400 and str(error.value.param).startswith("messages[0].")
