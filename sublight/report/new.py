"""What `sublight new` wrote, what to do next, and what is missing here for it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sublight.extensions.projects.ways import way_of
from sublight.extensions.projects.write import Project
from sublight.extensions.toolchain import Trouble
from sublight.report.draw.tables import note, plain, wrapped

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(project: Project, missing: Sequence[Trouble]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    out = plain(("file", "what it is"), fold=("what it is",))
    for file, words in project.files.items():
        out.add_row(note(file, ""), wrapped(words))
    return Group(
        Text(f"{project.folder}: {way_of(project.way).summary.replace('`', '')}"),
        out,
        Text(""),
        *(Text(f"{each.problem}: {each.fix}", style="bold red") for each in missing),
        Text(f"Next: cd {shlex.quote(str(project.folder))} && make  (builds, tests, benches)"),
    )


def to_json(project: Project, missing: Sequence[Trouble]) -> dict[str, Any]:
    written = dataclasses.asdict(project) | {"folder": str(project.folder)}
    return written | {"missing": [dataclasses.asdict(each) for each in missing]}
