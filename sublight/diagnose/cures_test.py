"""`explain --fix`: what is run, how a run is judged, and what comes of one that is wrong, slow or broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sublight.diagnose import cures as cli_fix
from sublight.diagnose.record import Finding
from sublight.fix.cure import find
from sublight.fix.cure.record import Fixed, Outcome, Tried
from sublight.report.draw import console
from sublight.report.explain import fakes as explain_fakes
from sublight.report.explain import fix as explain_fix
from sublight.report.explain import page as explain_page

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


@dataclass
class Runs:
    """A script whose runs are given."""

    outcomes: dict[tuple[str, ...], Outcome]
    asked: list[tuple[str, ...]]
    folder: str = "."

    def run(self, names: Sequence[str] = ()) -> Outcome:
        self.asked.append(tuple(names))
        return self.outcomes[tuple(names)]


def done(name: str, step_s: float, **changes: Any) -> Outcome:
    return replace(BEFORE, **{"step_s": step_s, "did": {name: "words"}, **changes})


def fix(explanation: Any, outcomes: dict[tuple[str, ...], Outcome]) -> tuple[Fixed, list[tuple[str, ...]]]:
    runs: Any = Runs(outcomes={(): BEFORE, **outcomes}, asked=[])
    return cli_fix.fix(explanation, runs, say=lambda line: None), runs.asked


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
        (Outcome(error="it ended after 3 steps: too few to time"), "not measured", None),
    ],
)
def test_a_run_is_judged(after: Outcome, verdict: str, real_s: float | None) -> None:
    tried = cli_fix.judge([find("patch norms")], {"unfused-norm": 1e-3}, BEFORE, after)
    assert tried.verdict == verdict
    assert tried.real_s == (None if real_s is None else pytest.approx(real_s))


def test_tf32_may_change_what_it_says_it_changes() -> None:
    after = done("TF32", 5e-3, figures=(1.0, 0.502))
    assert cli_fix.judge([find("TF32")], {"no-tensor-cores": 1e-3}, BEFORE, after).verdict == "saves"


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
    tried = cli_fix.judge(
        [find("compile")], {"unfused-pointwise": 3e-3, "unfused-attention": 1e-3}, BEFORE, done("compile", 6e-3)
    )
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
    def run(self: Any, names: Sequence[str] = ()) -> Outcome:
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
    say(explain_fix.page("above", replace(fixed, diff="--- a/t.py\n+sublight.patch(model)")))
    out = capsys.readouterr().out
    for words in ("above", "patch norms", "4.00 ms", "1.00", "saves", "failed: ValueError: no", "host-sync: not ours"):
        assert words in out
    assert "+sublight.patch(model)" in out and "no file was changed" in out
    assert explain_fix.lines(fixed)[1] == "add: sublight.patch(model)", "without a diff, the line itself"


def test_the_html_page_has_the_cures_and_the_diff() -> None:
    norms = ("patch norms",)
    fixed, _ = fix(explained(unfused_norm=4e-3), {norms: done(*norms, 6e-3)})
    page = explain_page.document(explain_fakes.explanation(), explain_fix.section(replace(fixed, diff="+a < b")))
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
        predicted_s=1e-3, real_s=-3e-3, spread_s=0.0, difference=0.0, verdict="slower", words="compiled",
    )  # fmt: skip
    patched = replace(slower, names=("patch activations",), line="sublight.patch(model)", verdict="saves", real_s=1e-3)
    fixed = Fixed(before_s=20e-3, figures_of="losses", tried=(slower, patched), left=(), diff="")
    first, second = explain_fix.as_measured(explanation, fixed).findings
    assert first.fix == "y = F.gelu(x)" and first.cure == "sublight.patch(model)"
    assert first.evidence == ("seen", "compile, tried on the script: slower by 3.00 ms a step")
    assert second == other
    useless = replace(fixed, tried=(replace(patched, verdict="no change"),))
    assert explain_fix.as_measured(explanation, useless).findings[0].cure == ""
