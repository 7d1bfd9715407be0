"""What `sublight explain script.py --fix` does: the script again, once a cure and with all, held against itself."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

from sublight import units
from sublight.fix import cure as cures
from sublight.fix.cure import diff, figures
from sublight.fix.cure.record import Cure, Edit, Fixed, Outcome, Tried, Verdict

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation, Finding

NOISE = 0.02  # of the step: two runs of one script differ by as much
SHOWN = 5  # files by name
NOT_SEEN = "not tried: its saving is less than two runs of one script differ by"
NO_PROOF = "the script has no finite losses or outputs to compare, so nothing shows that it still computes the same"
NOT_OURS = "not ours to change from outside: the script's own lines do it"


class Runnable(Protocol):
    """What is run again: a `fix.cure.run.Rerun`."""

    @property
    def folder(self) -> str: ...
    def run(self, names: Sequence[str] = (), *, diff: str = "") -> Outcome: ...


def most_runs(*, on_gpu: bool) -> int:
    """Of a script whose findings are not known yet: with each cure, with all, the diff twice, as it is twice."""
    return sum(on_gpu or not cure.needs_gpu for cure in cures.CURES) + 5


def fix(
    explanation: Explanation,
    script: Runnable,
    *,
    say: Callable[[str], None],
    rebased: Callable[[float], Explanation] | None = None,
    tries: Literal["all", "main"] = "all",
) -> Fixed:
    """Try each cure of what was found, then those that were right together, then the diff of those that save.

    `rebased` explains the same steps for another step time: what a plain run takes, with nothing that watches it.
    `tries="main"` ends with the first cure that could be timed, the one of the largest saving, without a diff.
    """
    chosen, left = _plan(explanation)
    if not chosen:
        return Fixed(before_s=None, figures_of="", tried=(), left=left, diff="")
    _free_memory()
    say("running the script again, as it is, in a scratch copy")
    try:
        before = script.run()
    except KeyboardInterrupt:
        before = Outcome(error="interrupted")
    if before.step_s is None:
        reasons = (f"not tried: {before.error}", *_refused([before]))
        return Fixed(before_s=None, figures_of="", tried=(), left=left, diff="", notes=reasons)
    notes: list[str] = []
    if rebased is not None and abs(before.step_s / explanation.step_s - 1) > NOISE:
        notes.append(
            f"a step takes {units.text(before.step_s, 's')} in a plain run, and took "
            f"{units.text(explanation.step_s, 's')} in the run that was watched: the predictions are for the plain one"
        )
        explanation = rebased(before.step_s)
        chosen, left = _plan(explanation)
    trials = Trials(explanation, script, before, say)
    checked: Tried | None = None
    text = ""
    try:
        trials.each(chosen, tries)
        if tries == "all":
            trials.together()
            text, checked, why = trials.diff()
            notes += [why] if why else []
    except KeyboardInterrupt:
        say("interrupted: the cures that were tried are reported")
        notes.append("interrupted: a diff is shown only when it has been run")
    return Fixed(
        before_s=before.step_s,
        figures_of=before.figures_of,
        tried=tuple(trials.tried),
        left=left,
        diff=text,
        checked=checked,
        lost=tuple(sorted(trials.lost)),
        notes=(*notes, *_refused([before, *trials.outcomes])),
    )


def _plan(explanation: Explanation) -> tuple[list[Cure], tuple[tuple[str, str], ...]]:
    """The cures to try, the largest saving first; findings that nothing is tried for, and why."""
    savings = {finding.id: finding.saving_s for finding in explanation.findings}
    least_s = NOISE * explanation.step_s
    chosen = cures.treating(finding for finding, saving_s in savings.items() if saving_s > least_s)
    chosen.sort(key=lambda cure: max(_predicted_s(cure, explanation.findings), default=0.0), reverse=True)
    treated = {finding for cure in cures.CURES for finding in cure.treats}
    reached = {finding for cure in chosen for finding in cure.treats}
    left = tuple(
        (finding, NOT_SEEN if finding in treated else NOT_OURS) for finding in savings if finding not in reached
    )
    return chosen, left


def _predicted_s(cure: Cure, findings: Iterable[Finding]) -> list[float]:
    """What a cure is expected to save of each finding that it treats: that may be less than the finding's fix does."""
    return [found.cure_savings_s.get(cure.name, found.saving_s) for found in findings if found.id in cure.treats]


