"""unfused-attention: product, softmax, product, with the scores written to memory and read back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sublight import units
from sublight.cost import Cost
from sublight.diagnose.attention import call_for
from sublight.diagnose.case import Case, Change, Rule, fuse
from sublight.diagnose.fusion import ATTENTION_REACHED, FP32_ATTENTION_REACHED, FUSABLE, REACHED, numel
from sublight.diagnose.rules.unfused_pointwise import propose
from sublight.fix.cure.compiled import COMPILE
from sublight.trace.record import Ints


def check(case: Case) -> Change | None:
    forward = [group for group in case.groups if group.kind == "attention" and _has_softmax(case, group.items)]
    change = propose(case, "attention", _title, "")
    if change is None or not forward:
        return None
    calls = [call_for(case, group.items) for group in forward]
    (call, _), *others = Counter(calls).most_common()
    in_dtype = _dtype_words(case, forward[0].dtype)
    more = (f"{case.often(sum(count for _, count in others))} a step are written otherwise: look at their masks",)
    return replace(
        change,
        fix=call.code,
        evidence=(*change.evidence, *in_dtype, f"mask: {call.mask}", *(more if others else ())),
        cures=((COMPILE.name, fuse(_between_products(case))),),
    )


def _between_products(case: Case) -> list[tuple[Ints, float]]:
    """What torch.compile makes of written-out attention: the products stay, and what lies between them is one kernel
    over the scores. Forward it reads and writes them; backward it reads two such tensors and writes one.
    """
    parts: list[tuple[Ints, float]] = []
    for group in case.groups:
        sizes = {at: numel(case.trace.detail_of(case.items[at].row).dims) for at in group.items}
        between = [at for at in group.items if case.items[at].family in FUSABLE and sizes[at] == max(sizes.values())]
        if group.kind != "attention" or not between:
            continue
        size = max(sizes.values()) * (2 if case.items[between[0]].dtype in ("bfloat16", "float16") else 4)
        reads = 1 if _has_softmax(case, group.items) else 2
        floor = case.limits.floor(Cost(read_bytes=reads * size, write_bytes=size))
        if floor:
            parts.append((case.events(between), floor.seconds / REACHED))
    return parts


def _dtype_words(case: Case, dtype: str) -> tuple[str, ...]:
    """What the one kernel runs in: it is the data type of these ops, and costs are of that."""
    if not dtype:
        return ()
    if dtype != "float32":
        return (f"the one kernel runs in {dtype}, as these ops do",)
    rate, half = case.limits.value("matmul_fp32"), case.limits.value("matmul_bf16")
    faster = (half or 0.0) * ATTENTION_REACHED["forward"] / ((rate or 1.0) * FP32_ATTENTION_REACHED["forward"])
    more = f"; in bfloat16 it is about {faster:.0f} times as fast" if faster > 1 else ""
    return (f"the one kernel runs in float32, as these ops do, and uses no TF32{more}",)


def _has_softmax(case: Case, items: tuple[int, ...]) -> bool:
    return any(case.items[at].family == "softmax" and "backward" not in case.items[at].name for at in items)


def _title(ops: float, groups: float) -> str:
    return f"attention is written out as {units.count(ops)} ops a step, which move its scores through memory"


UNFUSED_ATTENTION = Rule(id="unfused-attention", check=check)
