"""`sublight generate` as its user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from sublight.cli import main as cli

pytestmark = pytest.mark.usefixtures("one_thread")
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """Run the command beside a tiny model, whose tokens are numbers."""
    monkeypatch.chdir(tmp_path)
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
    for row in found["texts"]:
        assert row["prompt"] + row["text"] == " ".join([row["prompt"], *map(str, row["tokens"])])
        assert len(row["tokens"]) == 4
    stop = f" {found['texts'][0]['tokens'][2]}"
    status, out, err = say("tiny", *words, "--stop", stop)
    assert status == 0 and "(stop)" in out


def test_each_text_is_drawn_by_a_seed_of_its_own(say: Say) -> None:
    def drawn(*prompts: str, seed: str) -> list[Any]:
        words = [word for prompt in prompts for word in ("--prompt", prompt)]
        how = ("--temperature", "3", "--max-new", "12", "--mode", "eager", "--device", "cpu", "--json", "-")
        status, out, err = say("tiny", *words, "--seed", seed, *how)
        assert status == 0, err
        return [row["tokens"] for row in json.loads(out)["texts"]]

    first, second = drawn("1 2", "1 2", seed="5")
    assert first != second and [first, second] == drawn("1 2", "1 2", seed="5")
    assert drawn("1 2", seed="6") == [second]  # what `--seed` says of the others


def test_a_form_feed_ends_no_prompt(say: Say, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("4\f5\r\n6\u20287\n", newline="")
    words = ("--max-new", "1", "--mode", "eager", "--device", "cpu", "--json", "-")
    status, out, err = say("tiny", "--prompts", "prompts.txt", *words)
    assert status == 0, err
    assert [row["prompt"] for row in json.loads(out)["texts"]] == ["4\f5", "6\u20287"]


def test_a_prompt_that_is_no_unicode_is_one_line(say: Say, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    letters.save(str(tmp_path / "tiny" / "tokenizer.json"))
    status, out, err = say("tiny", "--prompt", "\udcff", "--device", "cpu")
    assert (status, out) == (2, "") and "no Unicode" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere", "--prompt", "1"], "cannot read nowhere/config.json"),
        (["tiny"], "there is no prompt"),
        (["tiny", "--prompt", "hello"], "learned token numbers"),
        (["tiny", "--prompt", "99"], "token 99 is past the 50"),
        (["tiny", "--prompt", "1", "--max-new", "0"], "--max-new 0: give 1 or more"),
        (["tiny", "--prompt", "1", "--max-new", "-5"], "--max-new -5: give 1 or more"),
        (["tiny", "--prompt", "1", "--stop", ""], "--stop '' would end every text at once"),
        (["tiny", "--prompt", "1", "--max-new", "900"], "more than the model's 64 positions"),
        (["tiny", "--prompt", "1", "--temperature", "-1"], "temperature -1.0"),
        (["tiny", "--prompt", "1", "--max-new", "30", "--cache", "16"], "do not fit into a cache of 16"),
        (["tiny", "--prompts", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_bad_input_is_one_line(say: Say, words: list[str], complaint: str) -> None:
    status, out, err = say(*words, "--device", "cpu")
    assert (status, out) == (2, "") and complaint in err and err.count("\n") == 1


def test_progress_is_drawn_now_and_then_and_ends_full() -> None:
    """Once at each token it took longer than the tokens."""
    from types import SimpleNamespace

    from sublight.cli import generate

    requests: list[Any] = [SimpleNamespace(most_new=500, new=[], finish="") for _ in range(4)]

    def tokens(_: object) -> Any:
        for place, request in enumerate(requests):
            while not request.finish:
                request.new.append(7)
                request.finish = "stop" * (len(request.new) == 100 * (place + 2))
                yield request, 7

    shown: list[tuple[str, int, int]] = []
    engine: Any = SimpleNamespace(run=tokens)
    count = generate.run(engine, requests, lambda *state: shown.append(state))
    assert count == 1400 and len(shown) < 50 and shown[0] == ("0 of 4 texts, tokens", 1, 2000)
    requests = requests[:0]
    assert generate.run(engine, requests, None) == 0
