"""rank-imbalance: some ranks come late to the collectives, and the others wait for them there."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.ranks import Rank, ranks
from sublight.trace.record import Trace

LEAST = 0.02


def check(case: Case) -> Change | None:
    if not case.others:
        return None
    found = ranks(case)
    compute, talk = (np.array([getattr(rank, name) for rank in found]) for name in ("compute_s", "talk_s"))
    by_work = float(compute.max() - compute.mean())
    by_wait = float(talk.mean() - talk.min()) if talk.all() else 0.0  # whoever waits least is waited for
    lost = max(by_work, by_wait)
    if lost < LEAST * case.step_s:
        return None
    fair = min(float(compute.mean() / compute[0]), 1.0) if compute[0] else 1.0  # of this rank's work, what it keeps
    slow = found[int(compute.argmax())] if by_work >= by_wait / 2 else found[int(talk.argmin())]
    return Change(
        title=_title(slow, float(compute.mean()), by_work >= by_wait / 2, lost),
        evidence=tuple(_line(rank) for rank in found[:16])
        + ((f"and {len(found) - 16} more",) if len(found) > 16 else ()),
        fix=_FIX + (_CLOCK if case.on_gpu else ""),
        edit=lambda model: model,
        saving_s=lost,
        floor_saving_s=case.floor_after_s(case.model) * (1 - fair),
    )


def _title(slow: Rank, mean_s: float, by_work: bool, lost_s: float) -> str:
    if by_work:
        return (
            f"rank {name(slow.trace)} computes {units.text(slow.compute_s, 's')} a step, the average rank "
            f"{units.text(mean_s, 's')}"
        )
    return f"rank {name(slow.trace)} comes late to the collectives: others wait {units.text(lost_s, 's')} a step for it"


def _line(rank: Rank) -> str:
    talk = f", {units.text(rank.talk_s, 's')} in collectives" if rank.talk_s else ""
    return f"rank {name(rank.trace)}: {units.text(rank.compute_s, 's')} of work{talk}"


def name(trace: Trace) -> str:
    return str(trace.rank) if trace.rank is not None else trace.source


_FIX = """\
# give every rank the same work: batches of equal tokens rather than of equal rows, experts balanced, no rank-0 extras
# in the step"""
_CLOCK = """
# `nvidia-smi` shows a GPU with a lower clock"""

RANK_IMBALANCE = Rule(id="rank-imbalance", check=check)
