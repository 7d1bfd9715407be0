"""Two kernels, or two versions of one: which figures changed, and which instructions came and went."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sublight.errors import BadInput
from sublight.report.draw.tables import note, plain
from sublight.report.xray.causes import cause_lines, causes
from sublight.report.xray.facts import counted, facts
from sublight.xray.examine import Page
from sublight.xray.record import Finding
from sublight.xray.sass.asm_lines import read

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_SHAPES = 12  # the most instruction shapes that a line names


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
    def given(self) -> dict[str, tuple[str, str]]:
        """The constants and options that differ."""
        before, after = ({**page.code.constants, **page.code.options} for page in (self.before, self.after))
        every = {
            name: (str(before.get(name, "")), str(after.get(name, ""))) for name in dict.fromkeys((*before, *after))
        }
        return {name: values for name, values in every.items() if values[0] != values[1]}

    @property
    def kinds(self) -> dict[str, tuple[int, int]]:
        """The kinds of instructions whose number changed."""
        before, after = (_counts(page) for page in (self.before, self.after))
        names = dict.fromkeys((*before, *after))
        every = {name: (before.get(name, 0), after.get(name, 0)) for name in names}
        return {name: counts for name, counts in every.items() if counts[0] != counts[1]}

    @property
    def lines_changed(self) -> tuple[int, int]:
        """SASS instructions that are gone and that are new in their place, registers and addresses left aside."""
        before, after = _shapes(self.before), _shapes(self.after)
        steps = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
        changed = [step for step in steps if step[0] != "equal"]
        return sum(step[2] - step[1] for step in changed), sum(step[4] - step[3] for step in changed)

    @property
    def shapes(self) -> tuple[Counter[str], Counter[str]]:
        """Instructions with their modifiers (LDG.E.128) of which there are fewer, and of which there are more."""
        before, after = Counter(_shapes(self.before)), Counter(_shapes(self.after))
        return before - after, after - before

    @property
    def cured(self) -> list[Finding]:
        return _matched(self.before.findings, self.after.findings)[0]

    @property
    def caused(self) -> list[Finding]:
        return _matched(self.before.findings, self.after.findings)[1]

    @property
    def still(self) -> list[Finding]:
        """Findings that both versions have with other figures, as they are now."""
        return _matched(self.before.findings, self.after.findings)[2]

    def to_json(self) -> dict[str, Any]:
        gone, new = self.lines_changed
        fewer, more = self.shapes
        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "figures": {name: list(values) for name, values in self.figures.items() if values[0] != values[1]},
            "given": {name: list(values) for name, values in self.given.items()},
            "instructions": {name: list(counts) for name, counts in self.kinds.items()},
            "instructions_gone": gone,
            "instructions_new": new,
            "fewer": dict(fewer),
            "more": dict(more),
            "cured": [finding.to_json() for finding in self.cured],
            "caused": [finding.to_json() for finding in self.caused],
            "still": [finding.to_json() for finding in self.still],
        }


def paired(before: Sequence[Page], after: Sequence[Page]) -> list[Pair]:
    """By name and GPU; one kernel against one, whatever they are called."""
    if len({page.code.name for page in before}) == len({page.code.name for page in after}) == 1:
        known = {page.code.gpu.key: page for page in after}
        pairs = [Pair(before=page, after=known[page.code.gpu.key]) for page in before if page.code.gpu.key in known]
        if not pairs and len(before) == len(after) == 1:  # two cubins, each for a GPU of its own
            pairs = [Pair(before=before[0], after=after[0])]
    else:
        both = {(page.code.name, page.code.gpu.key): page for page in after}
        pairs = [Pair(before=page, after=both[key]) for page in before if (key := _key(page)) in both]
    if not pairs:
        names = [", ".join(dict.fromkeys(page.code.name for page in pages)) for pages in (before, after)]
        raise BadInput(f"no kernel is in both: {names[0]} against {names[1]}; name one of each, as FILE:KERNEL")
    return pairs


def _key(page: Page) -> tuple[str, str]:
    return page.code.name, page.code.gpu.key


def to_json(pairs: Sequence[Pair]) -> dict[str, Any]:
    return {"kernels": [pair.to_json() for pair in pairs]}


def page(pairs: Sequence[Pair], left_out: Sequence[str] = ()) -> RenderableType:
    """The differences of each pair; `left_out` are kernels that only one side has."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for pair in pairs:
        parts += [*_pair(pair), Text("")]
    if left_out:
        return Group(*parts, Text(f"on one side only: {', '.join(left_out)}", style="dim"))
    return Group(*parts[:-1])


