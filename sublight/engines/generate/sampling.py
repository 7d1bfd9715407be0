"""The next token of each text: the most likely, or drawn. A request draws from a generator of its own, once a token, so
what else is in the batch changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sublight.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen; temperature 0 takes the most likely."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # of the most likely token's probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise BadInput(f"--temperature {self.temperature}: give a number from 0 to 100; 0 takes the likeliest")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise BadInput(
                f"--top-k {self.top_k}, --top-p {self.top_p}, --min-p {self.min_p}: give 0 or more, 0 to 1, 0 to 1"
            )
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"--seed {self.seed}: give a whole number, 0 or more")


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Of every token of one row, those that are cut off zero; in fp32.

    >>> probabilities(torch.tensor([0.6, 0.3, 0.1]).log(), Sampling(temperature=1, top_p=0.7)).tolist()[2]
    0.0
    """
    scores = logits.float() / how.temperature
    if how.top_k and how.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(how.top_k).values[-1], -torch.inf)
    chances = torch.softmax(scores, -1)
    if how.top_p < 1:
        ordered, places = chances.sort(descending=True, stable=True)
        is_past = ordered.cumsum(-1) - ordered >= how.top_p  # what lies before it is enough by itself
        chances = chances.masked_fill(torch.zeros_like(is_past).scatter(0, places, is_past), 0.0)
    if how.min_p:
        chances = chances.masked_fill(chances < how.min_p * chances.max(), 0.0)
    return chances / chances.sum()


def choose(logits: torch.Tensor, how: Sequence[Sampling], generators: Sequence[torch.Generator]) -> list[int]:
    """One token a row. Rows that are drawn come to the host: a request's generator is there, whatever the device."""
    best: list[int] = logits.argmax(-1).tolist()
    for row, (each, generator) in enumerate(zip(how, generators, strict=True)):
        if each.temperature:
            chances = probabilities(logits[row].cpu(), each)
            best[row] = int(torch.multinomial(chances, 1, generator=generator))
    return best
