"""PTX as data: one entry's parameters, registers, variables, labels and instructions with their places.

Only what following a block needs is kept. Braces open scopes (inline assembly declares registers of its own there), so
a name declared inside one is renamed; a vector operand stays one operand: `{%r1,%r2}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from sublight.errors import BadInput
from sublight.xray.record import Place
from sublight.xray.sass.asm_lines import mended

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?=[({])")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\.ptr\b[^,]*?\s)?(?:\.(?:const|global|local|shared)\s+)?"
    r"(?:\.align\s+\d+\s+)?([\w$%]+)(?:\[(\d+)\])?\s*$"
)
_VARIABLE = re.compile(
    r"(?<![\w:.])(?:\.(?:extern|visible|weak|common)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.([busf]\d+)\s+([\w$%]+)((?:\[\d*\])*)\s*(?:=\s*\{?([^;}]*)\}?)?\s*;"
)
_LABEL = re.compile(r"\s*([\w$%]+)\s*:(?!:)")
_WORD = re.compile(r"[%$]?[A-Za-z_$][\w$]*")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?", re.DOTALL)
BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "f16x2": 4} | {
    **{"bf16x2": 4, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8},
    **{"f32x2": 8, "b128": 16},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument as the entry takes it."""

    name: str
    type: str  # u64, f32; b8 with `count` for a struct
    count: int = 1
    is_pointer: bool = False  # said so; older compilers do not say

    @property
    def bytes(self) -> int:
        return BYTES[self.type] * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A named piece of shared, global, constant or local memory."""

    name: str
    space: str
    align: int
    bytes: int  # 0: as much as the launch asks for
    content: tuple[int, ...] = ()
    item_bytes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """`@!%p1 ld.global.v2.b32 {%r1,%r2}, [%rd1+8];` in parts."""

    parts: tuple[str, ...]  # ld, global, v2, b32
    operands: tuple[str, ...] = ()
    predicate: str = ""
    is_negated: bool = False
    place: Place | None = None

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kernel's PTX."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: Mapping[str, str]  # name -> type
    variables: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]  # -> index of the instruction that follows
    threads: tuple[int, int, int] | None  # .reqntid: what a block must have
    most_threads: tuple[int, int, int] | None  # .maxntid


@dataclass(slots=True)
class _Scope:
    registers: dict[str, str] = field(default_factory=dict)  # as written -> as renamed
    number: int = 0


def parse_entry(text: str, symbol: str = "") -> Entry:
    """The entry of that name; the only one where none is named."""
    ptx = _COMMENT.sub(" ", mended(text))
    starts = {found[1]: found for found in _ENTRY.finditer(ptx)}
    if not symbol and len(starts) == 1:
        symbol = next(iter(starts))
    if symbol not in starts:
        raise BadInput(f"the PTX has no kernel {symbol!r}: it has {', '.join(starts) or 'none'}")
    at = starts[symbol].end()
    close = _matching(ptx, at, "()") if ptx[at] == "(" else at
    begin = ptx.index("{", close)
    end = _matching(ptx, begin, "{}")
    head, body = ptx[close:begin], ptx[begin + 1 : end]
    outside = ptx[: starts[symbol].start()]
    files = {int(number): name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)}
    reader = _Body(files)
    reader.read(body)
    return Entry(
        name=symbol,
        parameters=tuple(_parameters(ptx[at + 1 : close])),
        registers=reader.registers,
        variables=(*_variables(_without_bodies(outside)), *_variables(body)),
        instructions=tuple(reader.instructions),
        labels=reader.labels,
        threads=_dimensions(head, "reqntid"),
        most_threads=_dimensions(head, "maxntid"),
    )


class _Body:
    """Reads statements in order; knows the scope, the place and the labels so far."""

    def __init__(self, files: Mapping[int, str]) -> None:
        self.files = files
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self._scopes = [_Scope()]
        self._opened = 0
        self._last = ""  # label
        self._tables: dict[str, tuple[str, ...]] = {}  # of labels, for brx.idx
        self._place: Place | None = None
        self._own = ""  # the file in which the kernel stands: a helper's line is told as the line that calls it
        self._callers: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}

    def read(self, body: str) -> None:
        for statement in _statements(body):
            if statement == "{":
                self._opened += 1
                self._scopes.append(_Scope(number=self._opened))
            elif statement == "}":
                self._scopes.pop()
            elif statement.endswith(":"):
                self._last = statement[:-1]
                self.labels[self._label(self._last, self._scopes[-1])] = len(self.instructions)
            elif statement.startswith(".branchtargets"):
                self._tables[self._last] = tuple(_operands(statement.removeprefix(".branchtargets")))
            elif statement.startswith(".loc"):
                self._locate(statement)
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif not statement.startswith("."):
                self.instructions.append(self._instruction(statement))
        self.instructions = [self._resolved(instruction) for instruction in self.instructions]

    def _label(self, name: str, scope: _Scope) -> str:
        return f"{name}@{scope.number}" if scope.number else name

    def _resolved(self, instruction: Instruction) -> Instruction:
        """A branch's target: the label of the nearest scope; of a jump through a table, its register and all labels."""
        if instruction.parts[0] == "brx":
            index, table = instruction.operands
            return replace(instruction, operands=(index, *self._tables.get(table, ())))
        if instruction.parts[0] != "bra":
            return instruction
        target, *scopes = instruction.operands
        found = next((name for number in scopes if (name := f"{target}@{number}") in self.labels), target)
        if found not in self.labels:
            raise BadInput(f"the PTX branches to {target}, which it does not have")
        return replace(instruction, operands=(found,))

    def _locate(self, statement: str) -> None:
        match = _LOC.match(statement)
        if not match:
            return
        here = (int(match[1]), int(match[2]), int(match[3]))
        caller = (int(match[4]), int(match[5]), int(match[6])) if match[4] else None
        self._callers[here] = caller
        chain = [here]
        while caller and caller not in chain:
            chain.append(caller)
            caller = self._callers.get(caller)
        places = [Place(file=self.files.get(number, ""), line=line) for number, line, _ in chain if line]
        if places:
            self._own = self._own or places[-1].file
            self._place = next((place for place in places if place.file == self._own), places[-1])

    def _declare(self, statement: str) -> None:
        kind, names = re.split(r"\s+", statement[4:].strip().lstrip("."), maxsplit=1)
        scope = self._scopes[-1]
        for name in (word.strip() for word in names.split(",")):
            counted = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            written = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            for word in written:
                renamed = f"{word}@{scope.number}" if scope.number else word
                scope.registers[word] = renamed
                self.registers[renamed] = kind

    def _instruction(self, statement: str) -> Instruction:
        predicate, is_negated = "", False
        if found := re.match(r"@(!?)\s*([\w$%]+)\s+", statement):
            predicate, is_negated = self._renamed(found[2]), bool(found[1])
            statement = statement[found.end() :]
        opcode, _, rest = statement.partition(" ")
        operands = tuple(self._renamed(operand) for operand in _operands(rest))
        if opcode.startswith("bra"):  # with the scopes it sees, innermost first, until all labels are known
            operands = (*_operands(rest), *(str(scope.number) for scope in reversed(self._scopes) if scope.number))
        return Instruction(
            parts=tuple(opcode.split(".")),
            operands=operands,
            predicate=predicate,
            is_negated=is_negated,
            place=self._place,
        )

    def _renamed(self, operand: str) -> str:
        if len(self._scopes) == 1:
            return operand

        def new(found: re.Match[str]) -> str:
            for scope in reversed(self._scopes):
                if found[0] in scope.registers:
                    return scope.registers[found[0]]
            return found[0]

        return _WORD.sub(new, operand)


