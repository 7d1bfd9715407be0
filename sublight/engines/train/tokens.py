"""Text to numbers and back: characters, bytes, byte-level BPE. A tokenizer is plain data, so that a run can keep it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sublight.errors import BadInput

Ids = NDArray[np.uint32]
MOST_CHARACTERS = 256  # a text with more of them is read as bytes
BPE_VOCAB = 4096
MOST_VOCAB = 1 << 20
END = "<|endoftext|>"


class Tokenizer(Protocol):
    @property
    def vocab(self) -> int: ...
    @property
    def words(self) -> str:
        """What it is, for people."""

    def encode(self, text: str) -> Ids: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Characters:
    """The characters of the data, in the order of their numbers."""

    characters: str

    @property
    def vocab(self) -> int:
        return len(self.characters)

    @property
    def words(self) -> str:
        return f"{self.vocab} characters"

    def encode(self, text: str) -> Ids:
        known, points = _points(self.characters), _points(text)
        place = np.searchsorted(known, points).clip(max=len(known) - 1)
        if bad := points[known[place] != points].tolist():
            raise BadInput(f"the character {chr(bad[0])!r} is not in the data that this model learned: leave it out")
        return place.astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[number] if number < self.vocab else "" for number in ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}


@dataclass(frozen=True, slots=True)
class Bytes:
    """UTF-8 as it is: any text, 256 tokens."""

    @property
    def vocab(self) -> int:
        return 256

    @property
    def words(self) -> str:
        return "bytes"

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


@dataclass(frozen=True, slots=True)
class Bpe:
    """Byte-level BPE of the `tokenizers` library: trained on the data, or a tokenizer.json."""

    document: str  # as `tokenizers` writes it
    inner: Any

    @property
    def vocab(self) -> int:
        return int(self.inner.get_vocab_size())

    @property
    def words(self) -> str:
        return f"{self.vocab} BPE tokens"

    def encode(self, text: str) -> Ids:
        return np.array(self.inner.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode([number for number in ids if number < self.vocab], skip_special_tokens=False))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bpe", "document": self.document}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Tokens that came as numbers: there is no text to them."""

    vocab: int

    @property
    def words(self) -> str:
        return f"token numbers below {self.vocab}"

    def encode(self, text: str) -> Ids:
        if not re.fullmatch(r"(\d+\s*)*", text.strip()):
            raise BadInput(f"{text[:40]!r}: this model learned token numbers: write them, as in '464 3290'")
        ids = np.array([int(word) for word in text.split()], np.int64)
        if ids.size and ids.max() >= self.vocab:
            raise BadInput(f"token {ids.max()} is past the {self.vocab} that this model knows")
        return ids.astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "numbers", "vocab": self.vocab}


def from_json(data: Mapping[str, Any]) -> Tokenizer:
    if data["kind"] == "characters":
        return Characters(data["characters"])
    if data["kind"] == "bpe":
        return _read_bpe(data["document"])
    return Bytes() if data["kind"] == "bytes" else Numbers(data["vocab"])


def choose(words: str, texts: Sequence[str]) -> Tokenizer:
    """`char`, `bytes`, `bpe`, `bpe:8192` or a tokenizer.json; empty: characters where they are few, else bytes."""
    if words.endswith(".json"):
        try:
            return _read_bpe(Path(words).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"cannot read {words}: {error.strerror}; name a tokenizer.json") from None
    kind, _, size = words.partition(":")
    if kind not in ("", "char", "bytes", "bpe") or (size and kind != "bpe"):
        raise BadInput(f"--tokens {words}: use char, bytes, bpe, bpe:{BPE_VOCAB} or a tokenizer.json")
    if kind == "bpe":
        return train_bpe(texts, _vocab_of(size) if size else BPE_VOCAB)
    if kind == "bytes":
        return Bytes()
    found = "".join(sorted(set[str]().union(*map(set, texts))))
    if not kind and len(found) > MOST_CHARACTERS:
        return Bytes()
    return Characters(found)


def _vocab_of(words: str) -> int:
    if not words.isdecimal() or not 257 <= int(words) <= MOST_VOCAB:
        raise BadInput(f"--tokens bpe:{words}: give a number of tokens from 257 to {MOST_VOCAB}")
    return int(words)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise BadInput("BPE needs tokenizers: pip install 'sublight[engines]', or use --tokens bytes") from None
    return tokenizers


def _read_bpe(document: str) -> Bpe:
    try:
        return Bpe(document, _tokenizers().Tokenizer.from_str(document))
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"this is no tokenizer.json: {' '.join(str(error).split())[:120]}") from None


def train_bpe(texts: Iterable[str], vocab: int) -> Bpe:
    """GPT-2's kind: bytes first, then the pairs that are most frequent."""
    tokenizers = _tokenizers()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Bpe(inner.to_str(), inner)


def _points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
