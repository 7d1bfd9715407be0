"""SASS, the GPU's own instructions, as nvdisasm prints them: a record for each, with its line of the source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sublight.xray.record import Code, Place
from sublight.xray.sass.lines import chains_of_sass, own_file, same_file

_LABEL = re.compile(r"^([.$\w]\S*):\s*$")
_INSTRUCTION = re.compile(r"^\s*\{?\s*/\*([0-9a-f]{4,})\*/\s*(?:@(!?U?P\w+)\s+)?([A-Z]\w*)((?:\.\w+)*)\s*(.*?)\s*;")
_COMMENT = re.compile(r"\(\*.*?\*\)")
_JUMPS = ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL")
_ENDS = ("EXIT", "RET", "BPT")  # BPT: a trap
_MASK = re.compile(r"!?U?P(\d|T)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One warp instruction."""

    address: int
    opcode: str  # LDG
    modifiers: tuple[str, ...] = ()  # E, 128
    predicate: str = ""  # !P0; empty: always
    operands: tuple[str, ...] = ()
    targets: tuple[int, ...] = ()  # addresses that it may jump to
    places: tuple[Place, ...] = ()  # innermost first: a line of a function, then the line that inlined it, and so on

    @property
    def name(self) -> str:
        """LDG.E.128"""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def is_jump(self) -> bool:
        return self.opcode in _JUMPS

    @property
    def falls_through(self) -> bool:
        """Whether a warp may go on with the instruction after this one."""
        if self.opcode not in _ENDS and (not self.is_jump or self.opcode == "CALL"):
            return True
        if self.predicate not in ("", "PT") or "DIV" in self.modifiers or "CONV" in self.modifiers:
            return True
        return self.is_jump and bool(self.operands) and bool(_MASK.fullmatch(self.operands[0]))  # BRA.U UP0, `(.L_x_2)

    def place(self, file: str) -> Place | None:
        """The line that its author wrote: the innermost one in that file, or where there is none, the outermost.

        So what triton/language/standard.py does for a tl.max belongs to the line with the tl.max.
        """
        own = (place for place in self.places if same_file(place.file, file))
        return next(own, self.places[-1] if self.places else None)


def file_of(code: Code, instructions: Iterable[Instruction]) -> str:
    """The author's file: as it was given, or where the kernel begins."""
    return code.file or own_file(each.places for each in instructions)


def parse(sass: str) -> tuple[Instruction, ...]:
    """Every instruction, in the order of its address; the padding behind the last one is left out.

    >>> for each in parse('''
    ... //## File "k.py", line 7
    ... .L_x_0:
    ...         /*0010*/  @!P0 LDG.E.U16 R2, desc[UR4][R2.64+0x8] ;
    ...         /*0020*/  @P1  BRA `(.L_x_0) ;
    ... '''): print(each.name, each.predicate, each.operands, each.targets, each.place("k.py").line)
    LDG.E.U16 !P0 ('R2', 'desc[UR4][R2.64+0x8]') () 7
    BRA P1 ('`(.L_x_0)',) (16,) 7
    """
    found: list[Instruction] = []
    wanted: list[tuple[str, ...]] = []  # the labels that each may jump to
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels of the next instruction
    for line, places in zip(sass.split("\n"), chains_of_sass(sass), strict=True):
        if match := _INSTRUCTION.match(line):
            address = int(match[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            words = _COMMENT.sub("", match[5])
            found.append(
                Instruction(
                    address=address,
                    opcode=match[3],
                    modifiers=tuple(match[4].split(".")[1:]),
                    predicate=match[2] or "",
                    operands=tuple(word.strip() for word in words.split(",") if word.strip()),
                    places=places,
                )
            )
            wanted.append(_labels(match[5]) if match[3] in _JUMPS else ())
        elif match := _LABEL.match(line):
            waiting.append(match[1])
    with_targets = [_aimed(each, names, labels) for each, names in zip(found, wanted, strict=True)]
    return tuple(_without_padding(with_targets))


def _labels(operands: str) -> tuple[str, ...]:
    """`(.L_x_1), or of an indirect branch (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)"""
    listed = re.search(r"BRANCH_TARGETS\s+([^\"*]+)", operands)
    return tuple(listed[1].replace(" ", "").split(",")) if listed else tuple(re.findall(r"`\((.+?)\)", operands))


def _aimed(instruction: Instruction, names: Iterable[str], labels: dict[str, int]) -> Instruction:
    targets = tuple(labels[name] for name in names if name in labels)
    return replace(instruction, targets=targets) if targets else instruction


def _without_padding(found: list[Instruction]) -> list[Instruction]:
    """Behind its last instruction nvdisasm shows a branch to itself, and NOPs up to the next multiple of 128 bytes."""
    end = len(found)
    while end and found[end - 1].opcode == "NOP":
        end -= 1
    last = found[end - 1] if end else None
    return found[: end - 1] if last and last.opcode == "BRA" and last.targets == (last.address,) else found[:end]
