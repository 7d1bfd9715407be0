"""Messages become a prompt by the model's own template, in jinja2's sandbox: a template comes with a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sublight.errors import BadInput

MOST_CHARACTERS = 4_000_000  # of a prompt that a template makes


class Template:
    """One model's template; a broken one is refused when the folder is read."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise BadInput("chat templates need jinja2: pip install 'sublight[serve]'") from None

        def refuse(message: str) -> None:
            raise TemplateError(message)

        box = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        box.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        box.globals.update(raise_exception=refuse, strftime_now=_now)
        self._error: Any = TemplateError
        self._tokens = dict(tokens)
        try:
            self._template = box.from_string(source)
        except TemplateError as error:
            raise BadInput(f"the model's chat template is broken: {error}") from None

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            given = {**self._tokens, "messages": list(messages), "tools": None, "add_generation_prompt": True}
            text = self._template.render(**given)
        except self._error as error:
            raise BadInput(f"the model's chat template refuses these messages: {error}") from None
        except Exception as error:  # a template is a program: a wrong type in a message is its own error
            raise BadInput(f"the model's chat template fails: {type(error).__name__}: {error}") from None
        if len(text) > MOST_CHARACTERS:
            raise BadInput(f"the chat template makes more than {MOST_CHARACTERS} characters of these messages")
        return text


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
    except (OSError, ValueError, AttributeError):
        raise BadInput(f"cannot read {path}: fetch the model again") from None
    if isinstance(source, list):  # several by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    if not isinstance(source, str):
        return None
    tokens = {name: _token(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return Template(source, tokens)


def _token(value: Any) -> str:
    """A token is its text, or a record with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
