"""Ways to spread a model over GPUs, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.predict.plan import Plan
from sublight.report.draw.tables import Fitting, plain, titled
from sublight.report.predict import data, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHOWN = 8


def to_json(plans: Sequence[Plan], latency_s: float | None) -> dict[str, Any]:
    first = plans[0].prediction
    rows = [{**data.of_prediction(plan.prediction), "meets": plan.meets} for plan in plans]
    for row in rows:
        del row["ops"]
    return {
        "model": data.of_model(first.model, first.step.precision),
        "gpu": first.machine.key,
        "gpus": first.gpus,
        "mode": first.step.mode,
        "context": first.step.context,
        "latency_s": latency_s,
        "plans": rows,
    }


def page(document: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = document["plans"]
    where = f"{document['gpus']} {document['gpu']}, {document['mode']}, context {document['context']}"
    dropped = ((), ("bound",), ("bound", "how"), ("bound", "how", "±"), ("bound", "how", "±", "a GPU"))
    choices = [_table(document, without) for without in dropped]
    more = [Text(f"… and {len(rows) - SHOWN} more: --json has all", style="dim")] if len(rows) > SHOWN else []
    return Group(
        Text(sentence(document), style="bold"),
        *(Text(f"! {note}", style="yellow") for note in document["model"]["notes"]),
        Text(""),
        titled(f"{document['model']['name']} on {where}", Fitting(tuple(choices))),
        *more,
        *(Text(line, style="dim") for line in slower_lines(document)),
        *(Text(note, style="dim") for note in terminal.overlaps(rows)),
        Text("Links are not measured: 80 % of the vendor's rate and 3 µs a hop are assumed.", style="dim"),
    )


def slower_lines(document: Mapping[str, Any]) -> list[str]:
    """Which of the plans shown do not hold the latency; none where the sentence on top says it of all."""
    slower = [row["parallel"] for row in document["plans"][:SHOWN] if not row["meets"]]
    if not slower or not document["plans"][0]["meets"]:
        return []
    return [f"Slower than {units.text(document['latency_s'], 's')}: {', '.join(slower)}."]


def _table(document: Mapping[str, Any], without: Sequence[str]) -> Table:
    every = ("plan", "batch", "time", "±", "how", "floor", "tokens/s", "a GPU", "$/M", "memory", "bound")
    prices = any(row["price_per_million_tokens"] for row in document["plans"])
    without = [*without, *(["a GPU"] if prices else ["$/M"])]
    names = [name for name in every if name not in without]
    table = plain(names, right=[name for name in names if name not in ("plan", "bound", "how")])
    for row in document["plans"][:SHOWN]:
        cells = (
            row["parallel"],
            str(row["batch"]),
            units.text(row["expected_s"], "s"),
            f"{100 * row['error']:.0f} %",
            terminal.how_known(row),
            units.text(row["floor_s"], "s"),
            units.text(row["tokens_per_s"], "").strip(),
            units.text(row["tokens_per_s"] / document["gpus"], "").strip(),
            f"{row['price_per_million_tokens'] or 0:.3g}",
            units.text(row["memory_bytes"]["total"], "B"),
            row["bound"],
        )
        shown = [cell for name, cell in zip(every, cells, strict=True) if name in names]
        table.add_row(*shown, style="" if row["meets"] else "dim")
    return table


def sentence(document: Mapping[str, Any]) -> str:
    """What to do, or how near one comes."""
    best, target = document["plans"][0], document["latency_s"]
    rate = f"{units.text(best['tokens_per_s'], '').strip()} tokens/s"
    time = units.text(best["expected_s"], "s")
    if best["meets"]:
        within = f", within {units.text(target, 's')}" if target else ""
        return f"{best['parallel']}, batch {best['batch']}: {rate}, {time} a step{within}"
    return (
        f"No plan takes {units.text(target, 's')}: the nearest is {best['parallel']}, {time} at batch {best['batch']}"
    )
