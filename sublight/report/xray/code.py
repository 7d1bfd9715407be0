"""The four panes of a kernel, source ↔ TTGIR ↔ PTX ↔ SASS: a row for each line, with a key by which rows are linked.

Rows that come from the same lines of the kernel's own file, by the same calls, have the same key. Lines that only
carry debug information (``.loc``, ``#loc``, ``//## File``) are left out: the links say what they said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path, PurePath
from typing import Literal

from sublight.xray.record import Access, Code, Finding
from sublight.xray.sass import lines

PaneName = Literal["source", "ttgir", "ptx", "sass"]
MOST_LINES = 20_000  # the longest pane
COLOURS = 8  # source lines take turns in these
POOR = 1.25  # an access that takes this many times the ideal is marked

_KINDS: dict[PaneName, tuple[tuple[str, re.Pattern[str]], ...]] = {  # tried in order against the opcode
    "sass": (
        ("local", re.compile(r"(LDL|STL)\b")),
        ("tensor", re.compile(r"([HIDQBO]G?MMA|UTC\w*MMA|UTCCP|LDTM|STTM)\b")),
        ("barrier", re.compile(r"(\w*BAR|SYNCS|FENCE|WARPGROUP|WARPSYNC|ARRIVES|UCGABAR\w*|CCTL|ACQBULK)\b")),
        ("shared", re.compile(r"(LDS|STS|LDSM|STSM|ATOMS|LDS\w*)\b")),
        ("global", re.compile(r"(LDG\w*|STG|LD|ST|ATOM|ATOMG|RED|REDG|UBLK\w+|UTMA\w+)\b")),
        ("shuffle", re.compile(r"(SHFL|U?REDUX|VOTEU?|MATCH)\b")),
        ("special", re.compile(r"MUFU\b")),
        ("control", re.compile(r"(BRA|BRX|EXIT|RET|CALL|BSSY|BSYNC|JMP|JMX|BREAK|YIELD|NANOSLEEP)\b")),
    ),
    "ptx": (
        ("local", re.compile(r"(ld|st)(\.\w+)*\.local\b")),
        ("tensor", re.compile(r"(wmma|mma|wgmma\.mma_async|tcgen05\.(mma|ld|st|cp))\b")),
        ("barrier", re.compile(r"(bar|barrier|mbarrier|membar|fence|wgmma|tcgen05|cp\.async\.(\w+\.)*(wait|commit))")),
        ("shared", re.compile(r"((ld|st|atom|red)(\.\w+)*\.shared|ldmatrix|stmatrix)\b")),
        ("global", re.compile(r"((ld|st|atom|red|multimem)\b(?!.*\.(param|const))|cp\.)")),
        ("shuffle", re.compile(r"(shfl|redux|vote|match|activemask)\b")),
        ("special", re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\b")),
        ("control", re.compile(r"(bra|brx|ret|exit|call|trap)\b")),
    ),
    "ttgir": (
        ("tensor", re.compile(r"(tt\.dot\w*|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*|ttng\.tmem_\w+)\b(?!_)")),
        ("barrier", re.compile(r"(gpu|ttg)\.barrier|ttng\.\w*(barrier|wait|fence|arrive)|ttg\.async_(wait|commit)")),
        ("global", re.compile(r"(tt\.(load|store|atomic_\w+|descriptor_\w+)|ttg\.async_copy\w*|ttng\.async_tma\w*)\b")),
        ("shared", re.compile(r"ttg\.(local_\w+|convert_layout|memdesc\w*)\b")),
        ("shuffle", re.compile(r"tt\.(reduce|scan|gather|histogram)\b")),
        ("special", re.compile(r"math\.")),
        ("control", re.compile(r"(scf|cf)\.|tt\.(return|func|call)\b|ttg\.warp_specialize")),
    ),
}  # fmt: skip
_OPCODE = {
    "sass": re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)"),
    "ptx": re.compile(r"(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][\w.:]*)"),
    "ttgir": re.compile(r'(?:%[\w:, %#]+ = )?"?([a-z]\w*\.[\w.]+)"?'),
}
_PADDING = re.compile(r"\s*/\*[0-9a-f]+\*/\s*NOP\s*;")
_ADDRESS = re.compile(r"\s*\{?\s*/\*([0-9a-f]{4,})\*/\s*")
_WORDS = (
    r"|(?P<var>\"\"\".*?(?:\"\"\"|$)|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\b\d[\w.]*)"
    r"|(?P<b>@[\w.]+|\b(?:def|return|if|else|elif|for|while|in|not|and|or|is|import|from|as|with|class|lambda|None|True"
    r"|False|pass|break|continue|assert|raise|template|typename|const|void|int|float|double|half|bool|unsigned|char|auto"
    r"|static|inline|extern|struct|using|namespace|__\w+__)\b)"
)
_PYTHON = re.compile(r"(?P<em>\#.*)" + _WORDS)
_CUDA = re.compile(r"(?P<em>//.*|/\*.*?(?:\*/|$))" + _WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a pane."""

    number: str  # the line's number, in SASS the instruction's address
    text: str
    kind: str = ""  # the kind of instruction (memory, tensor core, …), which colours the opcode
    key: int | None = None  # rows with the same key are linked
    opcode: tuple[int, int] | None = None  # where the opcode stands in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The lines of the kernel's own file that rows come from, innermost first, and helpers elsewhere on the way."""

    lines: tuple[int, ...]
    through: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panes:
    """What the four panes show of one kernel."""

    source: str | None
    file: str
    keys: tuple[Key, ...]
    listings: Mapping[PaneName, tuple[Row, ...]]  # the compiler's listings that are at hand, not the source

    @property
    def linked(self) -> list[int]:
        """The source lines that rows of other panes come from."""
        return sorted({line for key in self.keys for line in key.lines})

    def weights(self) -> dict[int, float]:
        """Source line -> the number of its SASS instructions."""
        rows = self.listings.get("sass", ())
        counted = Counter(self.keys[row.key].lines[0] for row in rows if row.key is not None)
        return {line: float(count) for line, count in counted.items()}


