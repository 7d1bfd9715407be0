"""Tools of a chat: what a client offers goes to the model's template, and calls that the model writes in Hermes' form,
as Qwen's models do, become OpenAI's.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sublight.engines.generate.vocabulary import Vocabulary
from sublight.engines.serve.chat import Template
from sublight.engines.serve.failures import invalid

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON

    @property
    def row(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def offered(data: Mapping[str, Any], template: Template, words: Vocabulary) -> list[dict[str, Any]] | None:
    """The tools that the template shows; None where there are none, or none may be called."""
    tools, choice = data.get("tools") or None, data.get("tool_choice")
    if tools is None:
        if choice not in (None, "none"):
            raise invalid("tool_choice needs tools: leave it out", "tool_choice")
        return None
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise invalid('tools is a list: [{"type": "function", "function": {"name": "…", "parameters": {…}}}]', "tools")
    if any(tool["function"].get("strict") for tool in tools):
        raise invalid("tools cannot be strict here: nothing makes arguments fit their schema", "tools")
    if choice not in (None, "auto", "none"):
        raise invalid("tool_choice is auto or none here: nothing makes this model call", "tool_choice")
    if data.get("parallel_tool_calls") is False:
        raise invalid("parallel_tool_calls cannot be false here: leave it out", "parallel_tool_calls")
    if choice == "none":
        return None
    if not template.writes_calls or BEGIN not in words.decode(words.encode(BEGIN, is_whole=True)):
        raise invalid(f"this model's chat template writes no calls as {BEGIN}: leave tools out", "tools")
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return False
    return isinstance(function.get("parameters") or {}, dict)


def shown(calls: Any, where: str) -> list[dict[str, Any]]:
    """An earlier reply's calls as templates take them: arguments as an object, not as its JSON."""
    rows = []
    for each in calls if isinstance(calls, list) else [None]:
        call: dict[str, Any] = each if isinstance(each, dict) else {}
        function: Any = call.get("function")
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ("", "")
        if not isinstance(name, str) or (made := _object(arguments)) is None:
            words = 'is a list of {"id": …, "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            raise invalid(f"{where}.tool_calls {words}", f"{where}.tool_calls")
        rows.append({**call, "function": {"name": name, "arguments": made}})
    return rows


class Calls:
    """One reply's text as it comes, parted into what is said and what is called. What looks like a call and is none is
    said as it is; white space around calls is left out."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._held = ""  # not yet known to be said
        self._is_behind_call = False

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        said, before = "", len(self.calls)
        self._held += text
        while BEGIN in self._held and (END in self._held.partition(BEGIN)[2] or is_last):
            plain, _, behind = self._held.partition(BEGIN)
            inner, end, self._held = behind.partition(END)
            if call := _call(inner):
                said += self._parted(plain).rstrip()
                self.calls.append(call)
                self._is_behind_call = True
            else:
                said += self._parted(f"{plain}{BEGIN}{inner}{end}")
        sure = len(self._held) if is_last else self._sure()
        rest, self._held = self._parted(self._held[:sure]), self._held[sure:]
        said += rest.rstrip() if is_last and self.calls else rest
        return said, self.calls[before:]

    def _parted(self, text: str) -> str:
        text = text.lstrip() if self._is_behind_call else text
        self._is_behind_call &= not text
        return text

    def _sure(self) -> int:
        """Characters in front of a call, or of what may become one, and of white space in front of that."""
        place = self._held.find(BEGIN)
        if place < 0:
            count = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
            place = len(self._held) - count
        return len(self._held[:place].rstrip())


def _call(inner: str) -> Call | None:
    data = _object(inner)
    if data is None or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(f"call_{secrets.token_hex(12)}", data["name"], json.dumps(arguments, ensure_ascii=False))


def _object(text: Any) -> dict[str, Any] | None:
    """
    >>> _object('{"a": 1}'), _object("[1]"), _object('{"a": NaN}')
    ({'a': 1}, None, None)
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    try:
        data = json.loads(text, parse_constant=refuse)
    except (TypeError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
