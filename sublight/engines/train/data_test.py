"""Tokens and back, the order of sequences, and data that will not do."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from sublight.engines.train import data, source, tokens
from sublight.engines.train.data import Order
from sublight.errors import BadInput

TEXT = "naïve — «quotes»\n\tand 日本語 🙂"


@pytest.mark.parametrize("kind", ["char", "bytes", "bpe:300"])
def test_text_comes_back(kind: str) -> None:
    if kind.startswith("bpe"):
        pytest.importorskip("tokenizers")
    tokenizer = tokens.choose(kind, [TEXT, "more"])
    again = tokens.from_json(tokenizer.to_json())
    assert again.decode(tokenizer.encode(TEXT).tolist()) == TEXT
    assert tokenizer.encode(TEXT).max() < tokenizer.vocab == again.vocab


class Encoding:
    """As tiktoken's, of pieces of one byte and of `th`."""

    def __init__(self, name: str, *, pat_str: str, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int]):
        self._pat_str, self._mergeable_ranks, self.special_tokens_set = pat_str, mergeable_ranks, set(special_tokens)
        self.n_vocab, self.encode_single_token = len(mergeable_ranks) + 1, special_tokens.__getitem__

    def encode_ordinary(self, text: str) -> list[int]:
        return [self._mergeable_ranks[piece] for piece in re.findall(b"th|.", text.encode(), re.DOTALL)]

    def decode(self, ids: list[int]) -> str:
        pieces = {rank: piece for piece, rank in self._mergeable_ranks.items()}
        return b"".join(pieces.get(number, b"<end>") for number in ids).decode(errors="replace")


@pytest.mark.parametrize("is_real", [False, True])
@pytest.mark.parametrize("name", tokens.GPT2)
def test_gpt2s_tokens_are_tiktokens_and_a_run_keeps_them(
    is_real: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library of pieces that stands for GPT-2's file, under either of its names."""
    library = pytest.importorskip("tiktoken") if is_real else SimpleNamespace(Encoding=Encoding)
    ranks = {bytes([number]): number for number in range(256)} | {b"th": 256}
    how = {"pat_str": r"\S+|\s+", "mergeable_ranks": ranks, "special_tokens": {tokens.END: 257}}

    def get_encoding(wanted: str) -> Any:
        if wanted != name:
            raise OSError("no such file")
        return library.Encoding(wanted, **how)

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(Encoding=library.Encoding, get_encoding=get_encoding))
    tokenizer = tokens.choose("gpt2", [])
    ids = tokenizer.encode(f"the {TEXT}{tokens.END}")
    assert ids[:3].tolist() == [256, ord("e"), ord(" ")] and 257 not in ids, "an end that is written is text"
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(Encoding=library.Encoding))  # its file is gone
    again = tokens.from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert again.vocab == tokenizer.vocab == 258 and "258 tokens of GPT-2" in again.words
    assert (again.encode(TEXT) == tokenizer.encode(TEXT)).all()
    assert again.decode([*again.encode(TEXT).tolist(), 300]) == TEXT


def test_gpt2s_tokens_without_tiktoken_or_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_encoding(name: str) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding))
    with pytest.raises(BadInput, match=r"cannot fetch one \(ConnectionError\): set TIKTOKEN_CACHE_DIR"):
        tokens.choose("gpt2", [])
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(BadInput, match=r"pip install 'sublight\[gpt2\]'"):
        tokens.choose("gpt2", [])


def test_few_characters_are_characters_and_many_are_bytes() -> None:
    assert tokens.choose("", ["abc"]).to_json()["kind"] == "characters"
    many = "".join(map(chr, range(200, 500)))
    assert tokens.choose("", [many]).to_json()["kind"] == "bytes"


@pytest.mark.parametrize("words", ["words", "bytes:3", "bpe:12", "bpe:x", "gpt2:5", "nothing.json"])
def test_unknown_tokens_are_refused(words: str) -> None:
    with pytest.raises(BadInput):
        tokens.choose(words, ["abc"])


def test_a_character_that_was_never_seen_is_refused() -> None:
    with pytest.raises(BadInput, match="'z'"):
        tokens.choose("char", ["abc"]).encode("az")