class Trials:
    """Runs of a script with cures, against the one without."""

    def __init__(self, explanation: Explanation, script: Runnable, before: Outcome, say: Callable[[str], None]) -> None:
        self._explanation, self._script, self._before, self._say = explanation, script, before, say
        self._found = {finding.id: finding for finding in explanation.findings}
        self._later: Outcome | None = None  # as it is, once more
        self._singles: list[tuple[Cure, Tried, Outcome]] = []
        self.tried: list[Tried] = []
        self.outcomes: list[Outcome] = []
        self.lost: set[str] = set()  # cures whose diff was run, and did not do what they had done

    def each(self, chosen: Sequence[Cure], tries: Literal["all", "main"]) -> None:
        for cure in chosen:
            if tries == "main" and any(tried.real_s is not None for tried in self.tried):
                return
            if cure.needs_gpu and self._explanation.kind != "cuda":
                outcome = Outcome(left={cure.name: "it is for scripts that run on a GPU"})
            else:
                self._say(f"running it again: {cure.name}")
                outcome = self._script.run([cure.name])
            self._keep(outcome, tried := judge([cure], self._found, self._before, outcome))
            self._singles.append((cure, tried, outcome))

    def together(self) -> None:
        """All that were right, in the order in which they lie around each other."""
        best = [cure for cure, tried, _ in self._singles if is_best(tried, self.tried)]
        together = [cure for cure in cures.CURES if cure in best]
        if len(together) > 1:
            self._say("running it again: " + ", ".join(cure.name for cure in together))
            outcome = self._script.run([cure.name for cure in together])
            most_s = self._explanation.combined_saving_s
            self._keep(outcome, judge(together, self._found, self._before, outcome, most_s=most_s))

    def diff(self) -> tuple[str, Tried | None, str]:
        """A diff that was run, gave the same numbers and saved time: of all cures that save, else of the best of them;
        what running it gave; why there is none.
        """
        saving = [each for each in self._singles if each[1].verdict == "saves" and is_best(each[1], self.tried)]
        saving = [each for each in saving if diff.unified(each[2].edits, folder=self._script.folder)]
        if saving and figures.difference(self._before.figures, self._before.figures) is None:
            return "", None, f"no diff is shown: {NO_PROOF}"
        saving.sort(key=lambda each: each[1].real_s or 0.0, reverse=True)
        reason, seen = "", set[str]()
        for attempt in (saving, saving[:1]):
            text = diff.unified(_edits(attempt), folder=self._script.folder)
            if not text or text in seen:
                continue
            seen.add(text)
            self._say("running it again, with the diff made in its scratch copy")
            outcome = self._script.run(diff=text)
            chosen = [cure for cure, _, _ in attempt]
            self.outcomes.append(outcome)
            tried = self._of_diff(chosen, outcome, self._before)
            if tried.verdict == "saves":
                tried = self._of_diff(chosen, outcome, self._again())
            if tried.verdict == "saves":
                return text, tried, ""
            self.lost.update(cure.name for cure in chosen)
            reason = f"no diff is shown: one was made in a copy and run, and {_ended(tried)}"
        return "", None, reason

    def _of_diff(self, chosen: Sequence[Cure], outcome: Outcome, before: Outcome) -> Tried:
        made = replace(outcome, did={cure.name: "by the diff" for cure in chosen})
        return judge(chosen, self._found, before, made, most_s=self._explanation.combined_saving_s)

    def _again(self) -> Outcome:
        """The script as it is, the faster of two runs: a machine that was busy at first must not praise a diff."""
        if self._later is None:
            self._say("running it again, as it is")
            self._later = self._script.run()
        is_faster = self._later.step_s is not None and self._later.step_s < (self._before.step_s or 0.0)
        return self._later if is_faster else self._before

    def _keep(self, outcome: Outcome, tried: Tried) -> None:
        self.outcomes.append(outcome)
        self.tried.append(tried)


