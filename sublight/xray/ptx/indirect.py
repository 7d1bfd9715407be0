"""Which accesses depend on data: those whose address is computed from something that was loaded.

Such blocks may all read the same, or each its own: a few of them do not tell. Whatever came from memory marks what is
computed from it; where an address is among that, the access is indirect.
"""

from __future__ import annotations

import re

from sublight.xray.ptx.entry import Entry, Instruction

_REGISTER = re.compile(r"%[A-Za-z_$][\w$]*")
_BRINGS = ("ld", "ldu", "atom", "ldmatrix")


def indirect(entry: Entry) -> frozenset[int]:
    """Indices of global accesses at an address that depends on loaded data.

    >>> from sublight.xray.ptx.entry import parse_entry
    >>> found = parse_entry(".visible .entry k(.param .u64 p) { .reg .b64 %rd<9>; .reg .b32 %r<9>; "
    ...     "ld.param.u64 %rd1, [p]; ld.global.b32 %r1, [%rd1]; mul.wide.s32 %rd2, %r1, 4; "
    ...     "add.s64 %rd3, %rd1, %rd2; ld.global.b32 %r2, [%rd3]; st.global.b32 [%rd1], %r2; ret; }")
    >>> sorted(indirect(found))
    [4]
    """
    marked: set[str] = set()
    count = -1
    while len(marked) != count:  # a loop may carry a mark back
        count = len(marked)
        for each in entry.instructions:
            if not each.operands or each.operands[0].startswith("["):
                continue
            given = {name for operand in each.operands[1:] for name in _REGISTER.findall(operand)}
            if _is_load(each) or given & marked:
                marked.update(_REGISTER.findall(each.operands[0]))
    return frozenset(
        index
        for index, each in enumerate(entry.instructions)
        if any(operand.startswith("[") and marked.intersection(_REGISTER.findall(operand)) for operand in each.operands)
    )


def _is_load(each: Instruction) -> bool:
    return each.parts[0] in _BRINGS and "param" not in each.parts and "param::entry" not in each.parts
