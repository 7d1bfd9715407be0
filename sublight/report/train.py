"""A training run for people: what it is, how its loss fell, what it writes; in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.report.draw import page as pages
from sublight.report.draw.curves import Curve, curves

if TYPE_CHECKING:
    from rich.console import RenderableType

Document = Mapping[str, Any]


def heading(document: Document) -> str:
    """The model, its data and its device in a line."""
    shape, run = document["shape"], document["settings"]
    size = f"{units.text(document['parameters'], '')} parameters"
    model = f"{shape['layers']} layers, {shape['dim']} wide, {size}"
    data = f"{document['data']} as {document['tokens']}, {document['train_tokens']:,} tokens"
    device = f"{document['device']}, {run['dtype']}"
    return f"{model}; {data}; {device}"


def derived(document: Document) -> str:
    """The settings that were chosen, since no option gave them."""
    run = document["settings"]
    words = f"{run['steps']} steps of {run['batch']} x {run['context']} tokens"
    if run["accumulate"] > 1:
        words += f" in {run['accumulate']} parts"
    words += f", learning rate {run['lr']:g} after {run['warmup']} steps, seed {run['seed']}"
    return f"{words}; {run['mode']}, attention {run['attention']}; in {document['folder']}"


def page(document: Document) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(sentence(document), style="bold"), Text(speed(document), style="dim")]
    if document["sample"]:
        parts += [Text(""), Text("a sample:", style="dim"), Text(document["prompt"] + document["sample"]), Text("")]
    parts += [Text(line, style="dim") for line in document["notes"]]
    return Group(*parts)


def sentence(document: Document) -> str:
    """A sentence: how far the loss fell."""
    first, last, held_out = document["first_loss"], document["loss"], document["held_out_loss"]
    if last is None:
        return f"Nothing was left to do: {document['step']} steps are done, held-out loss {held_out:.3f}."
    words = f"Step {document['step']} of {document['settings']['steps']}: the loss went from {first:.3f} to {last:.3f}"
    return f"{words}; of held-out text it is {held_out:.3f}."


def speed(document: Document) -> str:
    rate = f"{document['tokens_per_s']:,.0f} tokens/s" if document["tokens_per_s"] else "no step was run"
    floor = document["limit_tokens_per_s"]
    if floor and document["tokens_per_s"]:
        share = units.percent(document["tokens_per_s"] / floor)
        source = document["limit_source"]
        rate += f", {share} of what matrix products alone allow here ({floor:,.0f} tokens/s by the {source} limit)"
    elif document["tokens_per_s"]:
        rate += "; `sublight limits` would tell how much the products here allow"
    return f"{rate}; {units.text(document['memory_bytes'], 'B')} of memory at the peak"


def html(document: Document, rows: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained page: both curves, the sample, every setting."""
    losses = [(float(row["step"]), float(row["loss"])) for row in rows if "loss" in row]
    held_out = [(float(row["step"]), float(row["held_out_loss"])) for row in rows if "held_out_loss" in row]
    drawn = [
        Curve(name="training", points=losses),
        Curve(name="held out", points=held_out, marked=len(held_out) <= 60),
    ]
    picture = curves("Loss by step", drawn, across="step", up="loss (nats)")
    text = escape(document["prompt"] + document["sample"])
    sample = f'<h2>A sample</h2><pre style="white-space: pre-wrap; overflow-wrap: anywhere">{text}</pre>'
    settings: list[pages.Row] = [("", [("", key), ("r", str(value))]) for key, value in document["settings"].items()]
    table = pages.table([("", "setting"), ("r", "value")], settings)
    lead = f"{sentence(document)} {speed(document)}."
    body = (f"<p>{escape(heading(document))}</p>", picture, sample if document["sample"] else "")
    return pages.document(f"Training in {document['folder']}", lead, *body, "<h2>Settings</h2>", table)