def _edits(saving: Sequence[tuple[Cure, Tried, Outcome]]) -> list[Edit]:
    """The edits of these cures, in the order in which they may be nested."""
    ordered = sorted(saving, key=lambda each: cures.CURES.index(each[0]))
    return list(dict.fromkeys(edit for _, _, outcome in ordered for edit in outcome.edits))


def _ended(tried: Tried) -> str:
    """How a diff that is not shown did."""
    if tried.verdict in ("failed", "not measured"):
        return f"that failed: {tried.words}"
    return {"no change": "it saved nothing", "slower": "it was slower"}.get(tried.verdict, f"it {tried.verdict}")


def _refused(outcomes: Sequence[Outcome]) -> list[str]:
    """What the runs would have written elsewhere, and how to let them."""
    files = list(dict.fromkeys(file for outcome in outcomes for file in outcome.refused))
    shown = ", ".join(files[:SHOWN]) + (f" and {len(files) - SHOWN} more" if len(files) > SHOWN else "")
    return (
        [f"refused, as it lies outside of the scratch copy: {shown}; --scratch-allow FOLDER lets runs write there"]
        if files
        else []
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
    found: Mapping[str, Finding],
    before: Outcome,
    after: Outcome,
    *,
    most_s: float = float("inf"),
) -> Tried:
    """A run with cures against the one without."""
    treated = [(cure, found[name]) for cure in chosen for name in cure.treats if name in found]
    savings_s = tuple(_predicted_s(cure, [finding])[0] for cure, finding in treated)
    failed = after.error != before.error
    difference = None if failed else figures.difference(before.figures, after.figures)
    verdict, words = _verdict(chosen, before, after, difference)
    measured = verdict not in ("failed", "not applied", "not measured")
    assert before.step_s is not None
    return Tried(
        names=tuple(cure.name for cure in chosen),
        findings=tuple(finding.id for _, finding in treated),
        savings_s=savings_s,
        line="\n".join(dict.fromkeys(cure.line for cure in chosen)),
        predicted_s=min(sum(savings_s), most_s),
        fix_s=min(sum({finding.id: finding.saving_s for _, finding in treated}.values()), most_s),
        real_s=before.step_s - after.step_s if measured and after.step_s is not None else None,
        spread_s=before.spread_s + after.spread_s,
        difference=difference,
        verdict=verdict,
        words=words,
    )


def _verdict(chosen: Sequence[Cure], before: Outcome, after: Outcome, difference: float | None) -> tuple[Verdict, str]:
    did = "; ".join(after.did[cure.name] for cure in chosen if cure.name in after.did)
    left = "; ".join(after.left[cure.name] for cure in chosen if cure.name in after.left)
    if after.error and (after.step_s is None or after.error != before.error):
        return ("not measured" if after.error.startswith(("it ended", "it was ended")) else "failed"), after.error
    if not did:
        return "not applied", left or "it found nothing to change"
    low = before.low_precision or after.low_precision
    allowed = max([figures.LOW if low else figures.FULL, *(cure.tolerance for cure in chosen)])
    if difference is not None and difference > allowed:
        return "changed the numbers", f"{before.figures_of} differ by more than {allowed:g}: {did}"
    if before.figures and not after.figures:
        return "changed the numbers", f"it gave no {before.figures_of} to compare: {did}"
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
