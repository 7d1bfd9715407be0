"""`explain --fix`: what is run, how a run is judged, and what comes of one that is wrong, slow or broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose import cures as cli_fix
from sublight.diagnose.record import Finding
from sublight.fix.cure import CURES, find
from sublight.fix.cure.record import Edit, Fixed, Outcome, Tried
from sublight.report.draw import console
from sublight.report.explain import fakes as explain_fakes
from sublight.report.explain import fix as explain_fix
from sublight.report.explain import page as explain_page

DIFF = "the diff"
BEFORE = Outcome(step_s=10e-3, spread_s=0.1e-3, figures=(1.0, 0.5), figures_of="losses")


@dataclass(frozen=True, kw_only=True)
class Explained:
    """As much of an explanation as is asked for."""

    findings: tuple[Finding, ...]
    combined_saving_s: float = 9e-3
    step_s: float = 10e-3
    kind: str = "cuda"


def explained(**savings_s: float) -> Any:
    found = [
        Finding(id=name.replace("_", "-"), title="", saving_s=saving, evidence=(), fix="")
        for name, saving in savings_s.items()
    ]
    return Explained(findings=tuple(found))


def found(**savings_s: float) -> dict[str, Finding]:
    return {finding.id: finding for finding in explained(**savings_s).findings}


@dataclass
class Runs:
    """A script whose runs are given."""

    outcomes: dict[tuple[str, ...], Outcome]
    asked: list[tuple[str, ...]]
    folder: str = "."

    def run(self, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
        key = (DIFF, *(line[1:].strip() for line in diff.splitlines() if line[:1] == "+" != line[1:2]))
        self.asked.append(key if diff else tuple(names))
        return self.outcomes[self.asked[-1]]


def done(name: str, step_s: float, **changes: Any) -> Outcome:
    return replace(BEFORE, **{"step_s": step_s, "did": {name: "words"}, **changes})


def fix(
    explanation: Any, outcomes: dict[tuple[str, ...], Outcome], folder: str = ".", **options: Any
) -> tuple[Fixed, list[tuple[str, ...]]]:
    runs: Any = Runs(outcomes={(): BEFORE, **outcomes}, asked=[], folder=folder)
    return cli_fix.fix(explanation, runs, say=lambda line: None, **options), runs.asked


def test_each_cure_alone_then_all_together() -> None:
    norms, fused = ("patch norms",), ("fused optimizer",)
    outcomes = {
        norms: done(*norms, 6e-3),
        fused: done(*fused, 8e-3),
        (*norms, *fused): replace(done("patch norms", 5e-3), did={"patch norms": "a", "fused optimizer": "b"}),
    }
    fixed, asked = fix(explained(unfused_norm=4e-3, unfused_optimizer=3e-3, host_sync=1e-3), outcomes)
    assert asked == [(), norms, fused, (*norms, *fused)]
    assert [tried.verdict for tried in fixed.tried] == ["saves", "saves", "saves"]
    assert fixed.real_saving_s("unfused-norm") == pytest.approx(4e-3)
    assert fixed.real_saving_s("unfused-optimizer") == pytest.approx(2e-3)
    assert fixed.real_saving_s("host-sync") is None and fixed.left == (("host-sync", cli_fix.NOT_OURS),)
    assert fixed.tried[1].ratio == pytest.approx(1.5) and fixed.tried[2].predicted_s == pytest.approx(7e-3)
    data = explain_fix.to_json({"findings": [{"id": "unfused-norm"}, {"id": "host-sync"}]}, fixed)
    assert [each["real_saving_s"] for each in data["findings"]] == [pytest.approx(4e-3), None]
    assert data["fix"]["tried"][0]["names"] == norms and data["fix"]["left"][0]["finding"] == "host-sync"


def test_the_main_cure_alone_is_the_first_that_could_be_timed() -> None:
    norms, fused = ("patch norms",), ("fused optimizer",)
    outcomes = {norms: replace(BEFORE, left={"patch norms": "none here"}), fused: done(*fused, 7e-3)}
    found = explained(unfused_norm=5e-3, unfused_optimizer=3e-3, allocator_thrash=1e-3)
    fixed, asked = fix(found, outcomes, tries="main")
    assert asked == [(), norms, fused]
    assert [tried.real_s for tried in fixed.tried] == [None, pytest.approx(3e-3)] and not fixed.diff


def test_the_largest_saving_first_and_none_that_no_run_would_show() -> None:
    norms, fused, graph = ("patch norms",), ("fused optimizer",), ("graph",)
    outcomes = {
        fused: done(*fused, 7e-3),
        norms: done(*norms, 9e-3),
        (*norms, *fused): replace(done("patch norms", 6e-3), did={"patch norms": "a", "fused optimizer": "b"}),
        graph: done(*graph, 1e-3),
    }
    fixed, asked = fix(explained(launch_bound=0.19e-3, unfused_norm=1e-3, unfused_optimizer=3e-3), outcomes)
    assert asked == [(), fused, norms, (*norms, *fused)]
    assert fixed.left == (("launch-bound", cli_fix.NOT_SEEN),)


@pytest.mark.parametrize(
    ("after", "verdict", "real_s"),
    [
        (done("patch norms", 10.1e-3), "no change", -0.1e-3),
        (done("patch norms", 12e-3), "slower", -2e-3),
        (done("patch norms", 5e-3, figures=(1.0, 0.6)), "changed the numbers", 5e-3),
        (done("patch norms", 5e-3, figures=(1.0, math.nan)), "changed the numbers", 5e-3),
        (done("patch norms", 5e-3, figures=(1.0, 0.502)), "changed the numbers", 5e-3),
        (done("patch norms", 5e-3, figures=(1.0, 0.502), low_precision=True), "saves", 5e-3),
        (Outcome(step_s=9e-3, left={"patch norms": "none here"}), "not applied", None),
        (Outcome(error="ValueError: no"), "failed", None),
        (done("patch norms", 5e-3, error="TypeError: after the timed steps"), "failed", None),
        (Outcome(error="it ended after 3 steps: too few to time"), "not measured", None),
    ],
)
def test_a_run_is_judged(after: Outcome, verdict: str, real_s: float | None) -> None:
    tried = cli_fix.judge([find("patch norms")], found(unfused_norm=1e-3), BEFORE, after)
    assert tried.verdict == verdict
    assert tried.real_s == (None if real_s is None else pytest.approx(real_s))


def test_a_script_that_fails_anyway_is_timed() -> None:
    fails = replace(BEFORE, error="ValueError: at its end")
    after = done("patch norms", 5e-3, error="ValueError: at its end")
    tried = cli_fix.judge([find("patch norms")], found(unfused_norm=1e-3), fails, after)
    assert tried.verdict == "saves" and tried.difference == 0.0


def test_tf32_may_change_what_it_says_it_changes() -> None:
    after = done("TF32", 5e-3, figures=(1.0, 0.502))
    assert cli_fix.judge([find("TF32")], found(no_tensor_cores=1e-3), BEFORE, after).verdict == "saves"


def test_a_wrong_cure_is_neither_recommended_nor_combined() -> None:
    outcomes = {
        ("patch norms",): done("patch norms", 5e-3, figures=(2.0, 0.5)),
        ("fused optimizer",): Outcome(error="RuntimeError: out of it"),
    }
    fixed, asked = fix(explained(unfused_norm=4e-3, unfused_optimizer=1e-3), outcomes)
    assert asked == [(), ("patch norms",), ("fused optimizer",)] and fixed.diff == ""
    assert fixed.real_saving_s("unfused-norm") is None


def test_of_two_cures_of_a_finding_the_better_one_is_kept() -> None:
    patch, compiled, fused = "patch activations", "compile", "fused optimizer"
    outcomes = {
        (patch,): done(patch, 9e-3),
        (compiled,): done(compiled, 6e-3),
        (fused,): done(fused, 8e-3),
        (compiled, fused): replace(done(compiled, 5e-3), did={compiled: "a", fused: "b"}),
    }
    fixed, asked = fix(explained(unfused_pointwise=4e-3, unfused_optimizer=1e-3), outcomes)
    assert asked[-1] == (compiled, fused) and fixed.real_saving_s("unfused-pointwise") == pytest.approx(4e-3)


def test_a_cure_of_several_findings_shares_its_saving() -> None:
    findings = found(unfused_pointwise=3e-3, unfused_attention=1e-3)
    tried = cli_fix.judge([find("compile")], findings, BEFORE, done("compile", 6e-3))
    assert (tried.share_s("unfused-pointwise"), tried.share_s("unfused-attention")) == pytest.approx((3e-3, 1e-3))


def test_nothing_runs_where_nothing_is_ours_or_the_script_cannot_be_timed() -> None:
    fixed, asked = fix(explained(host_sync=1e-3), {})
    assert not asked and not fixed.tried
    fixed, asked = fix(explained(unfused_norm=1e-3), {(): Outcome(error="no steps were found in it")})
    assert asked == [()] and "no steps were found" in fixed.notes[0]


def test_on_a_cpu_what_needs_a_gpu_is_not_run() -> None:
    fixed, asked = fix(replace(explained(launch_bound=1e-3), kind="cpu"), {})
    assert asked == [()] and fixed.tried[0].verdict == "not applied"


def test_an_interrupt_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
        if "fused optimizer" in names:
            raise KeyboardInterrupt
        return done("patch norms", 6e-3)

    monkeypatch.setattr(Runs, "run", run)
    fixed, _ = fix(explained(unfused_norm=4e-3, unfused_optimizer=3e-3), {})
    assert [tried.names for tried in fixed.tried] == [("patch norms",)]


def test_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    outcomes = {
        ("patch norms",): done("patch norms", 6e-3),
        ("fused optimizer",): Outcome(error="ValueError: no"),
    }
    fixed, _ = fix(explained(unfused_norm=4e-3, unfused_optimizer=3e-3, host_sync=1e-3), outcomes)
    say: Callable[..., None] = console.stdout().print
    shown = replace(fixed, diff="--- a/t.py\n+sublight.patch(model)", checked=fixed.tried[0])
    say(explain_fix.page("above", shown))
    out = capsys.readouterr().out
    for words in (
        "above",
        "the diff",
        "it saves 4.00 ms a step, with the same losses",
        "patch norms",
        "4.00 ms",
        "1.00",
        "saves",
        "failed: ValueError: no",
        "host-sync: not ours",
    ):
        assert words in out
    assert "No file was changed" in " ".join(out.split()) and "+sublight" not in out, "the text goes below, as it is"
    assert explain_fix.diff_text(shown) == shown.diff
    assert "--write" in explain_fix.diff_text(replace(shown, diff=" \x1b[2J")), "a terminal would obey it"
    assert explain_fix.diff_text(replace(shown, diff="+\tä = 1\r\n")) == "+\tä = 1\r\n"
    assert explain_fix.lines(fixed)[1] == "add: sublight.patch(model)", "without a diff, the line itself"


def test_the_html_page_has_the_cures_and_the_diff() -> None:
    norms = ("patch norms",)
    fixed, _ = fix(explained(unfused_norm=4e-3), {norms: done(*norms, 6e-3)})
    section = explain_fix.section(replace(fixed, diff="+a < b", checked=fixed.tried[0]))
    page = explain_page.document(explain_fakes.explanation(), section)
    assert "Cures, tried" in page and "+a &lt; b" in page and "+a < b" not in page
    for cell in ("patch norms", "4.00 ms", "1.00", "saves", "words"):
        assert f"<td>{cell}" in page
    assert "Cures, tried" not in explain_page.document(explain_fakes.explanation())


def test_what_was_tried_and_lost_is_advised_no_more() -> None:
    """Compiling made the script slower: its line goes, the advice beside it stays, and the trial is said."""
    finding = Finding(
        id="unfused-pointwise",
        title="t",
        saving_s=1e-3,
        evidence=("seen",),
        fix="model = torch.compile(model)   # or by hand:\ny = F.gelu(x)",
        cure="sublight.patch(model)",
    )
    other = replace(finding, id="host-sync", fix="torch.compile stays here", cure="")
    explanation = explain_fakes.explanation(findings=(finding, other))
    slower = Tried(
        names=("compile",), findings=("unfused-pointwise",), savings_s=(1e-3,), line="model = torch.compile(model)",
        predicted_s=1e-3, fix_s=1e-3, real_s=-3e-3, spread_s=0.0, difference=0.0, verdict="slower", words="compiled",
    )  # fmt: skip
    patched = replace(slower, names=("patch activations",), line="sublight.patch(model)", verdict="saves", real_s=1e-3)
    fixed = Fixed(before_s=20e-3, figures_of="losses", tried=(slower, patched), left=(), diff="")
    first, second = explain_fix.as_measured(explanation, fixed).findings
    assert first.fix == "y = F.gelu(x)" and first.cure == "sublight.patch(model)"
    assert first.evidence == ("seen", "compile, tried on the script: slower by 3.00 ms a step")
    assert second == other
    useless = replace(fixed, tried=(replace(patched, verdict="no change"),))
    assert explain_fix.as_measured(explanation, useless).findings[0].cure == ""


# ------------------------------------------------------------------------------------------------ the diff


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("model = make()\noptimizer = opt(model)\ntrain(model)\n")
    return file


def with_edits(script: Path) -> dict[tuple[str, ...], Outcome]:
    """Two cures that save, with what they would have written."""
    norms, fused = "patch norms", "fused optimizer"
    one = Edit(kind="before", file=str(script), line=3, text="patch(model)")
    other = Edit(kind="argument", file=str(script), line=2, text="fused=True", call="opt")
    return {
        (norms,): done(norms, 6e-3, edits=(one,)),
        (fused,): done(fused, 8e-3, edits=(other,)),
        (norms, fused): replace(done(norms, 5e-3), did={norms: "a", fused: "b"}),
    }


ALL = (DIFF, "optimizer = opt(model, fused=True)", "patch(model)")
BEST = (DIFF, "patch(model)")
FOUND = {"unfused_norm": 4e-3, "unfused_optimizer": 3e-3}


def test_a_diff_is_shown_when_it_has_run(script: Path) -> None:
    outcomes = {**with_edits(script), ALL: replace(BEFORE, step_s=5e-3)}
    fixed, asked = fix(explained(**FOUND), outcomes, str(script.parent))
    assert asked[-2:] == [ALL, ()] and "+patch(model)\n" in fixed.diff and fixed.diff.endswith("\n")
    assert fixed.checked is not None and fixed.checked.real_s == pytest.approx(5e-3)
    assert fixed.to_json()["checked"]["verdict"] == "saves"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (Outcome(error="AttributeError: 'NoneType' object has no attribute 'argmax'"), "failed: AttributeError"),
        (replace(BEFORE, step_s=5e-3, figures=(1.0, 0.9)), "it changed the numbers"),
        (replace(BEFORE, step_s=5e-3, figures=()), "it changed the numbers"),
        (replace(BEFORE, step_s=10e-3), "it saved nothing"),
        (replace(BEFORE, step_s=12e-3), "it was slower"),
        (Outcome(error="it was ended after 120 s, the limit of a run"), "failed: it was ended"),
    ],
)
def test_a_diff_that_is_not_the_cure_is_not_shown(script: Path, after: Outcome, words: str) -> None:
    fixed, asked = fix(explained(**FOUND), {**with_edits(script), ALL: after, BEST: after}, str(script.parent))
    assert asked[-2:] == [ALL, BEST] and fixed.diff == "" and fixed.checked is None
    assert "no diff is shown: one was made in a copy and run, and" in fixed.notes[0] and words in fixed.notes[0]


@pytest.mark.parametrize("figures", [(), (float("nan"), float("nan"))])
def test_no_diff_without_anything_to_compare(script: Path, figures: tuple[float, ...]) -> None:
    blind = {names: replace(outcome, figures=figures) for names, outcome in with_edits(script).items()}
    runs: Any = Runs(outcomes={(): replace(BEFORE, figures=figures), **blind}, asked=[], folder=str(script.parent))
    fixed = cli_fix.fix(explained(**FOUND), runs, say=lambda line: None)
    assert fixed.diff == "" and "no diff is shown: the script has no finite losses" in fixed.notes[0]


def test_a_diff_that_lost_is_not_advised(script: Path) -> None:
    outcomes = {**with_edits(script), ALL: replace(BEFORE, step_s=12e-3), BEST: replace(BEFORE, step_s=12e-3)}
    fixed, _ = fix(explained(**FOUND), outcomes, str(script.parent))
    assert set(fixed.lost) == {"patch norms", "fused optimizer"} and not [
        x for x in explain_fix.lines(fixed) if "add:" in x
    ]


def test_a_machine_that_was_busy_at_first_does_not_praise_a_diff(script: Path) -> None:
    """As it is, the script takes 10 ms first and 5 ms later: what the diff took is what it takes anyway."""
    outcomes = {**with_edits(script), ALL: replace(BEFORE, step_s=5e-3), BEST: replace(BEFORE, step_s=5e-3)}

    class Quieter(Runs):
        def run(self, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
            is_first = () not in self.asked
            outcome = super().run(names, diff=diff)
            return outcome if names or diff or is_first else replace(BEFORE, step_s=5e-3)

    runs: Any = Quieter(outcomes={(): BEFORE, **outcomes}, asked=[], folder=str(script.parent))
    fixed = cli_fix.fix(explained(**FOUND), runs, say=lambda line: None)
    assert fixed.diff == "" and "it saved nothing" in fixed.notes[0] and runs.asked.count(()) == 2


def test_where_all_together_fails_the_best_is_tried_alone(script: Path) -> None:
    outcomes = {**with_edits(script), ALL: Outcome(error="ValueError: no"), BEST: replace(BEFORE, step_s=6e-3)}
    fixed, _ = fix(explained(**FOUND), outcomes, str(script.parent))
    assert "+patch(model)" in fixed.diff and "fused" not in fixed.diff and not fixed.notes


def test_no_more_runs_than_were_announced(script: Path) -> None:
    every = {cure.treats[0].replace("-", "_"): 1e-3 for cure in CURES}
    asked: list[Any] = []

    class All(Runs):
        def run(self, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
            asked.append(names or diff)
            edit = Edit(kind="before", file=str(script), line=3, text=f"f({len(asked)})")
            if diff:
                return Outcome(error="ValueError: no")
            return replace(BEFORE, step_s=(10 - len(names)) * 1e-3, did=dict.fromkeys(names, "x"), edits=(edit,))

    runs: Any = All(outcomes={}, asked=[], folder=str(script.parent))
    cli_fix.fix(explained(**every), runs, say=lambda line: None)
    assert len(asked) + 1 == cli_fix.most_runs(on_gpu=True) == len(CURES) + 5, "had the last diff saved: as it is again"
    assert cli_fix.most_runs(on_gpu=False) == 9


def test_what_was_refused_is_named_once(script: Path) -> None:
    norms = ("patch norms",)
    outcomes = {(): replace(BEFORE, refused=("/a", "/b")), norms: done(*norms, 6e-3, refused=("/b",))}
    fixed, _ = fix(explained(unfused_norm=4e-3), outcomes)
    assert fixed.notes == (
        "refused, as it lies outside of the scratch copy: /a, /b; --scratch-allow FOLDER lets runs write there",
    )
    fixed, _ = fix(explained(unfused_norm=4e-3), {(): Outcome(error="PermissionError: no", refused=("/a",))})
    assert fixed.notes[0] == "not tried: PermissionError: no" and "/a" in fixed.notes[1]


def test_predictions_are_for_the_plain_step() -> None:
    """A host that is watched is slower: what a cure saves is compared with a plain run, so it is predicted for one."""
    norms, steps = ("patch norms",), list[float]()

    def rebased(step_s: float) -> Any:
        steps.append(step_s)
        return replace(explained(unfused_norm=2e-3, launch_bound=0.01e-3), step_s=step_s)

    outcomes = {(): replace(BEFORE, step_s=7e-3), norms: done(*norms, 5e-3)}
    fixed, asked = fix(explained(unfused_norm=4e-3, launch_bound=1e-3), outcomes, rebased=rebased)
    assert steps == [7e-3] and asked == [(), norms]
    assert fixed.tried[0].predicted_s == 2e-3 and fixed.tried[0].ratio == pytest.approx(1.0)
    assert fixed.left == (("launch-bound", cli_fix.NOT_SEEN),) and "7.00 ms in a plain run" in fixed.notes[0]
    fixed, _ = fix(explained(unfused_norm=4e-3), {norms: done(*norms, 6e-3)}, rebased=rebased)
    assert len(steps) == 1 and not fixed.notes, "the same step: nothing to explain anew"
