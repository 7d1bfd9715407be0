"""Text to numbers and back: characters, bytes, byte-level BPE, GPT-2's. A tokenizer is plain data, so that a run can
keep it."""

from __future__ import annotations

import base64
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
MOST_DIGITS = 20  # of a token's number
END = "<|endoftext|>"
GPT2 = ("gpt2", "r50k_base")  # tiktoken's two names for the same tokens, each with a file of its own


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
class Tiktoken:
    """GPT-2's own tokens, by the `tiktoken` library; a run keeps them, and needs its file no more."""

    inner: Any

    @property
    def vocab(self) -> int:
        return int(self.inner.n_vocab)

    @property
    def words(self) -> str:
        return f"{self.vocab} tokens of GPT-2"

    def encode(self, text: str) -> Ids:
        return np.array(self.inner.encode_ordinary(text), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode([number for number in ids if number < self.vocab]))

    def to_json(self) -> dict[str, Any]:
        inner = self.inner
        ranks = sorted(inner._mergeable_ranks, key=inner._mergeable_ranks.__getitem__)
        special = {name: inner.encode_single_token(name) for name in sorted(inner.special_tokens_set)}
        pieces = [base64.b64encode(piece).decode() for piece in ranks]
        return {"kind": "tiktoken", "pattern": inner._pat_str, "pieces": pieces, "special": special}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Tokens that came as numbers: there is no text to them."""

    vocab: int

    @property
    def words(self) -> str:
        return f"token numbers below {self.vocab}"

    def encode(self, text: str) -> Ids:
        words = text.split()
        if not all(word.isdecimal() for word in words):
            raise BadInput(f"{text[:40]!r}: this model learned token numbers: write them, as in '464 3290'")
        for word in words:
            if len(word) > MOST_DIGITS or int(word) >= self.vocab:
                raise BadInput(f"token {word[:MOST_DIGITS]} is past the {self.vocab} that this model knows")
        return np.array([int(word) for word in words], np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "numbers", "vocab": self.vocab}


def from_json(data: Mapping[str, Any]) -> Tokenizer:
    if data["kind"] == "characters":
        return Characters(data["characters"])
    if data["kind"] == "bpe":
        return _read_bpe(data["document"])
    if data["kind"] == "tiktoken":
        ranks = {base64.b64decode(piece): rank for rank, piece in enumerate(data["pieces"])}
        how = {"pat_str": data["pattern"], "mergeable_ranks": ranks, "special_tokens": data["special"]}
        return Tiktoken(_tiktoken().Encoding("gpt2", **how))
    return Bytes() if data["kind"] == "bytes" else Numbers(data["vocab"])


def choose(words: str, texts: Sequence[str]) -> Tokenizer:
    """`char`, `bytes`, `bpe`, `bpe:8192`, `gpt2` or a tokenizer.json; empty: characters where few are, else bytes."""
    if words.endswith(".json"):
        try:
            return _read_bpe(Path(words).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"cannot read {words}: {error.strerror}; name a tokenizer.json") from None
    kind, _, size = words.partition(":")
    if kind not in ("", "char", "bytes", "bpe", "gpt2") or (size and kind != "bpe"):
        raise BadInput(f"--tokens {words}: use char, bytes, bpe, bpe:{BPE_VOCAB}, gpt2 or a tokenizer.json")
    if kind == "gpt2":
        return gpt2_tokens()
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


def _tiktoken() -> Any:
    try:
        import tiktoken  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise BadInput("GPT-2's tokens need tiktoken: pip install 'sublight[gpt2]', or use --tokens bpe") from None
    return tiktoken


def gpt2_tokens() -> Tiktoken:
    """GPT-2's tokens from the file that tiktoken has cached, or fetches where there is a network."""
    tiktoken, reason = _tiktoken(), ""
    for name in GPT2:
        try:
            return Tiktoken(tiktoken.get_encoding(name))
        except Exception as error:  # a network's, a disk's, a checksum's
            reason = reason or type(error).__name__
    raise BadInput(
        f"tiktoken has no file of GPT-2's tokens here and cannot fetch one ({reason}): set TIKTOKEN_CACHE_DIR to a "
        "folder that has it, or use --tokens bpe"
    )


def whole(inner: Any) -> Any:
    """A tokenizer that cuts no text and pads none: a tokenizer.json may say that it should, as it was saved by somebody
    who trained on texts of one length."""
    inner.no_truncation()
    inner.no_padding()
    return inner


def _read_bpe(document: str) -> Bpe:
    try:
        return Bpe(document, whole(_tokenizers().Tokenizer.from_str(document)))
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
