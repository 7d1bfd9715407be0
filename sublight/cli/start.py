"""Build the command for one line of words, and no more: to inspect every verb takes typer as long as a small trace.

From version 0.29 on typer converts values by pydantic, whose import takes as long again. Nearly all words of ours are
text that stays text: these are let through, and typer converts the others when one comes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import typer

COMPLETES = "_SUBLIGHT_COMPLETE"  # set by a shell that completes words: then all verbs are needed


def command_for(app: typer.Typer, words: Sequence[str]) -> Any:
    """`app`, which has a callback, as a command; with a single verb where the first word names one."""
    named = [verb for verb in app.registered_commands if words and _name(verb) == words[0]]
    if named and COMPLETES not in os.environ:
        app = copy.copy(app)
        app.registered_commands = named
    command: Any = typer.main.get_command(app)
    for each in (command, *command.commands.values()):
        each.get_params = _PlainParameters(each.get_params)
    return command


def _name(verb: Any) -> str:
    return str(verb.name or verb.callback.__name__)


class _PlainParameters:
    """Replaces a command's `get_params`: its parameters convert only what needs conversion."""

    def __init__(self, of_typer: Any) -> None:
        self.of_typer = of_typer

    def __call__(self, ctx: Any) -> Any:
        parameters = self.of_typer(ctx)
        for each in parameters:
            if hasattr(each, "get_runtime_param") and not isinstance(each.get_runtime_param, _Plain):  # typer >= 0.29
                each.get_runtime_param = _Plain(each.get_runtime_param)
            if each.param_type_name == "argument" and hasattr(each, "display_type_rich"):  # typer >= 0.29
                each.display_type_rich = _no_type
        return parameters


def _no_type(ctx: Any) -> None:
    """In the help, an argument's name says more than `<list[str]>` behind it."""


class _Plain:
    """Replaces typer's conversion: values that have their type already stay, others are converted by typer."""

    def __init__(self, of_typer: Any) -> None:
        self.of_typer = of_typer

    def __call__(self) -> _Plain:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if not param.type_descriptor.parameter_info.parser and has_type(value, param.type_descriptor.annotation):
            return list(value) if isinstance(value, tuple) else value
        return self.of_typer().coerce(value, param=param, ctx=ctx)


def has_type(value: Any, annotation: Any) -> bool:
    """Whether a value needs no conversion; a number in place of a word is a default.

    >>> has_type("a", str), has_type("4", int), has_type(4, int), has_type(("a", "b"), list[str]), has_type(4, float)
    (True, False, True, True, False)
    """
    if annotation == list[str]:
        return isinstance(value, list | tuple) and all(type(each) is str for each in value)
    return annotation in (str, int, float, bool) and type(value) is annotation