def source_text(code: Code) -> str | None:
    """The source as it is on disk now; None where it is not at hand."""
    if not code.file:
        return None
    try:
        return Path(code.file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def panes(code: Code, source: str | None = None) -> Panes:
    """Rows and links of one kernel."""
    read: dict[PaneName, tuple[str, Callable[[str], list[lines.Chain]], Callable[..., Iterator[tuple[int, Row]]]]] = {
        "ttgir": (code.ttgir, lines.chains_of_ttgir, _ttgir_rows),
        "ptx": (code.ptx, lines.chains_of_ptx, _ptx_rows),
        "sass": (code.sass, lines.chains_of_sass, _sass_rows),
    }
    chains = {name: chains_of(text) for name, (text, chains_of, _) in read.items() if text.strip()}
    own = _own_file(code, chains)
    numbers: dict[Key, int] = {}
    through: dict[int, dict[str, None]] = {}
    listings: dict[PaneName, tuple[Row, ...]] = {}
    for name, chain_list in chains.items():
        text, _, rows_of = read[name]
        rows = []
        for index, row in rows_of(text, code.symbol):
            key = None
            inside = tuple(place.line for place in chain_list[index] if place.file in own)
            if inside:
                key = numbers.setdefault(Key(lines=inside), len(numbers))
                for place in chain_list[index]:
                    if place.file not in own:
                        through.setdefault(key, {})[f"{PurePath(place.file).name}:{place.line}"] = None
            rows.append(_coloured(row, name, key))
        listings[name] = tuple(rows)
    keys = tuple(Key(lines=key.lines, through=tuple(through.get(number, ()))[:6]) for key, number in numbers.items())
    shown = source if source is not None else source_text(code)
    return Panes(source=shown, file=code.file or next(iter(own), ""), keys=keys, listings=listings)


def _own_file(code: Code, chains: Mapping[PaneName, list[lines.Chain]]) -> set[str]:
    """The kernel's own file, by every name that debug information gives it."""
    files = {place.file for found in chains.values() for chain in found for place in chain}
    named = {file for file in files if lines.same_file(file, code.file)}
    return named or {own for found in chains.values() if (own := lines.own_file(found))}


def _coloured(row: Row, name: PaneName, key: int | None) -> Row:
    match = _OPCODE[name].match(row.text.lstrip())
    indent = len(row.text) - len(row.text.lstrip())
    if not match or row.text.rstrip().endswith(":"):
        return Row(number=row.number, text=row.text, key=key)
    kind = next((kind for kind, pattern in _KINDS[name] if pattern.match(match[1])), "")
    return Row(
        number=row.number, text=row.text, kind=kind, key=key, opcode=(indent + match.start(1), indent + match.end(1))
    )


def _sass_rows(text: str, symbol: str) -> Iterator[tuple[int, Row]]:
    listed = text.split("\n")
    while listed and not (_ADDRESS.match(listed[-1]) and not _PADDING.match(listed[-1])):
        listed.pop()  # instructions that pad the last cache line never run
    for index, line in enumerate(listed):
        if address := _ADDRESS.match(line):
            yield index, Row(number=address[1], text=line[address.end() :].rstrip().removesuffix(";").rstrip())
        elif re.match(r"\.L_|\$?[\w$.]+:\s*$", line) and not line.startswith((".text", ".section")):
            yield index, Row(number="", text=line.strip())  # a label, the target of branches


def _ptx_rows(text: str, symbol: str) -> Iterator[tuple[int, Row]]:
    """The kernel and what it calls, without the file's other kernels."""
    skipped = re.compile(r"\s*(\.loc|\.file|\$L__(tmp|func_)\w*:|//)")
    others = {name for name in re.findall(r"\.entry\s+([\w$]+)", text) if name != symbol}
    only = others if re.search(rf"\.entry\s+{re.escape(symbol)}\b", text) else set()
    inside_other = False
    for index, line in enumerate(text.split("\n")):
        if re.match(r"\s*\.section\s+\.debug|\s*\}?\s*\.section\s+\.debug", line):
            return
        entry = re.search(r"\.entry\s+([\w$]+)", line)
        inside_other = entry[1] in only if entry else inside_other
        if not inside_other and not skipped.match(line):
            words = re.sub(r"\s*\t", " ", re.sub(r"^\s+", "  ", line).split("// ")[0]).rstrip()
            if words:
                yield index, Row(number=str(index + 1), text=words)
        if line.startswith("}"):
            inside_other = False


def _ttgir_rows(text: str, symbol: str) -> Iterator[tuple[int, Row]]:
    location = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
    for index, line in enumerate(text.split("\n")):
        if line.strip() and not line.startswith("#loc"):
            yield index, Row(number=str(index + 1), text=location.sub("", line))


def html(kernel: Panes, name: PaneName, *, heat: Mapping[int, float], badges: Mapping[int, Sequence[str]]) -> str:
    """A pane's rows as HTML; `badges` are markup already."""
    if name == "source":
        return _source_html(kernel, heat, badges)
    colours = {line: index % COLOURS for index, line in enumerate(kernel.linked)}
    rows = kernel.listings.get(name, ())
    parts = []
    for row in rows[:MOST_LINES]:
        words = escape(row.text, quote=False)
        if row.opcode:
            begin, end = row.opcode
            before, opcode, after = (
                escape(part, quote=False) for part in (row.text[:begin], row.text[begin:end], row.text[end:])
            )
            words = f"{before}<b>{opcode}</b>{after}"
        if row.key is None:
            parts.append(f'<div class="l {row.kind}"><i>{row.number}</i><u></u><code>{words}</code></div>')
            continue
        line = kernel.keys[row.key].lines[0]
        parts.append(
            f'<div class="l {row.kind}" data-k="{row.key}"><i>{row.number}</i><u class="c{colours[line]}">{line}</u>'
            f"<code>{words}</code></div>"
        )
    return "".join(parts) + _left_out(len(rows))


def _source_html(kernel: Panes, heat: Mapping[int, float], badges: Mapping[int, Sequence[str]]) -> str:
    if kernel.source is None:
        return f'<p class="gone">The source{f" ({escape(kernel.file)})" if kernel.file else ""} is not at hand.</p>'
    colours = {line: index % COLOURS for index, line in enumerate(kernel.linked)}
    total, most = sum(heat.values()), max(heat.values(), default=0.0)
    pattern = _PYTHON if kernel.file.endswith(".py") else _CUDA
    parts = []
    listed = kernel.source.split("\n")
    for number, text in enumerate(listed[:MOST_LINES], start=1):
        weight = heat.get(number, 0.0)
        bar = ""
        if weight > 0 and most > 0:
            tip = f"{100 * weight / total:.1f} % of the kernel's instructions, weighted by loops"
            bar = f'<s style="--h:{weight / most:.3f}" data-tip="{tip}"></s>'
        at = f' data-n="{number}"' if number in colours else ""
        strip = f' class="c{colours[number]}"' if number in colours else ""
        parts.append(
            f'<div class="l"{at}><i>{number}</i><u{strip}>{bar}</u><code>{_source_line(text, pattern)}</code>'
            f"{_marks(badges.get(number, ()))}</div>"
        )
    return "".join(parts) + _left_out(len(listed))


def _marks(badges: Sequence[str]) -> str:
    return f"<span>{''.join(badges)}</span>" if badges else ""


def _source_line(text: str, pattern: re.Pattern[str]) -> str:
    """Comments, strings, numbers and keywords told apart, line by line: light, and never wrong enough to mislead."""
    parts, end = [], 0
    for match in pattern.finditer(text):
        tag = match.lastgroup
        parts.append(escape(text[end : match.start()], quote=False))
        parts.append(f"<{tag}>{escape(match[0], quote=False)}</{tag}>")
        end = match.end()
    return "".join(parts) + escape(text[end:], quote=False)


def _left_out(count: int) -> str:
    return f'<p class="gone">{count - MOST_LINES} more lines are left out here.</p>' if count > MOST_LINES else ""


def badges(file: str, accesses: Sequence[Access], findings: Sequence[Finding]) -> dict[int, list[str]]:
    """Source line -> marks: the worst access of each kind, and findings."""
    by_line: dict[int, dict[str, tuple[float, str, str]]] = {}  # line -> memory space -> (how poor, mark, text)
    for access in accesses:
        if access.place is None or access.unknown or not lines.same_file(access.place.file, file):
            continue
        sectors, conflict = access.sectors_per_request, access.bank_conflict
        if access.space == "global" and sectors is not None:
            poor = access.sectors / access.ideal_sectors if access.ideal_sectors else 1.0
            ideal = access.ideal_sectors / access.requests
            mark, tip = f"{sectors:.3g} sectors", f"{sectors:.3g} sectors a request where {ideal:.3g} would do"
        elif conflict is not None:
            poor, mark = conflict, f"{conflict:.3g}-way" if conflict > 1 else "no conflict"
            tip = f"{conflict:.3g} wavefronts where 1 would do" if conflict > 1 else "no bank conflict"
        else:
            continue
        tip = f"{access.space} {access.kind}, {access.bytes_per_thread} B a thread: {tip}"
        marks = by_line.setdefault(access.place.line, {})
        if access.space not in marks or poor > marks[access.space][0]:
            marks[access.space] = (poor, mark, tip)
    out: dict[int, list[str]] = {
        line: [
            f'<mark class="{"poor" if poor >= POOR else "fine"}" data-tip="{escape(tip)}">{escape(mark)}</mark>'
            for poor, mark, tip in marks.values()
        ]
        for line, marks in by_line.items()
    }
    for finding in findings:
        if finding.place is not None and lines.same_file(finding.place.file, file):
            kind = "told" if finding.is_information else "wrong"
            mark = f'<mark class="{kind}" data-tip="{escape(finding.detail)}">{escape(finding.id)}</mark>'
            out.setdefault(finding.place.line, []).append(mark)
    return out
