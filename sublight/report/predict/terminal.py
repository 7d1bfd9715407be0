"""Predictions in the terminal: one table a step, a line on what bounds it, and the ops where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.cost.dtypes import SPELLINGS
from sublight.report.draw.tables import Fitting, plain, titled

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Row = Mapping[str, Any]  # a prediction as data.py makes it
TITLES = {
    "prefill": "Prefill: time to the first token",
    "decode": "Decode: time of a token of every sequence",
    "forward": "Forward pass",
    "train": "Training step",
}
MOST_OPS = 3  # ops that the line below a table names
_SHORT = {"float32": "fp32", **{name: word for word, name in reversed(SPELLINGS.items()) if word[-1].isdigit()}}


def short_dtype(name: str) -> str:
    """
    >>> short_dtype("bfloat16"), short_dtype("float8_e4m3fn"), short_dtype("int4")
    ('bf16', 'fp8', 'int4')
    """
    return name if name.startswith("int") else _SHORT.get(name, name)


def billions(number: float) -> str:
    """As people count parameters.

    >>> billions(8_030_261_248), billions(124_439_808)
    ('8.03 B', '124 M')
    """
    return units.text(number, "").strip().replace("G", "B")


def label(row: Row) -> str:
    changes = [f"{knob} x{factor:g}" for knob, factor in row["what_if"].items()]
    return " ".join([row["gpu"], *changes])


def headline(document: Row) -> str:
    model, types = document["model"], document["precision"]
    words = [model["name"], f"{billions(model['parameters'])} parameters"]
    if model["active_parameters"] != model["parameters"]:
        words.append(f"{billions(model['active_parameters'])} active")
    words.append(kinds(types))
    if model["cache_bytes_per_token"]:
        words.append(f"cache {units.text(model['cache_bytes_per_token'], 'B')} a token")
    return " · ".join(words)


def kinds(types: Row) -> str:
    """fp8, or bf16, weights int4, cache fp8."""
    words = short_dtype(types["products"])
    if types["weights"] != types["products"]:
        words += f", weights {short_dtype(types['weights'])}"
    if types["cache"] != "bfloat16":
        words += f", cache {short_dtype(types['cache'])}"
    return words


def rise(types: Row) -> str:
    """How much fewer bits raised the perplexity (+1.7 to 1.8 %), or that it was not measured."""
    measured = types["perplexity_rise"]
    if measured is None:
        return "not measured"
    ends = list(dict.fromkeys(f"{100 * measured[name]:.2g}" for name in ("least", "most")))
    return f"+{' to '.join(ends)} %" if measured["most"] else "reference"


def in_fp8(document: Row) -> list[str]:
    """What a product in fp8 holds, where one is shown."""
    types = [document["precision"], *(row["precision"] for row in document["precisions"])]
    if not any(each["products"].startswith("float8") for each in types):
        return []
    return [
        "Products in fp8 find the scale of their input at each call, some 10 µs, as TensorRT-LLM's layers do: where"
        " scales are known before, or a norm finds them, small ones take less."
    ]


def accuracy(document: Row) -> str:
    """How much accuracy fewer bits cost the model that was measured; empty for 16 bits."""
    types = document["precision"]
    of_whom = f"of {types['perplexity_of']}, not of {document['model']['name']}"
    if document["precisions"]:
        return f"Perplexity: {of_whom}."
    if measured := types["perplexity_rise"]:
        return f"Perplexity in {kinds(types)}: {rise(types)}, {of_whom}." if measured["most"] else ""
    return f"What {kinds(types)} costs in accuracy was not measured here."


def page(document: Row, *, census: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = document["predictions"]
    parts: list[RenderableType] = [Text(headline(document), style="bold")]
    parts += [Text(f"! {note}", style="yellow") for note in document["model"]["notes"]]
    for mode in TITLES:
        of_mode = [row for row in rows if row["mode"] == mode]
        if of_mode:
            parts += [Text(""), titled(TITLES[mode], _steps(of_mode)), *_lines(of_mode)]
    parts += _precisions(document)
    if census:
        parts += [part for row in rows if row["fits"] for part in (Text(""), _census(row))]
    parts += [Text(""), *(Text(note, style="dim") for note in (*notes(rows), *in_fp8(document)))]
    return Group(*parts)


def _precisions(document: Row) -> list[RenderableType]:
    """The first step of each kind in every data type, and what each cost a model in accuracy."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for mode in TITLES:
        rows = [row for row in document["precisions"] if row["mode"] == mode]
        if rows:
            choices = tuple(_precision_table(rows, without) for without in ((), ("±",), ("±", "weights")))
            where = f"batch {rows[0]['batch']}, context {rows[0]['context']}"
            parts += [Text(""), titled(f"Data types: {mode}, {where}", Fitting(choices))]
    return [*parts, *([Text(words, style="dim")] if (words := accuracy(document)) else [])]


