"""Messages become a prompt by the model's own template, in jinja2's sandbox: a template comes with a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sublight.errors import BadInput

MOST_CHARACTERS = 4_000_000  # of a prompt that a template makes
END = "<<the end of the last message>> "  # where one that goes on is cut off; a template that trims takes the space


class Template:
    """One model's template; a broken one is refused when the folder is read."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise BadInput("chat templates need jinja2: pip install 'sublight[serve]'") from None
        self._error: Any = TemplateError
        self._tokens = dict(tokens)
        self.writes_calls = "tools" in source and "<tool_call>" in source and "<function=" not in source  # Hermes' form
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise BadInput(f"the model's chat template is broken: {error}") from None

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] = {},
        *,
        begins_reply: bool = True,
        goes_on: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """`options` are the template's own; with `goes_on` the text ends where the last message does."""
        shown = list(messages)
        if goes_on:
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + END}
        given = {**self._tokens, "messages": shown, "tools": tools, "documents": None}
        if taken := sorted(set(options) & set(given)):
            raise BadInput(f"chat_template_kwargs has {taken[0]}, which is not a template's option: leave it out")
        try:
            text = self._template.render(**given, **{"add_generation_prompt": begins_reply, **options})
        except self._error as error:
            raise BadInput(f"the model's chat template refuses these messages: {error}") from None
        except Exception as error:  # a template is a program: a wrong type in a message is its own error
            raise BadInput(f"the model's chat template fails: {type(error).__name__}: {error}") from None
        if len(text) > MOST_CHARACTERS:
            raise BadInput(f"the chat template makes more than {MOST_CHARACTERS} characters of these messages")
        if not goes_on:
            return str(text)
        before, *behind = text.split(END.rstrip())
        if len(behind) != 1:
            raise BadInput("the model's chat template does not show the last message as it is: it cannot go on")
        return str(before if END in text else before.rstrip())


def _environment() -> Any:
    """What transformers gives to a template: loop controls, `generation` blocks, tojson's options, two functions."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks an assistant's words for training: here they are shown as they are."""

        tags = frozenset({"generation"})  # type: ignore[assignment,unused-ignore]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    box = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    box.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    box.globals.update(raise_exception=refuse, strftime_now=_now)
    return box


def _now(form: str) -> str:
    import time

    return time.strftime(form)


def read(folder: Path) -> Template | None:
    """Of chat_template.jinja, or of tokenizer_config.json; None where there is none."""
    settings: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    try:
        if path.exists():
            settings = json.loads(path.read_text(encoding="utf-8"))
        source = settings.get("chat_template")
        if (folder / "chat_template.jinja").exists():
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise BadInput(f"cannot read {path}: fetch the model again") from None
    if isinstance(source, list):  # several by name
        named = {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    if not isinstance(source, str):
        return None
    tokens = {name: _token(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return Template(source, tokens)


def _token(value: Any) -> str:
    """A token is its text, or a record with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