def alone(before: Sequence[Page], after: Sequence[Page], pairs: Sequence[Pair]) -> list[str]:
    """Names of kernels that no pair has."""
    held = {id(each) for pair in pairs for each in (pair.before, pair.after)}
    return list(dict.fromkeys(each.code.name for each in (*before, *after) if id(each) not in held))


def _pair(pair: Pair) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    before, after = pair.before.code, pair.after.code
    names = before.name if before.name == after.name else f"{before.name} → {after.name}"
    on = before.gpu.key if before.gpu.key == after.gpu.key else f"{before.gpu.key} → {after.gpu.key}"
    table = plain(("", "before", "after", ""), right=("before", "after"), fold=("",))
    for name, (old, new) in {**pair.given, **pair.figures}.items():
        table.add_row(note(name, ""), note(old, ""), note(new, ""), "" if old == new else note("changed", "bold"))
    for name, (old_count, new_count) in pair.kinds.items():
        table.add_row(f"{name} instructions", str(old_count), str(new_count), note(f"{new_count - old_count:+d}", ""))
    parts: list[RenderableType] = [Text.assemble((names, "bold"), (f"  {on}", "dim")), table, Text("")]
    gone, new_lines = pair.lines_changed
    same = "  the same instructions, whatever their registers"
    parts.append(Text(f"  {counted(gone, 'instruction')} gone, {new_lines:,} new" if gone or new_lines else same))
    for sign, shapes in zip(("−", "+"), pair.shapes, strict=True):
        if shapes:
            parts.append(Padding(Text(f"{sign} {_named(shapes)}", style="dim"), (0, 0, 0, 2), expand=False))
    for word, style, findings in (
        ("cured", "green", pair.cured),
        ("new", "bold red", pair.caused),
        ("still there", "dim", pair.still),
    ):
        for cause in causes(findings):
            parts.append(Text(f"  {word}:", style=style))
            parts += cause_lines(cause, indent=4)
    return parts


def _named(shapes: Counter[str]) -> str:
    most = [f"{count} {shape}" for shape, count in shapes.most_common(MOST_SHAPES)]
    rest = sum(shapes.values()) - sum(count for _, count in shapes.most_common(MOST_SHAPES))
    return ", ".join([*most, *[f"{rest} others"] * bool(rest)])


def _matched(before: Sequence[Finding], after: Sequence[Finding]) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """Cured, caused, and what is there still in other words.

    By what is said, for a line moves when code above it changes; then by kind, for the figures in a sentence change.
    """
    gone, new = _only(before, after), _only(after, before)
    still = []
    for finding in list(new):
        twin = next((other for other in gone if other.id == finding.id), None)
        if twin is not None:
            gone.remove(twin)
            new.remove(finding)
            still.append(finding)
    return gone, new, still


def _only(these: Sequence[Finding], those: Sequence[Finding]) -> list[Finding]:
    """The findings of one side that the other lacks; one that occurs twice counts twice."""
    left = Counter((finding.id, finding.detail) for finding in those)
    rest = []
    for finding in these:
        key = (finding.id, finding.detail)
        if left[key]:
            left[key] -= 1
        else:
            rest.append(finding)
    return rest


def _counts(page: Page) -> Mapping[str, int]:
    return {str(kind): count for kind, count in page.mix.counts.items()}


def _shapes(page: Page) -> list[str]:
    return [".".join((each.opcode, *each.modifiers)) for each in read(page.code)]
