"""`sublight generate` as its user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from sublight.cli import main as cli

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """Run the command beside a tiny model, whose tokens are numbers."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ids)).save_pretrained("tiny")
    capsys.readouterr()

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(["generate", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def test_prompts_of_a_file_and_of_the_command_are_answered(say: Say, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("4 5 6\n\n7\n")
    words = ("--prompts", "prompts.txt", "--prompt", "1 2", "--max-new", "4", "--mode", "eager", "--device", "cpu")
    status, out, err = say("tiny", *words, "--json", "-")
    assert status == 0, err
    found = json.loads(out)
    assert [row["prompt"] for row in found["texts"]] == ["1 2", "4 5 6", "7"] and found["new_tokens"] == 12
    assert all(row["text"] == " ".join(map(str, row["tokens"])) and len(row["tokens"]) == 4 for row in found["texts"])
    stop = f" {found['texts'][0]['tokens'][2]}"
    status, out, err = say("tiny", *words, "--stop", stop)
    assert status == 0 and "(stop)" in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere", "--prompt", "1"], "cannot read nowhere/config.json"),
        (["tiny"], "there is no prompt"),
        (["tiny", "--prompt", "hello"], "learned token numbers"),
        (["tiny", "--prompt", "99"], "token 99 is past the 50"),
        (["tiny", "--prompt", "1", "--max-new", "0"], "0 new tokens: give 1 or more"),
        (["tiny", "--prompt", "1", "--max-new", "900"], "more than the model's 64 positions"),
        (["tiny", "--prompt", "1", "--temperature", "-1"], "temperature -1.0"),
        (["tiny", "--prompt", "1", "--max-new", "30", "--cache", "16"], "do not fit into a cache of 16"),
        (["tiny", "--prompts", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_bad_input_is_one_line(say: Say, words: list[str], complaint: str) -> None:
    status, out, err = say(*words, "--device", "cpu")
    assert (status, out) == (2, "") and complaint in err and err.count("\n") == 1
