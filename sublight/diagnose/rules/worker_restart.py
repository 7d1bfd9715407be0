"""worker-restart: the loader's worker processes end with each epoch and start anew with the next."""

from __future__ import annotations

from sublight import units
from sublight.diagnose import python, trainer
from sublight.diagnose.case import Case, Change, Rule

LEAST = 0.02  # of the step


def check(case: Case) -> Change | None:
    spent, steps, looks = python.spent(case, python.starts_workers)
    if spent < LEAST * case.step_s:
        return None
    return Change(
        title=f"the loader's workers start anew in each epoch: {units.text(spent, 's')} a step",
        evidence=(
            f"the main thread started or ended worker processes in {looks} looks at its stack, during {steps} steps",
            "epochs are short here: the longer they are, the less it matters",
        ),
        fix=_TRAINER if trainer.runs(case.trace) else _FIX,
        edit=lambda model: model,
        saving_s=spent,
    )


_FIX = """\
DataLoader(..., num_workers=..., persistent_workers=True)   # they live as long as the loader
# only if nothing changes the dataset from epoch to epoch (set_epoch, another augmentation): they keep it as it was"""
_TRAINER = """\
TrainingArguments(..., dataloader_persistent_workers=True)"""

WORKER_RESTART = Rule(id="worker-restart", check=check)
