"""Generated texts for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(document: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for row in document["texts"]:
        ended = "" if row["finish"] == "length" else f"  ({row['finish']})"
        parts += [Text.assemble((row["prompt"], "bold"), " → ", row["text"], (ended, "dim")), Text("")]
    words = f"{document['new_tokens']} new tokens, {document['tokens_per_s']:,.1f} tokens/s"
    return Group(*parts, Text(words, style="dim"))
