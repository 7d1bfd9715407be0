"""A folder's tokenizer gives all tokens of a text, whatever else its tokenizer.json says to do with texts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
from sublight.engines.generate import vocabulary
from sublight.engines.train import tokens


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """As somebody saved it who trained on texts of three tokens: longer ones are cut, shorter ones padded."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.enable_truncation(3)
    inner.enable_padding(length=3, pad_id=2)
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_prompt_is_neither_cut_nor_padded(saved: Path) -> None:
    words = vocabulary.read(saved, 3)
    assert words.encode("a b a b a") == [0, 1, 0, 1, 0] and words.encode("a") == [0]


def test_nor_is_a_text_to_learn_from(saved: Path) -> None:
    found = tokens.choose(str(saved / "tokenizer.json"), [])
    assert found.encode("a b a b a").tolist() == [0, 1, 0, 1, 0] and found.encode("a").tolist() == [0]
    again = tokens.from_json(found.to_json())  # as a run that resumes reads it
    assert again.encode("a b a b a").tolist() == [0, 1, 0, 1, 0]