def _statements(body: str) -> Iterator[str]:
    """Statements without their semicolons; `{`, `}` and `label:` on their own; one space between words."""
    body = re.sub(r"(\.loc\b[^\n;]*)(\n|$)", r"\1;\n", body)  # the one statement that ends with its line
    start = 0
    at = 0
    while found := re.compile(r"[;{}]").search(body, at):
        before = body[start : found.start()]
        while label := _LABEL.match(before):
            yield f"{label[1]}:"
            start += label.end()
            before = before[label.end() :]
        if found[0] == "{" and before.strip():  # a vector, or a variable's content
            at = body.index("}", found.end()) + 1
            continue
        if statement := re.sub(r"\s+", " ", before).strip():
            yield statement
        if found[0] in "{}":
            yield found[0]
        start = at = found.end()


def _operands(text: str) -> list[str]:
    """
    >>> _operands("{%r1, %r2}, [ %rd1 + 8 ], 16")
    ['{%r1,%r2}', '[%rd1+8]', '16']
    """
    found: list[str] = []
    depth = 0
    for letter in text.replace(" ", ""):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            found.append("")
        elif found:
            found[-1] += letter
        else:
            found.append(letter)
    return found


def _parameters(text: str) -> Iterator[Parameter]:
    for piece in filter(str.strip, text.split(",")):
        match = _PARAMETER.match(piece.strip())
        if not match:
            raise BadInput(f"a parameter of the PTX that is not understood: {piece.strip()}")
        yield Parameter(name=match[3], type=match[1], count=int(match[4] or 1), is_pointer=bool(match[2]))


def _variables(text: str) -> Iterator[Variable]:
    for space, align, kind, name, dimensions, content in _VARIABLE.findall(text):
        count = 1
        for size in re.findall(r"\[(\d*)\]", dimensions):
            count *= int(size or 0)
        numbers = tuple(int(word, 0) for word in re.findall(r"-?\b(?:0x[0-9a-fA-F]+|\d+)\b", content))
        yield Variable(
            name=name,
            space=space,
            align=int(align or BYTES[kind]),
            bytes=BYTES[kind] * count,
            content=numbers,
            item_bytes=BYTES[kind],
        )


def _without_bodies(text: str) -> str:
    """Other functions' bodies out: what they declare is theirs."""
    kept: list[str] = []
    at = 0
    for found in re.finditer(r"\.(?:entry|func)\b", text):
        begin, semicolon = text.find("{", found.end()), text.find(";", found.end())
        if found.start() < at or begin < 0 or 0 <= semicolon < begin:  # inside the last one, or only declared
            continue
        kept.append(text[at : found.start()])
        at = _matching(text, begin, "{}") + 1
    return "".join((*kept, text[at:]))


def _matching(text: str, at: int, pair: str) -> int:
    depth = 0
    for found in re.compile(f"[{re.escape(pair)}]").finditer(text, at):
        depth += 1 if found[0] == pair[0] else -1
        if depth == 0:
            return found.start()
    raise BadInput(f"the PTX ends before a {pair[1]}")


def _dimensions(head: str, word: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{word}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head)
    return (int(match[1]), int(match[2] or 1), int(match[3] or 1)) if match else None
