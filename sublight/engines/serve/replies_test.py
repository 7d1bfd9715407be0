"""Log-probabilities of tokens that are halves of characters, and where in a text tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")
from sublight.engines.generate.sampling import Logprobs, Sampling
from sublight.engines.serve.fakes import Letters
from sublight.engines.serve.protocol import Ask, Kind
from sublight.engines.serve.replies import Reply
from sublight.engines.serve.worker import Event


class Halves(Letters):
    """Token 0 is a letter, all others are halves of characters."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("\ufffd" if token else "é" for token in ids)


def logprobs_of(kind: Kind) -> Any:
    ask = Ask(kind=kind, prompts=((1,),), most_new=1, samplings=(Sampling(logprobs=3),))
    reply = Reply(ask, "tiny", Halves())
    reply.add(0, Event(tokens=(2,), logprobs=(Logprobs(-0.5, ((2, -0.5), (3, -1.5), (0, -2.5))),), finish="length"))
    return reply.whole()["choices"][0]["logprobs"]


def test_half_a_character_has_no_bytes_of_another() -> None:
    row = logprobs_of("chat")["content"][0]
    assert (row["token"], row["bytes"]) == ("\ufffd", None)
    assert [each["bytes"] for each in row["top_logprobs"]] == [None, None, [0xC3, 0xA9]]


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    assert logprobs_of("completion")["top_logprobs"] == [{"\ufffd": -0.5, "é": -2.5}]


class Spaced(Letters):
    """Bytes, each behind a space where it begins with a capital, which a text's first word has not."""

    def decode(self, ids: Sequence[int]) -> str:
        text = bytes(byte for token in ids for byte in ((32, token) if 65 <= token < 91 else (token,)))
        return text.decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("is_stream", [False, True])
def test_offsets_are_places_in_the_text(is_stream: bool) -> None:
    """é is two tokens, and " Z" is "Z" by itself."""
    sampling = Sampling(logprobs=0)
    ask = Ask(kind="completion", prompts=(tuple(b"A"),), most_new=4, samplings=(sampling,), goes_on=True)
    reply = Reply(ask, "tiny", Spaced())
    pieces = [reply.add(0, Event(tokens=(token,), logprobs=(Logprobs(-1.0, ()),))) for token in "éZb".encode()]
    if is_stream:
        offsets = [each for piece in pieces if piece for each in piece["choices"][0]["logprobs"]["text_offset"]]
    else:
        offsets = reply.whole()["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 0, 1, 3]  # of "é Zb"


def test_offsets_of_a_prompt_that_is_repeated() -> None:
    sampling = Sampling(logprobs=0)
    prompt = tuple("aéZ".encode())
    ask = Ask(kind="completion", prompts=(prompt,), most_new=1, samplings=(sampling,), goes_on=True, echoes=("aé Z",))
    reply = Reply(ask, "tiny", Spaced())
    chances = (Logprobs(-1.0, ()),)
    reply.add(0, Event(text=" B", tokens=(66,), logprobs=chances, prompt_logprobs=chances * 3, finish="length"))
    choice = reply.whole()["choices"][0]
    assert choice["text"] == "aé Z B" and choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 4]
