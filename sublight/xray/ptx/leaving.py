"""The assembler lets lanes leave before a kernel's last store where a guard keeps them from it.

`ld.shared %r, …; @%p st.global …, %r; ret;` becomes `@!P EXIT; LDS; STG; EXIT`: shared loads that only this store needs
are made by the lanes that store. So ptxas 12.8 and 12.9 did in each of 16 kernels of ours that end so (sm_90), and on
an H200 the two that were counted had the requests that this gives.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sublight.xray.ptx.entry import Entry, Instruction

_NAME = re.compile(r"[%$][\w$]+(?:@\d+)?")
_FENCES = (
    *("st", "atom", "red", "cp", "bar", "barrier", "mbarrier", "fence", "membar", "stmatrix"),
    *("bra", "brx", "call", "ret", "exit", "trap"),
)


def leaving_early(entry: Entry) -> Entry:
    """The entry with those loads behind everything else, under the store's guard."""
    listed = entry.instructions
    last = max((at for at, one in enumerate(listed) if one.parts[0] not in ("ret", "exit")), default=-1)
    if last < 0 or listed[last].parts[0] != "st" or not listed[last].predicate:
        return entry
    store = listed[last]
    begin = max((at + 1 for at in range(last) if listed[at].parts[0] in _FENCES), default=0)
    begin = max(begin, max((at for at in entry.labels.values() if at <= last), default=0))
    loads = [at for at in range(begin, last) if _is_plain_load(listed[at]) and _is_only_for(at, last, listed)]
    guarded = [replace(listed[at], predicate=store.predicate, is_negated=store.is_negated) for at in loads]
    others = [listed[at] for at in range(begin, last) if at not in loads]
    return replace(entry, instructions=(*listed[:begin], *others, *guarded, *listed[last:]))


def _is_plain_load(one: Instruction) -> bool:
    is_shared = any(part.partition("::")[0] == "shared" for part in one.parts)
    return one.parts[0] == "ld" and is_shared and not one.predicate and not {"volatile", "acquire"} & set(one.parts)


def _is_only_for(at: int, last: int, listed: tuple[Instruction, ...]) -> bool:
    """Nothing but the value of the last store reads what this load writes."""
    mine = set(_NAME.findall(listed[at].operands[0]))
    if not mine <= set(_NAME.findall(listed[last].operands[1])) or mine & set(_NAME.findall(listed[last].operands[0])):
        return False
    others = (one for index, one in enumerate(listed) if index not in (at, last))
    return all(mine.isdisjoint(_NAME.findall(" ".join((one.predicate, *one.operands)))) for one in others)
