"""Two kernels, or two versions of one: which figures changed, and which instructions came and went."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sublight.op import BadInput
from sublight.report.tables import note, plain
from sublight.report.xray import facts
from sublight.xray.examine import Page
from sublight.xray.record import Finding
from sublight.xray.sass.asm_lines import read

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same kernel before and after."""

    before: Page
    after: Page

    @property
    def figures(self) -> dict[str, tuple[str, str]]:
        before, after = facts(self.before), facts(self.after)
        return {name: (before.get(name, ""), after.get(name, "")) for name in dict.fromkeys((*before, *after))}

    @property
    def kinds(self) -> dict[str, tuple[int, int]]:
        """Instructions by kind, where their number changed."""
        before, after = (_counts(page) for page in (self.before, self.after))
        names = dict.fromkeys((*before, *after))
        every = {name: (before.get(name, 0), after.get(name, 0)) for name in names}
        return {name: counts for name, counts in every.items() if counts[0] != counts[1]}

    @property
    def lines_changed(self) -> tuple[int, int]:
        """SASS instructions that are gone and that are new, registers and addresses left aside."""
        before, after = ([_shape(each) for each in read(page.code)] for page in (self.before, self.after))
        steps = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
        changed = [step for step in steps if step[0] != "equal"]
        return sum(step[2] - step[1] for step in changed), sum(step[4] - step[3] for step in changed)

    @property
    def cured(self) -> list[Finding]:
        return _only(self.before.findings, self.after.findings)

    @property
    def caused(self) -> list[Finding]:
        return _only(self.after.findings, self.before.findings)

    def to_json(self) -> dict[str, Any]:
        gone, new = self.lines_changed
        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "figures": {name: list(values) for name, values in self.figures.items() if values[0] != values[1]},
            "instructions": {name: list(counts) for name, counts in self.kinds.items()},
            "instructions_gone": gone,
            "instructions_new": new,
            "cured": [finding.to_json() for finding in self.cured],
            "caused": [finding.to_json() for finding in self.caused],
        }


def paired(before: Sequence[Page], after: Sequence[Page]) -> list[Pair]:
    """By name and GPU; one kernel against one, whatever they are called."""
    if len(before) == len(after) == 1:
        return [Pair(before=before[0], after=after[0])]
    known = {(page.code.name, page.code.gpu.key): page for page in after}
    found = [
        Pair(before=page, after=known[page.code.name, page.code.gpu.key])
        for page in before
        if (page.code.name, page.code.gpu.key) in known
    ]
    if not found:
        names = [", ".join(dict.fromkeys(page.code.name for page in pages)) for pages in (before, after)]
        raise BadInput(f"no kernel is in both: {names[0]} against {names[1]}; name one of each, as FILE:KERNEL")
    return found


def to_json(pairs: Sequence[Pair]) -> dict[str, Any]:
    return {"kernels": [pair.to_json() for pair in pairs]}


def page(pairs: Sequence[Pair]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for pair in pairs:
        before, after = pair.before.code, pair.after.code
        names = before.name if before.name == after.name else f"{before.name} → {after.name}"
        on = before.gpu.key if before.gpu.key == after.gpu.key else f"{before.gpu.key} → {after.gpu.key}"
        parts.append(Text.assemble((names, "bold"), (f"  {on}", "dim")))
        table = plain(("", "before", "after", ""), right=("before", "after"))
        for name, (old, new) in pair.figures.items():
            table.add_row(name, old, new, "" if old == new else note("changed", "bold"))
        for name, (old_count, new_count) in pair.kinds.items():
            table.add_row(
                f"{name} instructions", str(old_count), str(new_count), note(f"{new_count - old_count:+d}", "")
            )
        parts.append(table)
        gone, new_lines = pair.lines_changed
        parts.append(
            Text(f"  {gone} instructions gone, {new_lines} new" if gone or new_lines else "  the same instructions")
        )
        parts += [_line("− ", "green", finding) for finding in pair.cured]
        parts += [_line("+ ", "bold red", finding) for finding in pair.caused]
        parts.append(Text(""))
    return Group(*parts[:-1])


def _line(sign: str, style: str, finding: Finding) -> RenderableType:
    from rich.text import Text

    at = f" line {finding.place.line}" if finding.place else ""
    return Text.assemble((f"  {sign}{finding.id}", style), f"{at}  {finding.detail}")


def _only(these: Sequence[Finding], those: Sequence[Finding]) -> list[Finding]:
    """Of these, what those have not: by what is said, for a line moves when code above it changes."""
    known = {(finding.id, finding.detail) for finding in those}
    return [finding for finding in these if (finding.id, finding.detail) not in known]


def _counts(page: Page) -> Mapping[str, int]:
    return {str(kind): count for kind, count in page.mix.counts.items()}


def _shape(instruction: Any) -> str:
    return ".".join((instruction.opcode, *instruction.modifiers))
