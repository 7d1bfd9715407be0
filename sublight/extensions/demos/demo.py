"""A demonstration: a question about the GPU that a run answers with figures; each is a file to read, with its kernels.

What a run found is tables and timelines in SI units. `recorded.json` holds the last run on a GPU, for those without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.extensions.demos.gpu import Gpu

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded.json"
Unit = Literal["", "s", "B", "B/s", "1/s", "fraction", "count", "number", "times"]
Cell = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: tuple[tuple[str, Unit], ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    lane: str
    name: str
    start_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    title: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one demonstration showed; what could not be measured says why in `missing`."""

    tables: tuple[Table, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    name: str
    question: str
    expect: str  # what a GPU will show, and why
    run: Callable[[Gpu], Figures]
    source: str = ""  # a file in kernels/; ../demos/NAME.cu is one beside this file
    kernels: tuple[str, ...] = ()
    offline: Callable[[], Figures] | None = None  # the part that needs no GPU

    @property
    def files(self) -> tuple[str, ...]:
        """The demonstration's files: its kernels, then the code that launches them."""
        python = f"{self.name.replace('-', '_')}.py"
        return (*([Path(self.source).name] if self.source.startswith("../demos/") else []), python)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A run of several demonstrations on one machine."""

    gpu: str
    driver: str
    date: str
    commit: str
    figures: Mapping[str, Figures]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"figures": {name: each.to_json() for name, each in self.figures.items()}}


def read_record(path: Path = RECORDED) -> Record | None:
    """The recorded run; None where there is none."""
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        figures = {name: figures_of(each) for name, each in data["figures"].items()}
        return Record(**{key: str(data[key]) for key in ("gpu", "driver", "date", "commit")}, figures=figures)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is no record of `sublight demo --all --json`: {error}") from None


def figures_of(data: Mapping[str, Any]) -> Figures:
    tables = [
        Table(
            title=each["title"],
            columns=tuple((name, unit) for name, unit in each["columns"]),
            rows=tuple(tuple(row) for row in each["rows"]),
            note=each["note"],
        )
        for each in data["tables"]
    ]
    timelines = [
        Timeline(title=each["title"], spans=tuple(Span(**span) for span in each["spans"])) for each in data["timelines"]
    ]
    return Figures(tables=tuple(tables), timelines=tuple(timelines), missing=tuple(data["missing"]))
