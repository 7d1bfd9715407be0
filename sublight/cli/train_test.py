"""`sublight train` as its user meets it: a run from text to sample, and bad input in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
from sublight.cli import main as cli
from sublight.cli import train_progress
from sublight.engines.train.fakes import TEXT
from sublight.engines.train.limit import ProductLimit
from sublight.errors import BadInput

pytestmark = pytest.mark.usefixtures("one_thread")  # a run sets its number of threads for its process

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


def test_two_do_not_train_in_one_folder(say: Say, tmp_path: Path) -> None:
    """As when torchrun is killed and its processes are not: a log of both would be nobody's."""
    from sublight.engines.train import run as runs

    assert say("text.txt", *TINY, "--steps", "1", "--out", "here")[0] == 0
    before = (tmp_path / "here/log.jsonl").read_bytes()
    with runs.alone(tmp_path / "here"):
        status, out, err = say("--resume", "--out", "here")
    assert (status, out) == (2, "") and "another process trains in here" in err and err.count("\n") == 1
    assert (tmp_path / "here/log.jsonl").read_bytes() == before
    assert say("--resume", "--out", "here")[0] == 0


def test_weights_that_could_not_be_written_are_said(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise BadInput("cannot write model.safetensors: No space left on device")

    monkeypatch.setattr("sublight.engines.train.huggingface.save", full)
    status, out, err = say("text.txt", *TINY, "--steps", "1")
    assert status == 0 and "no weights for Hugging Face: cannot write model.safetensors" in " ".join(out.split()), err


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
        (["text.txt", "--lr", "1e38"], "--lr 1e+38: give a number above 0"),
        (["text.txt", "--lr", "-1"], "--lr -1.0: give a number above 0"),
        (["text.txt", "--time-limit", "soon"], "as in --time-limit 10min"),
        (["text.txt", "--prompt", "ZÄ", "--depth", "1"], "'Z' is not in the data"),
        (["text.txt", "--prompt", "\udcff", "--tokens", "bytes"], "--prompt is no Unicode text"),
        (["text.txt", "--out", "text.txt"], "text.txt is a file"),
        (["text.txt", "--out", "text.txt/in"], "cannot make text.txt/in: Not a directory"),
        (["--from", "nowhere"], "cannot read nowhere/config.json"),
        (["--resume"], "there is no run in runs/"),
        (["--resume", "--out", "nowhere"], "nowhere holds no run"),
        (["--resume", "--steps", "9"], "leave --steps out"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_run(say: Say, tmp_path: Path, words: list[str], complaint: str) -> None:
    status, out, err = say(*words)
    assert (status, out) == (2, "") and complaint in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists() and not (tmp_path / "nowhere").exists()


def test_two_do_not_begin_in_one_folder(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second would write its settings over those of the first, which goes on; without --out each has its own."""
    from sublight.engines.train import data

    prepare, seen = data.prepare, []

    def slow(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(data, "prepare", prepare)
        for words in (("--out", "runs/001", "--seed", "2"), ("--seed", "3")):
            seen.append((cli.run(["train", "text.txt", *TINY, "--steps", "1", *words]), capsys.readouterr().err))
        return prepare(*args, **options)

    monkeypatch.setattr(data, "prepare", slow)
    assert say("text.txt", *TINY, "--steps", "1", "--seed", "1")[0] == 0
    assert seen[0][0] == 2 and "another process trains in runs/001" in seen[0][1] and seen[1][0] == 0
    seeds = {each.parent.name: json.loads(each.read_text())["settings"]["seed"] for each in tmp_path.rglob("run.json")}
    assert seeds == {"001": 1, "002": 3}


def test_a_refused_run_leaves_a_folder_as_it_was(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    status, _, err = say("text.txt", "--context", "100000", "--out", "mine")
    assert status == 2 and "too few tokens" in err
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["notes"]


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


@pytest.mark.parametrize(("rate", "words"), [(50.0, "MFU 50 %"), (103.0, "MFU –, the limit is too low")])
def test_more_than_the_limit_is_no_share(rate: float, words: str) -> None:
    """A limit that was measured on a busy machine is lower than what a quiet one then does."""
    now: Any = SimpleNamespace(
        step=1, steps=2, loss=1.0, held_out_loss=None, left_s=3.0, tokens_per_s=rate, memory_bytes=1
    )
    run: Any = SimpleNamespace(shape=SimpleNamespace(train_flops_per_token=1.0))
    line = train_progress.words_of(now, run, ProductLimit(flops_per_s=100.0, source="measured"))
    assert words in line and "103 %" not in line