@pytest.mark.parametrize(("size", "context"), [(17, 16), (31, 16), (32, 16), (100, 7), (1000, 16)])
def test_an_epoch_takes_every_piece_once_and_another_takes_another_order(size: int, context: int) -> None:
    order = Order(np.arange(size), context, seed=1)
    epochs = [[order.sequence(p) for p in range(e * order.per_epoch, (e + 1) * order.per_epoch)] for e in range(3)]
    for epoch in epochs:
        assert all(len(each) == context + 1 and (np.diff(each) == 1).all() for each in epoch)
        assert max(Counter(int(x) for each in epoch for x in each[:-1]).values()) == 1  # no token is learned twice
    firsts = [tuple(int(each[0]) for each in epoch) for epoch in epochs]
    assert size < 1000 or len(set(firsts)) == 3
    again = Order(np.arange(size), context, seed=1)
    assert all((again.sequence(p) == order.sequence(p)).all() for p in (0, 2 * order.per_epoch, 5))


def test_evaluation_stays_inside_and_is_the_same_every_time() -> None:
    for size in (17, 18, 100, 5000):
        batches = [list(data.evaluation_batches(np.arange(size), 16, 4, 3)) for _ in range(2)]
        assert all((a == b).all() for a, b in zip(*batches, strict=True))
        assert 1 <= sum(len(batch) for batch in batches[0]) <= 12
        assert max(int(batch.max()) for batch in batches[0]) == size - 1 or size < 33


def test_what_is_prepared_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 100)
    found = data.prepare(tmp_path / "a.txt", "", tmp_path / "run")
    again = data.opened(tmp_path / "run")
    assert found.tokenizer.decode(again.train[:6].tolist()) == "abcabc"
    assert again.train.size == 270 and again.held_out.size == 30


def test_a_bin_is_mapped_with_its_neighbour(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    alone = data.prepare(tmp_path / "train.bin", "", tmp_path / "one")
    assert (alone.train.size, alone.held_out.size, alone.tokenizer.vocab) == (90, 10, 100)
    np.arange(50, 150, dtype=np.uint16).tofile(tmp_path / "val.bin")
    both = data.prepare(tmp_path / "train.bin", "", tmp_path / "two")
    assert (both.train.size, both.held_out.size, both.tokenizer.vocab) == (100, 100, 150)


def test_a_bin_that_has_changed_is_no_longer_the_runs(tmp_path: Path) -> None:
    path, other = tmp_path / "train.bin", np.arange(100, dtype=np.uint16)
    other.tofile(path)
    data.prepare(path, "", tmp_path / "run")
    os.utime(path, ns=(1, 1))  # as a copy has another time
    assert data.opened(tmp_path / "run").train.size == 90
    other[::-1].tofile(path)
    with pytest.raises(BadInput, match=r"train.bin has changed since this run began"):
        data.opened(tmp_path / "run")
    path.unlink()
    with pytest.raises(BadInput, match="cannot read"):
        data.opened(tmp_path / "run")


def test_a_folder_is_read_in_order_and_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    for name, content in (
        ("b.txt", b"two"),
        ("a.md", b"one"),
        ("c.txt", b"\xff\xfe"),
        (".d.txt", b"x"),
        ("e.png", b""),
    ):
        (tmp_path / name).write_bytes(content)
    assert source.read_texts(tmp_path) == ["one", "two"]


def test_without_data_pythons_library_is_read() -> None:
    found = list(source.files(None))
    assert any(file.name == "argparse.py" for file in found)
    assert not [file for file in found if "site-packages" in file.parts or "test" in file.parts]


@pytest.mark.parametrize(
    ("name", "content", "tokens_kind", "words"),
    [
        ("missing.txt", None, "", "there is no"),
        ("empty.txt", b"", "", "holds no text"),
        ("binary.txt", b"\xff\x00\xfe", "", "no UTF-8"),
        ("odd.bin", b"abc", "", "3 bytes"),
        ("some.bin", b"abcd", "bpe", "holds tokens already"),
    ],
)
def test_data_that_will_not_do(tmp_path: Path, name: str, content: bytes | None, tokens_kind: str, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=words):
        data.prepare(tmp_path / name, tokens_kind, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_little_text_says_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 10)
    with pytest.raises(BadInput, match="--context 2"):
        data.prepare(tmp_path / "a.txt", "", tmp_path / "run").check(16)


@pytest.mark.parametrize("words", ["1" * 60 + "x", "9" * 5000, "9" * 25, "50", "-1", "1.5"])
def test_numbers_that_are_no_tokens_are_refused_at_once(words: str) -> None:
    with pytest.raises(BadInput, match="token"):
        tokens.Numbers(50).encode(words)
