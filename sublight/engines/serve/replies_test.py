"""Log-probabilities of tokens that are halves of characters."""

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
