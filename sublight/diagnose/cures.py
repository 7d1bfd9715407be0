"""What `sublight explain script.py --fix` does: the script again, once a cure and with all, held against itself."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sublight.fix import cure as cures
from sublight.fix.cure import diff, figures
from sublight.fix.cure.record import Cure, Fixed, Outcome, Tried, Verdict
from sublight.fix.cure.run import run

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation

NOISE = 0.02  # of the step: two runs of one script differ by as much
NOT_SEEN = "not tried: its saving is less than two runs of one script differ by"
NOT_OURS = "not ours to change from outside: the script's own lines do it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is run again."""

    target: str
    args: tuple[str, ...]
    module: bool
    folder: str

    def run(self, names: Sequence[str] = ()) -> Outcome:
        return run(self.target, self.args, names, module=self.module, folder=self.folder)


def fix(explanation: Explanation, script: Script, *, say: Callable[[str], None]) -> Fixed:
    """Try each cure of what was found, then those that were right together; the script's file stays as it is."""
    savings = {finding.id: finding.saving_s for finding in explanation.findings}
    least_s = NOISE * explanation.step_s
    chosen = cures.treating(finding for finding, saving_s in savings.items() if saving_s > least_s)
    chosen.sort(key=lambda cure: max(savings.get(finding, 0.0) for finding in cure.treats), reverse=True)
    treated = {finding for cure in cures.CURES for finding in cure.treats}
    reached = {finding for cure in chosen for finding in cure.treats}
    left = tuple(
        (finding, NOT_SEEN if finding in treated else NOT_OURS) for finding in savings if finding not in reached
    )
    if not chosen:
        return Fixed(before_s=None, figures_of="", tried=(), left=left, diff="")
    _free_memory()
    say("running the script again, as it is")
    before = script.run()
    if before.step_s is None:
        return Fixed(before_s=None, figures_of="", tried=(), left=left, diff="", notes=(f"not tried: {before.error}",))
    tried: list[Tried] = []
    outcomes: list[Outcome] = []
    try:
        for cure in chosen:
            if cure.needs_gpu and explanation.kind != "cuda":
                outcomes.append(Outcome(left={cure.name: "it is for scripts that run on a GPU"}))
            else:
                say(f"running it again: {cure.name}")
                outcomes.append(script.run([cure.name]))
            tried.append(judge([cure], savings, before, outcomes[-1]))
        best = [cure for cure, each in zip(chosen, tried, strict=True) if is_best(each, tried)]
        together = [cure for cure in cures.CURES if cure in best]  # in the order in which they lie around each other
        if len(together) > 1:
            say("running it again: " + ", ".join(cure.name for cure in together))
            outcome = script.run([cure.name for cure in together])
            tried.append(judge(together, savings, before, outcome, most_s=explanation.combined_saving_s))
    except KeyboardInterrupt:
        say("interrupted: the cures that were tried are reported")
    edits = [
        edit
        for each, outcome in zip(tried, outcomes, strict=False)
        if each.verdict == "saves" and is_best(each, tried)
        for edit in outcome.edits
    ]
    return Fixed(
        before_s=before.step_s,
        figures_of=before.figures_of,
        tried=tuple(tried),
        left=left,
        diff=diff.unified(list(dict.fromkeys(edits)), folder=script.folder),
    )


def is_best(one: Tried, tried: Sequence[Tried]) -> bool:
    """Whether a cure belongs with the others: it is right, costs nothing, and no other does better what it does."""
    if one.verdict not in ("saves", "no change") or len(one.names) > 1:
        return False
    for finding in one.findings:
        rivals = [each.share_s(finding) for each in tried if each.verdict == "saves" and len(each.names) == 1]
        if (one.share_s(finding) or 0.0) >= max((share for share in rivals if share is not None), default=0.0):
            return True
        if one.verdict == "no change" and not any(share is not None for share in rivals):
            return True
    return False


def judge(
    chosen: Sequence[Cure],
    savings: dict[str, float],
    before: Outcome,
    after: Outcome,
    *,
    most_s: float = float("inf"),
) -> Tried:
    """A run with cures against the one without."""
    findings = tuple(finding for cure in chosen for finding in cure.treats if finding in savings)
    predicted_s = min(sum(savings[finding] for finding in findings), most_s)
    difference = figures.difference(before.figures, after.figures) if not after.error else None
    verdict, words = _verdict(chosen, before, after, difference)
    measured = verdict not in ("failed", "not applied", "not measured")
    assert before.step_s is not None
    return Tried(
        names=tuple(cure.name for cure in chosen),
        findings=findings,
        savings_s=tuple(savings[finding] for finding in findings),
        line="\n".join(dict.fromkeys(cure.line for cure in chosen)),
        predicted_s=predicted_s,
        real_s=before.step_s - after.step_s if measured and after.step_s is not None else None,
        spread_s=before.spread_s + after.spread_s,
        difference=difference,
        verdict=verdict,
        words=words,
    )


def _verdict(chosen: Sequence[Cure], before: Outcome, after: Outcome, difference: float | None) -> tuple[Verdict, str]:
    did = "; ".join(after.did[cure.name] for cure in chosen if cure.name in after.did)
    left = "; ".join(after.left[cure.name] for cure in chosen if cure.name in after.left)
    if after.error and after.step_s is None:
        return ("not measured" if after.error.startswith("it ended") else "failed"), after.error
    if not did:
        return "not applied", left or "it found nothing to change"
    low = before.low_precision or after.low_precision
    allowed = max([figures.LOW if low else figures.FULL, *(cure.tolerance for cure in chosen)])
    if difference is not None and difference > allowed:
        return "changed the numbers", f"{before.figures_of} differ by more than {allowed:g}: {did}"
    assert before.step_s is not None and after.step_s is not None
    saved_s, noise_s = before.step_s - after.step_s, max(NOISE * before.step_s, before.spread_s, after.spread_s)
    if abs(saved_s) <= noise_s:
        return "no change", did
    return ("saves" if saved_s > 0 else "slower"), did


def _free_memory() -> None:
    """What the first run left on the GPU is the next one's."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
