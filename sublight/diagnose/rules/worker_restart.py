"""worker-restart: the loader's worker processes end with each epoch and start anew with the next."""

from __future__ import annotations

from sublight import units
from sublight.diagnose import python, trainer
from sublight.diagnose.case import Case, Change, Rule

LEAST = 0.02  # of the step


def check(case: Case) -> Change | None:
    spent = python.spent(case, python.starts_workers)
    if spent.share < LEAST:
        return None
    # the timed steps may lie between two starts: what a start takes is a share of those that were looked at
    return Change(
        title=f"the loader's workers start anew in each epoch: {units.percent(spent.share)} of the time",
        evidence=(
            f"{units.text(spent.seconds * spent.steps, 's')} of {spent.steps} steps: {spent.looks} looks at the main "
            "thread's stack saw it start or end worker processes",
            "epochs are short here: the longer they are, the less it matters"
            if spent.times > 1
            else "it was seen once: where an epoch has more steps than these, it matters less",
        ),
        fix=_TRAINER if trainer.runs(case.trace) else _FIX,
        edit=lambda model: model,
        saving_s=spent.share * case.step_s,
    )


_FIX = """\
DataLoader(..., num_workers=..., persistent_workers=True)   # they live as long as the loader
# only if nothing changes the dataset from epoch to epoch (set_epoch, another augmentation): they keep it as it was"""
_TRAINER = """\
TrainingArguments(..., dataloader_persistent_workers=True)"""

WORKER_RESTART = Rule(id="worker-restart", check=check)