def precision_cells(row: Row) -> dict[str, str]:
    """One step in one precision."""
    head = {"GPU": label(row), "data types": kinds(row["precision"])}
    held = {"weights": units.text(row["memory_bytes"]["weights"], "B"), "perplexity": rise(row["precision"])}
    if not row["fits"]:
        return head | {"time": "no room", "±": "–", "tokens/s": "–", "J/token": "–"} | held
    return (
        head
        | {
            "time": units.text(row["expected_s"], "s"),
            "±": f"{100 * row['error']:.0f} %",
            "tokens/s": units.text(row["tokens_per_s"], "").strip(),
            "J/token": f"{row['joules_per_token']:.3g}" if row["joules_per_token"] else "–",
        }
        | held
    )


def _precision_table(rows: Sequence[Row], without: Sequence[str]) -> Table:
    cells = [precision_cells(row) for row in rows]
    names = [name for name in cells[0] if name not in without]
    out = plain(names, right=[name for name in names if name not in ("GPU", "data types")])
    for cell in cells:
        out.add_row(*(cell[name] for name in names))
    return out


def _steps(rows: Sequence[Row]) -> RenderableType:
    """Columns are left out before figures are cut: what a figure is made of goes first."""
    dropped: tuple[tuple[str, ...], ...] = (
        (),
        ("J/token",),
        ("J/token", "largest"),
        ("J/token", "largest", "MFU"),
        ("J/token", "largest", "MFU", "how"),
        ("J/token", "largest", "MFU", "how", "memory"),
        ("J/token", "largest", "MFU", "how", "memory", "floor"),
        ("J/token", "largest", "MFU", "how", "memory", "floor", "±", "context"),
    )
    return Fitting(tuple(_table(rows, without) for without in dropped))


def _table(rows: Sequence[Row], without: Sequence[str]) -> Table:
    cells = [_cells(row, rows) for row in rows]
    empty = [name for name in cells[0] if all(cell[name] in ("", "–") for cell in cells)]
    names = [name for name in cells[0] if name not in without and name not in empty]
    out = plain(names, right=[name for name in names if name not in ("GPU", "on", "how")])
    for cell in cells:
        out.add_row(*(cell[name] for name in names))
    return out


def how_known(row: Row) -> str:
    """In which way most of the time is known, and how much of it.

    >>> how_known({"how": {"analytic": 0.1, "measured": 0.9}}), how_known({"how": {"carried over": 1.0}})
    ('measured 90 %', 'carried')
    """
    way, share = max(row["how"].items(), key=lambda pair: pair[1])
    return str(way).removesuffix(" over") + ("" if share >= 0.995 else f" {units.percent(share)}")


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    memory = row["memory_bytes"]
    head = {
        "GPU": label(row),
        "on": row["parallel"] if row["gpus"] > 1 else "",
        "batch": str(row["batch"]),
        "context": str(row["context"]),
    }
    tail = {"memory": units.text(memory["total"], "B"), "largest": str(row["largest_batch"])}
    if not row["fits"]:
        blank = dict.fromkeys(("time", "±", "how", "floor", "gain", "tokens/s", "MFU", "$/M", "J/token"), "–")
        return head | blank | {"time": "no room"} | tail
    price = row["price_per_million_tokens"]
    return (
        head
        | {
            "time": units.text(row["expected_s"], "s"),
            "±": f"{100 * row['error']:.0f} %",
            "how": how_known(row),
            "floor": units.text(row["floor_s"], "s"),
            "gain": _gain(row, rows),
            "tokens/s": units.text(row["tokens_per_s"], "").strip(),
            "MFU": units.percent(row["mfu"]),
            "$/M": "" if price is None else f"{price:.3g}",
            "J/token": f"{row['joules_per_token']:.3g}" if row["joules_per_token"] else "",
        }
        | tail
    )


def _gain(row: Row, rows: Sequence[Row]) -> str:
    """How much faster a --what-if GPU is than the same GPU unchanged."""
    keys = ("gpu", "mode", "batch", "context", "parallel")
    plain_rows = [other for other in rows if not other["what_if"] and other["fits"]]
    same = next((other for other in plain_rows if all(other[key] == row[key] for key in keys)), None)
    return f"x{same['expected_s'] / row['expected_s']:.2f}" if row["what_if"] and same else ""


def _lines(rows: Sequence[Row]) -> list[RenderableType]:
    """Lines below the table: what bounds the first and the last row that fit, and which rows do not fit."""
    from rich.text import Text

    fitting = [row for row in rows if row["fits"]]
    shown = dict.fromkeys(id(row) for row in (fitting[:1] + fitting[-1:]))
    lines = [Text(bound_sentence(row), style="dim") for row in fitting if id(row) in shown]
    misfits = [Text(misfit(row), style="yellow") for row in rows if not row["fits"]]
    return [*lines, *misfits[:3], *([Text(f"… and {len(misfits) - 3} more without room")] if len(misfits) > 3 else [])]


