"""A model's own tokens: by its tokenizer.json; a folder without one takes and gives token numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sublight.engines.train.tokens import Numbers
from sublight.errors import BadInput


class Vocabulary(Protocol):
    def encode(self, text: str, *, is_whole: bool = False) -> Sequence[int]:
        """A text that is whole has the tokens that begin one, as a chat template writes them."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Own:
    """As the model was trained: with the tokens that begin a text."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=not is_whole).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))


class Plain:
    """Numbers, parted by spaces."""

    def __init__(self, vocab: int) -> None:
        self._numbers = Numbers(vocab)

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        return [int(number) for number in self._numbers.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._numbers.decode(ids)


def read(folder: Path, vocab: int) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.exists():
        return Plain(vocab)
    try:
        import tokenizers
    except ImportError:
        raise BadInput(f"{path} needs tokenizers: pip install 'sublight[engines]'") from None
    try:
        return Own(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:
        raise BadInput(f"cannot read {path}: {' '.join(str(error).split())[:120]}; fetch the model again") from None
