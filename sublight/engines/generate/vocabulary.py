"""A model's own tokens: by its tokenizer.json; a folder without one takes and gives token numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sublight.engines.train.tokens import Numbers, whole
from sublight.errors import BadInput


class Vocabulary(Protocol):
    def encode(self, text: str, *, is_whole: bool = False) -> Sequence[int]:
        """A text that is whole has the tokens that begin one, as a chat template writes them."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Own:
    """A model's own tokenizer, with the tokens that begin a text as in its training."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        try:
            return list(self.inner.encode(text, add_special_tokens=not is_whole).ids)
        except Exception:  # half of a surrogate pair, as a terminal's odd bytes become one
            raise BadInput("the text is no Unicode that the tokenizer takes: write it in UTF-8") from None

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
        return Own(whole(tokenizers.Tokenizer.from_file(str(path))))
    except Exception as error:
        raise BadInput(f"cannot read {path}: {' '.join(str(error).split())[:120]}; fetch the model again") from None
