"""A recorded step on other GPUs, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.diagnose.elsewhere import Elsewhere
from sublight.report.draw.tables import Fitting, plain, titled

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 12
UNCHECKED = "All times there are analytic; no step was recorded on two GPUs, so how far off they are is not known."


def to_json(rows: Sequence[Elsewhere]) -> dict[str, Any]:
    first = rows[0]
    return {
        "source": first.source,
        "recorded_on": first.recorded_on,
        "steps": first.steps,
        "step_s": first.step_s,
        "busy_s": first.busy_s,
        "copy_s": first.parts["copy"],
        "communication_s": first.parts["communication"],
        "idle_s": first.idle_s,
        "how": "analytic",
        "error": None,
        "note": UNCHECKED,
        "predictions": [
            {
                "gpu": each.machine.key,
                "gpu_name": each.machine.gpu.name,
                "what_if": dict(each.machine.factors),
                "expected_s": each.expected_s,
                "expected_busy_s": each.expected_busy_s,
                "ops": [asdict(op) for op in each.ops],
            }
            for each in rows
        ],
    }


def page(document: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = f"{document['source']}: {units.text(document['step_s'], 's')} a step on {document['recorded_on']}"
    head += f", of which the GPU is busy {units.text(document['busy_s'], 's')}"
    table = plain(["GPU", "step", "busy", "gain"], right=("step", "busy", "gain"))
    for row in document["predictions"]:
        words = " ".join([row["gpu"], *(f"{knob} x{factor:g}" for knob, factor in row["what_if"].items())])
        gain = f"x{document['step_s'] / row['expected_s']:.2f}"
        table.add_row(words, units.text(row["expected_s"], "s"), units.text(row["expected_busy_s"], "s"), gain)
    first = document["predictions"][0]
    names = ("op", "family", "calls", "recorded", "there", "floor", "carried by", "bound")
    right = ("calls", "recorded", "there", "floor")
    choices = [plain([n for n in names if n not in less], right=right) for less in ((), ("family", "carried by"))]
    for choice, less in zip(choices, ((), ("family", "carried by")), strict=True):
        for op in first["ops"][:SHOWN]:
            cells = {
                "op": op["name"][:34],
                "family": op["family"],
                "calls": units.count(op["calls"]),
                "recorded": units.text(op["recorded_s"], "s"),
                "there": units.text(op["expected_s"], "s"),
                "floor": units.text(op["floor_s"] or None, "s"),
                "carried by": op["way"],
                "bound": op["bound"],
            }
            choice.add_row(*(cells[name] for name in names if name not in less))
    notes = (
        "Each op keeps its distance from its floor; one of unknown cost moves with the memory rate, a collective with "
        "that of the links; idle time stays.",
        UNCHECKED,
    )
    return Group(
        Text(head, style="bold"),
        Text(""),
        table,
        Text(""),
        titled(f"Ops on {first['gpu']}", Fitting(tuple(choices))),
        Text(""),
        *(Text(note, style="dim") for note in notes),
    )
