"""Pieces of text together are the whole, no stop word is shown in part, no character in half."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from sublight.engines.generate.writer import Writer


class Bytes:
    """A byte a token: characters come in parts."""

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def write(tokens: list[int], stops: list[str]) -> tuple[list[str], bool]:
    writer, pieces = Writer(Bytes(), stops), []
    for token in tokens:
        if writer.add(token):
            break
        pieces.append(writer.take())
    return [*pieces, writer.end()], writer.is_stopped


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abcé𝄞\n", max_size=20), stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=4)))
@example(text="aab", stops=["ab"])
@example(text="𝄞a", stops=["a", "𝄞a"])
def test_pieces_are_the_text_before_the_first_stop_word(text: str, stops: list[str]) -> None:
    pieces, is_stopped = write(list(text.encode()), stops)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert "".join(pieces) == text and not is_stopped
        return
    first = min(ends)  # the token that completes the first of them ends the text
    whole = min(text[:first].find(stop) for stop in stops if stop in text[:first])
    assert "".join(pieces) == text[:whole] and is_stopped


def test_what_can_be_shown_is_shown_at_once() -> None:
    writer = Writer(Bytes(), ["xyz"])
    assert [writer.add(token) or writer.take() for token in b"ax"] == ["a", ""]
    assert writer.add(ord("b")) is False and writer.take() == "xb"


def test_bytes_that_are_no_character_do_not_wait_forever() -> None:
    pieces, _ = write([0xF0] * 12 + list(b"ok"), [])
    assert "".join(pieces).endswith("ok") and any(pieces[:8])


def test_a_text_that_ends_in_half_a_character_ends_with_it() -> None:
    pieces, _ = write([*b"ok", *"é".encode()[:1]], [])
    assert "".join(pieces) == "ok\ufffd" and pieces[-1] == "\ufffd"


class Sentences:
    """As Llama 2's: words begin with their space, a text's first word loses it, special tokens are silent."""

    words = ("<s>", " The", " sky", " is", " blue", ".", " ", "!")

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[token] for token in ids if token).removeprefix(" ")


@pytest.mark.parametrize(
    ("before", "tokens", "text"),
    [
        ([], [1, 2], "The sky"),
        ([1, 2, 3], [4, 5], " blue."),  # a prompt's text goes on
        ([1, 2, 3], [5, 7], ".!"),
        ([], [1, 0, 2, 0, 0, 3], "The sky is"),  # a special token between two words
        ([0], [0, 4, 6, 6, 4], "blue   blue"),
        ([], [1, *[0] * 40, 2], "The sky"),
    ],
)
def test_words_keep_their_spaces(before: list[int], tokens: list[int], text: str) -> None:
    writer, pieces = Writer(Sentences(), (), before), []
    for token in tokens:
        writer.add(token)
        pieces.append(writer.take())
    assert "".join([*pieces, writer.end()]) == text
    assert text.startswith(pieces[0])


def test_a_prompt_that_ends_in_half_a_character_is_left_out() -> None:
    writer = Writer(Bytes(), (), [*b"ab", 0xC3])
    assert [writer.add(token) or writer.take() for token in b"cd"] == ["c", "d"]
