"""`sublight train` as its user meets it: a run from text to sample, and bad input in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
from sublight.cli import main as cli
from sublight.engines.train.fakes import TEXT

Say = Callable[..., tuple[int, str, str]]
TINY = ("--depth", "1", "--context", "16", "--batch", "2", "--mode", "eager", "--attention", "naive", "--device", "cpu")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """Run the command in a folder with a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other crawl on a busy machine
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(["train", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def test_a_run_leaves_all_that_it_promises(say: Say, tmp_path: Path) -> None:
    status, out, err = say("text.txt", *TINY, "--steps", "3", "--json", "-", "--prompt", "the ")
    assert status == 0, err
    found = json.loads(out)
    assert found["step"] == 3 and found["settings"]["steps"] == 3 and found["folder"] == "runs/001"
    assert found["prompt"] == "the " and len(found["sample"]) == 160
    assert found["limit_tokens_per_s"] is None  # nobody has measured this machine in this cache
    page = (tmp_path / "runs/001/loss.html").read_text()
    assert "<polyline" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert (tmp_path / "runs/001/model/config.json").exists()
    assert len((tmp_path / "runs/001/log.jsonl").read_text().splitlines()) == 7  # 3 steps, 4 evaluations

    status, out, err = say("--resume")
    assert status == 0 and "Nothing was left to do" in out
    status, out, err = say("text.txt", *TINY, "--out", "runs/001")
    assert status == 2 and "holds a run" in err


def test_explain_ends_with_a_page(say: Say, tmp_path: Path) -> None:
    status, out, err = say("text.txt", *TINY, "--steps", "2", "--explain")
    assert status == 0, err
    assert "a step of" in out and "where its time goes: runs/001/explain.html" in out.replace("\n", " ")
    assert "matmul" in (tmp_path / "runs/001/explain.html").read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["missing.txt"], "there is no missing.txt"),
        (["text.txt", "--depth", "0"], "--depth 0: give layers from 1 to 96"),
        (["text.txt", "--size", "gpt3"], "unknown size 'gpt3': use gpt2"),
        (["text.txt", "--size", "gpt2", "--depth", "2"], "leave one out"),
        (["text.txt", "--attention", "cudnn", "--device", "cpu"], "needs an NVIDIA GPU"),
        (["text.txt", "--beta2", "1"], "--beta2 1.0: give a number from 0 to below 1"),
        (["text.txt", "--parallel", "ddp"], "torchrun --nproc-per-node 2 -m sublight train --parallel ddp"),
        (["text.txt", "--attention", "fast"], "unknown attention 'fast'"),
        (["text.txt", "--tokens", "words"], "use char, bytes, bpe"),
        (["text.txt", "--batch", "3", "--accumulate", "2"], "does not divide --batch 3"),
        (["text.txt", "--steps", "0"], "--steps 0: give 1 or more"),
        (["text.txt", "--batch", "0"], "--batch 0: give 1 or more"),
        (["text.txt", "--context", "100000"], "too few tokens"),
        (["text.txt", "--lr", "-1"], "--lr -1.0: give a number above 0"),
        (["text.txt", "--time-limit", "soon"], "as in --time-limit 10min"),
        (["text.txt", "--prompt", "ZÄ", "--depth", "1"], "'Z' is not in the data"),
        (["--from", "nowhere"], "cannot read nowhere/config.json"),
        (["--resume"], "there is no run in runs/"),
        (["--resume", "--out", "nowhere"], "nowhere holds no run"),
        (["--resume", "--steps", "9"], "leave --steps out"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_run(say: Say, tmp_path: Path, words: list[str], complaint: str) -> None:
    status, out, err = say(*words)
    assert (status, out) == (2, "") and complaint in err and err.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/run.json"))


def test_a_setting_that_cannot_be_is_refused_before_text_is_read(say: Say, tmp_path: Path) -> None:
    assert say("text.txt", "--lr", "-1")[0] == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(["text.txt"], "as in --parallel ddp"), (["text.txt", "--parallel", "dp"], "unknown parallel 'dp'")],
)
def test_torchrun_needs_to_know_how(
    say: Say, monkeypatch: pytest.MonkeyPatch, words: list[str], complaint: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = say(*words)
    assert status == 2 and complaint in err and len(err.splitlines()) == 1
