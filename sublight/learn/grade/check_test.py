"""Checks with their processes: starters fail, solutions and honest styles pass, cheats fail for the right reason."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton
import triton.language as tl

import sublight
from sublight.cli import main as cli
from sublight.gpus import find as find_gpu
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade import check as checking
from sublight.learn.grade import disguised_fakes as disguised
from sublight.learn.grade.crew import Crew
from sublight.learn.grade.fakes import CHEATS, COMPILED, HEAD, HONEST, OTHERS, RUN, SCANNED, Cheat
from sublight.learn.grade.goal import ABOVE_LIMIT
from sublight.learn.grade.sandbox import Budget
from sublight.learn.progress import Progress
from sublight.learn.verdict import Verdict

SLOW = (  # their starters are right: to make them fast is the exercise
    *("multiply_add", "blocks", "transpose", "matmul", "split_k", "slow_passes", "slow_few", "slow_columns"),
    *("read_xray", "slow_double", "slow_spills", "slow_reread"),
)
SHORT = Budget(cpu_s=1, wall_s=300)


@triton.jit
def wrong_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.load(x_ptr + place))


def wrong(x, out):  # type: ignore[no-untyped-def]
    wrong_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, BLOCK=1024)


def checked(crew: Crew, name: str, source: str, budget: Budget | None = None) -> Verdict:
    return checking.check(find(name), source, crew=crew, gpu=find_gpu("h200"), budget=budget)


@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES if exercise.name not in SLOW])
def test_every_starter_fails_and_its_faults_have_words(crew: Crew, name: str) -> None:
    verdict = checked(crew, name, find(name).starter())
    assert not verdict.is_right
    assert all(fault.text and fault.case for fault in verdict.faults)


@pytest.mark.parametrize("name", SLOW)
def test_a_starter_that_is_right_fails_by_its_speed(crew: Crew, name: str) -> None:
    verdict = checked(crew, name, find(name).starter())
    assert [fault.kind for fault in verdict.faults] == ["goal", *("answer" for _ in find(name).answers)]
    goal, spills = find(name).goal, any(kernel.spill_bytes for kernel in verdict.kernels)
    assert goal and verdict.fraction is not None and (verdict.fraction < goal.fraction or spills)


@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES])
def test_every_solution_passes(crew: Crew, name: str) -> None:
    verdict = checked(crew, name, find(name).solution())
    assert verdict.has_passed, str(verdict)
    if goal := find(name).goal:
        assert verdict.fraction is not None and goal.fraction <= verdict.fraction <= ABOVE_LIMIT
    assert all(kernel.registers and not kernel.spill_bytes for kernel in verdict.kernels)


@pytest.mark.parametrize("style", [*HONEST, *disguised.HONEST, *OTHERS])
def test_honest_styles_pass(crew: Crew, style: str) -> None:
    verdict = checked(crew, *(OTHERS.get(style) or ("add", {**HONEST, **disguised.HONEST}[style])))
    assert verdict.has_passed, str(verdict)


def refused(crew: Crew, cheat: Cheat, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        if not cheat.is_scanned:
            patch.setattr(checking, "scan", lambda *args: [])
        verdict = checked(crew, cheat.exercise, cheat.source, None if cheat.exercise == "matmul" else SHORT)
    first = next(iter(verdict.faults), None)
    assert first is not None, f"{cheat.name} has passed"
    assert first.kind in cheat.kinds and cheat.word in first.text, f"{cheat.name}: {verdict}"


def test_cheats_are_refused_for_the_right_reason(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    for cheat in (*RUN, *disguised.RUN):  # one after another: what one does to its process does not reach the next
        refused(crew, cheat, monkeypatch)


@pytest.mark.parametrize("cheat", (*COMPILED, *disguised.COMPILED), ids=lambda cheat: cheat.name)
def test_cheats_at_the_goal_are_refused(crew: Crew, cheat: Cheat, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(crew, cheat, monkeypatch)


def test_there_are_enough_cheats_and_each_has_its_name() -> None:
    cheats = (*CHEATS, *disguised.CHEATS)
    assert len({cheat.name for cheat in cheats}) == len(cheats) >= 16
    assert len(SCANNED) + len(RUN) + len(COMPILED) == len(CHEATS)


def test_prints_come_back(crew: Crew) -> None:
    verdict = checked(crew, "add", f"{HEAD}def add(x, y, out):\n    print('n is', out.numel())\n")
    assert "n is 2500" in verdict.printed


def test_what_comes_back_moves_no_cursor(crew: Crew) -> None:
    """Else a submission could write its own verdict over the real one."""
    body = "    print('\\x1b[2Jadd: passed')\n    raise ValueError('\\x1b[2J passed \\ud800')\n"
    verdict = checked(crew, "add", f"def add(x, y, out):\n{body}")
    assert verdict.printed == "\\x1b[2Jadd: passed\n"
    assert verdict.faults[0].text == "ValueError: \\x1b[2J passed \\ud800"


def test_what_was_not_done_yet_is_said(crew: Crew) -> None:
    verdict = checked(crew, "copy", find("copy").starter())
    assert any("no kernel stores anything yet" in note for note in verdict.notes)


def test_too_few_programs_are_counted(crew: Crew) -> None:
    source = find("copy").solution().replace("triton.cdiv(n, BLOCK)", "n // BLOCK")
    verdict = checked(crew, "copy", source)
    assert verdict.faults[0].text.startswith("out[2048] was never written")
    assert verdict.notes == ("grid (2,): 2 programs of copy_kernel ran",)


def test_masks_joined_by_and_come_first(crew: Crew) -> None:
    source = find("add_2d").solution().replace(" & ", " and ")
    first, *others = checked(crew, "add_2d", source).faults
    assert "joined by & and |" in first.text and "mask = " in source.splitlines()[first.line - 1] and others


def test_numbers_joined_by_and_are_no_mistake(crew: Crew) -> None:
    wrong = find("softmax").solution().replace("x - tl.max(x, axis=0)", "x")
    source = wrong.replace("    mask = ", "    is_one = cols > 0 and BLOCK == 1\n    mask = ")
    assert [fault.kind for fault in checked(crew, "softmax", source).faults] == ["values"]


def test_an_address_that_is_not_used_is_named(crew: Crew) -> None:
    source = find("add").solution().replace("tl.load(y_ptr", "tl.load(x_ptr")
    assert any("add_kernel gets y_ptr and does not use it" in note for note in checked(crew, "add", source).notes)


def test_a_number_that_is_too_large_is_told_from_its_nan(crew: Crew) -> None:
    source = find("softmax").solution().replace("x - tl.max(x, axis=0)", "x")
    verdict = checked(crew, "softmax", source)
    assert "nan comes of" in verdict.faults[0].text and not verdict.printed


def test_a_step_on_paper_says_what_it_was_called_with(crew: Crew) -> None:
    """And of several draws it shows one that was wrong: by luck the first may be right."""
    source = "def strides(sizes, index):\n    a, b, c = sizes\n    return [b * c, c, 1], 0, [b * c, 1, c]\n"
    for _ in range(4):
        verdict = checked(crew, "strides", source)
        assert verdict.faults[0].text.startswith("place is 0, expected "), verdict
        [note] = verdict.notes
        place = int(verdict.faults[0].text.removeprefix("place is 0, expected ").partition(";")[0])
        plane, row, col = json.loads(note.partition("index = ")[2])
        assert note.startswith("it was called with sizes = [2, 3, 4], index = ")
        assert 12 * plane + 4 * row + col == place


def test_an_output_that_became_another_tensor_is_named(crew: Crew) -> None:
    source = f"{HEAD}def add(x, y, out):\n    out = torch.empty_like(x)\n    launch(x, y, out)\n"
    assert any("out is another tensor" in note for note in checked(crew, "add", source).notes)


def test_in_a_notebook(crew: Crew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same check of a function; its wrong kernel is found, shown and remembered."""
    monkeypatch.setattr("sublight.learn.grade.crew.Crew", lambda: contextlib.nullcontext(crew))
    monkeypatch.setenv("SUBLIGHT_LEARN", str(tmp_path / "learn.sqlite"))
    verdict = sublight.learn.check(wrong, exercise="copy", gpu="h200")
    assert [fault.kind for fault in verdict.faults] == ["kernel"]  # load and store share their line
    assert "tl.load" in (shown := verdict._repr_html_() or "") and "out-of-bounds" in shown
    assert "`tl.store(" in str(verdict) and "line " not in str(verdict)
    assert len(Progress().state("copy").attempts) == 1


def test_on_the_command_line(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sublight.learn.grade.crew.Crew", lambda: contextlib.nullcontext(crew))
    monkeypatch.setenv("SUBLIGHT_LEARN", str(tmp_path / "learn.sqlite"))
    monkeypatch.setenv("SUBLIGHT_LEARN_STAY", "0")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["learn", "start", "copy"]) == 0
    capsys.readouterr()
    assert cli.run(["learn", "check"]) == 1  # the one that was changed last
    assert "out[0] was never written" in capsys.readouterr().out
    assert cli.run(["learn", "check", "learn/copy.py", "--json", "-", "--gpu", "a100"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "a100" and not found["passed"] and found["faults"][0]["kind"] == "unwritten"
    assert cli.run(["learn", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["exercises"][0]["checks"] == 2 and result["next"] == "copy"