def bound_sentence(row: Row) -> str:
    """h100, batch 1, context 4096: 78 % memory, 22 % launch; MLP up 41 %, MLP down 21 %, attention 14 %."""
    shares = ", ".join(f"{units.percent(share)} {name}" for name, share in row["bounds"].items() if share >= 0.01)
    sums: dict[str, float] = {}
    for op in row["ops"]:
        name = op["name"].removesuffix(" (weight)").removesuffix(" (again)")
        sums[name] = sums.get(name, 0.0) + op["share"]
    largest = sorted(sums.items(), key=lambda pair: -pair[1])[:MOST_OPS]
    ops = ", ".join(f"{name} {units.percent(share)}" for name, share in largest)
    return f"{label(row)}, batch {row['batch']}, context {row['context']}: bound by {shares}; {ops}"


def misfit(row: Row) -> str:
    """Why a step does not fit into memory, and what would."""
    memory = row["memory_bytes"]
    kinds = {kind: size for kind, size in memory.items() if kind not in ("total", "room")}
    what, size = max(kinds.items(), key=lambda pair: pair[1])
    over = units.text(memory["total"] - memory["room"], "B")
    words = f"{label(row)}: {row['mode']} at batch {row['batch']}, context {row['context']} needs"
    words += f" {units.text(memory['total'], 'B')} of {units.text(memory['room'], 'B')}, {over} too much"
    if row["largest_batch"]:
        return f"{words}: batch {row['largest_batch']} fits"
    return f"{words}, {units.text(size, 'B')} of it {what}: {_remedy(row, what)}"


def _remedy(row: Row, what: str) -> str:
    if row["mode"] == "train" and what in ("optimizer", "gradients"):
        return "--tp, --pp or --lora 16 would lower it"
    if row["mode"] == "train" and what == "activations":
        return "--checkpointing would lower it"
    return "--tp 2 or more, or --weights int4, would lower it" if what == "weights" else "a shorter --context would fit"


def _census(row: Row) -> RenderableType:
    """Every op: how often, its arithmetic and bytes, what bounds it, its share of the time."""
    full = ("op", "shape", "count", "FLOP", "bytes", "FLOP/B", "bound", "floor", "time", "share", "how")
    choices = []
    for without in ((), ("shape",), ("shape", "FLOP", "bytes"), ("shape", "FLOP", "bytes", "how")):
        names = [name for name in full if name not in without]
        table = plain(names, right=("count", "FLOP", "bytes", "FLOP/B", "floor", "time", "share"))
        for op in sorted(row["ops"], key=lambda op: -op["expected_s"]):
            cells = _op_cells(op)
            table.add_row(*(cells[name] for name in names))
        choices.append(table)
    where = f"{label(row)}, batch {row['batch']}, context {row['context']}"
    return titled(f"Ops of {row['mode']} on {where}", Fitting(tuple(choices)))


def _op_cells(op: Row) -> dict[str, str]:
    sizes = op["shape"]
    return {
        "op": op["name"] + (" bwd" if op["direction"] == "bwd" else ""),
        "shape": "x".join(str(sizes[name]) for name in sizes if name not in ("causal", "tensors", "ranks")),
        "count": str(op["count"]),
        "FLOP": units.text(op["flops"], "").strip(),
        "bytes": units.text(op["bytes"], "").strip(),
        "FLOP/B": f"{op['intensity']:.3g}",
        "bound": op["bound"],
        "floor": units.text(op["floor_s"], "s"),
        "time": units.text(op["expected_s"], "s"),
        "share": units.percent(op["share"]),
        "how": op["how"],
    }


def overlaps(rows: Sequence[Row]) -> list[str]:
    """What is assumed about links, where some of their time is hidden behind computation."""
    hidden = max((row["hidden_s"] for row in rows), default=0.0)
    if not hidden:
        return []
    return [
        f"Assumed: gradients travel while the backward pass runs, all but one layer's; that hides up to "
        f"{units.text(hidden, 's')}, which --no-overlap counts."
    ]


def lower_clocks(rows: Sequence[Row]) -> list[str]:
    """A line on GPUs whose power cap makes long products slower than a burst."""
    shares = {row["gpu"]: row["clock_share"] for row in rows if row["clock_share"] < 1}
    if not shares:
        return []
    share = units.percent(min(shares.values()))
    return [f"Training on {', '.join(shares)}: products at {share} of the highest clock, which the power limit leaves."]


def notes(rows: Sequence[Row]) -> list[str]:
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        return ["Nothing fits: no time is given."]
    ways = sorted({way for row in fitting for way in row["how"]})
    words = {
        "measured": "measured: tables of this GPU",
        "carried over": "carried over: tables of its architecture",
        "analytic": "analytic: its figures alone",
    }
    return [
        *overlaps(fitting),
        *lower_clocks(fitting),
        "Times: " + "; ".join(words[way] for way in ways) + ". ± is the 90th percentile of held-out errors, as if all"
        " ops were off the same way. Kernels are fused and launched from a graph. --census shows every op.",
        "Memory is counted, not measured: four training runs on an H200 were within 5 %. J/token is at most: at the"
        " board's power limit.",
    ]
