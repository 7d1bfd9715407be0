"""The next token of each text: the most likely, or drawn; all on the logits' device, without waiting for it.

A drawn token is one number from 0 to 1 looked up in the sums of what is kept, the likeliest first. The number comes
from a generator of the request's own, once a token, so what else is in the batch changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sublight.errors import BadInput

MOST_LOGPROBS = 20  # of other tokens, beside the chosen one's
PART = 256  # logits that `largest` looks at together
NONE = -1  # in place of a token where a row's logits are no numbers
COLDEST = 1e-5  # a temperature below takes the most likely token: logits divided by it would pass what fp32 holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen; temperature 0 takes the most likely."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # of the most likely token's probability
    seed: int = 0
    repetition: float = (
        1.0  # tokens of the prompt and of the text: a positive logit is divided by it, another multiplied
    )
    presence: float = 0.0  # taken from the logit of a token that the text has
    frequency: float = 0.0  # the same, as often as the text has it
    bias: Mapping[int, float] = field(default_factory=dict)  # added to these tokens' logits
    logprobs: int | None = None  # of the chosen token, and of so many of the likeliest

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise BadInput(f"temperature {self.temperature}: give a number from 0 to 100; 0 takes the likeliest")
        if self.top_k < 0:
            raise BadInput(f"top_k {self.top_k}: give 0, which keeps all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p}: give a number above 0, up to 1")
        if not 0 <= self.min_p <= 1:
            raise BadInput(f"min_p {self.min_p}: give a number from 0 to 1")
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"seed {self.seed}: give a whole number, 0 or more")
        if not 0.01 <= self.repetition <= 100:
            raise BadInput(f"repetition_penalty {self.repetition}: give a number from 0.01 to 100; 1 changes nothing")
        for name, value in (("presence", self.presence), ("frequency", self.frequency)):
            if not -2 <= value <= 2:
                raise BadInput(f"{name}_penalty {value}: give a number from -2 to 2")
        if not all(-100 <= value <= 100 for value in self.bias.values()):
            raise BadInput("logit_bias: give numbers from -100 to 100")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise BadInput(f"logprobs {self.logprobs}: give a number from 0 to {MOST_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit says it all."""
        return not self.is_drawn and not self.is_adjusted and self.logprobs is None

    @property
    def is_drawn(self) -> bool:
        return self.temperature >= COLDEST

    @property
    def is_adjusted(self) -> bool:
        """Whether logits are changed by the tokens so far, or by a bias."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0 or bool(self.bias)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The chosen token's, and those of the likeliest, the best first."""

    chosen: float
    best: tuple[tuple[int, float], ...]


class Draw:
    """What one request needs to choose: its random numbers, and how often it has which token."""

    __slots__ = ("counts", "how", "is_greedy", "random", "shift")

    def __init__(self, how: Sampling, prompt: Sequence[int], vocab: int, device: torch.device) -> None:
        self.how, self.is_greedy = how, how.is_greedy
        self.random = random.Random(how.seed)
        self.counts: torch.Tensor | None = None  # (2, vocab): in the text so far, in the prompt
        self.shift: torch.Tensor | None = None  # (vocab,): the bias
        if how.is_adjusted:
            counts = torch.zeros(2, vocab, dtype=torch.int32)
            counts[1, torch.tensor(prompt, dtype=torch.int64)] = 1
            self.counts = counts.to(device)
            shift = torch.zeros(vocab)
            for token, value in how.bias.items():
                if not 0 <= token < vocab:
                    raise BadInput(f"logit_bias has token {token}: the model has 0 to {vocab - 1}")
                shift[token] = value
            self.shift = shift.to(device)


def largest(logits: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest, the first of equals. In two steps: PyTorch gives a row to one multiprocessor,
    which takes 30 µs for 128,256 logits."""
    rows, vocab = logits.shape
    if vocab % PART:
        return logits.argmax(-1)
    values, places = logits.view(rows, -1, PART).max(-1)
    part = values.argmax(-1, keepdim=True)
    return (part * PART + places.gather(-1, part))[:, 0]


def marked(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """`best`, or NONE in rows whose logits are no numbers: the largest of them is NaN wherever one is.

    >>> marked(torch.tensor([[1.0, 2.0], [3.0, torch.nan]]), torch.tensor([1, 1])).tolist()
    [1, -1]
    """
    largest_of_row = logits.gather(-1, best.clamp_min(0)[:, None])[:, 0]
    return best.masked_fill(~largest_of_row.isfinite(), NONE)


def choose(logits: torch.Tensor, best: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[Logprobs | None]]:
    """One token a row, (rows, vocab) in, or NONE; `best` are the rows' largest. The device is waited for once, at the
    end."""
    logprobs: list[Logprobs | None] = [None] * len(draws)
    if all(draw.is_greedy for draw in draws):
        return best.tolist(), logprobs
    best = marked(logits, best)
    tokens, scores = best.clamp_min(0), logits
    adjusted = [row for row, draw in enumerate(draws) if draw.counts is not None]
    if adjusted:
        rows = _rows(adjusted, logits)
        counts = torch.stack([x for draw in draws if (x := draw.counts) is not None])
        changed = _adjust(logits[rows].float(), counts, [draws[row] for row in adjusted])
        scores = logits.float().index_copy(0, rows, changed)
        tokens[rows] = changed.argmax(-1)
    drawn = [row for row, draw in enumerate(draws) if draw.how.is_drawn]
    if drawn:
        rows = _rows(drawn, logits)
        tokens[rows] = draw_tokens(
            scores[rows], [draws[row].how for row in drawn], [draws[row].random.random() for row in drawn]
        )
    if adjusted:
        rows = _rows(adjusted, logits)
        counts[:, 0].scatter_add_(1, tokens[rows][:, None], torch.ones_like(rows, dtype=counts.dtype)[:, None])
        for row, each in zip(adjusted, counts, strict=True):
            draws[row].counts = each
    wanted = [row for row, draw in enumerate(draws) if draw.how.logprobs is not None]
    if wanted:
        rows = _rows(wanted, logits)
        logprobs = _logprobs(logits[rows], tokens[rows], wanted, draws)
    return tokens.masked_fill(best == NONE, NONE).tolist(), logprobs


def draw_tokens(scores: torch.Tensor, how: Sequence[Sampling], uniforms: Sequence[float]) -> torch.Tensor:
    """A token a row, by a number from 0 to 1 each. The k likeliest are cut off first; top_p is of what they leave."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None].to(scores.device, non_blocking=True)

    limits = (
        column([each.top_k or scores.shape[-1] for each in how]),
        column([each.top_p for each in how]),
        column([each.min_p for each in how]),
    )
    warm = scores.float() / column([each.temperature for each in how]).float()
    ordered, places = warm.sort(dim=-1, descending=True, stable=True)
    kept = kept_of(torch.softmax(ordered, -1).double(), *limits)  # sums of 100,000 small numbers
    sums = kept.cumsum(-1)
    whole = sums[:, -1:]
    place = torch.minimum(
        (sums <= column(uniforms) * whole).sum(-1), (sums < whole).sum(-1)
    )  # never one that is cut off
    return places.gather(-1, place[:, None])[:, 0]


def kept_of(chances: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Probabilities in falling order with those that are cut off set to zero.

    >>> kept_of(torch.tensor([[0.6, 0.3, 0.1]]), *(torch.tensor([[x]]) for x in (3, 0.7, 0.0))).tolist()[0][2]
    0.0
    """
    few = chances.masked_fill(torch.arange(chances.shape[-1], device=chances.device) >= top_k, 0.0)
    sums = few.cumsum(-1)
    is_past = (sums - few >= top_p * sums[:, -1:]) | (
        few < min_p * few[:, :1]
    )  # what lies before it is enough by itself
    return few.masked_fill(is_past, 0.0)


def _rows(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(like.device, non_blocking=True)


def _adjust(scores: torch.Tensor, counts: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Penalties and bias, as OpenAI and (repetition) Hugging Face define them."""

    def column(name: str) -> torch.Tensor:
        values = [getattr(draw.how, name) for draw in draws]
        return torch.tensor(values, dtype=scores.dtype)[:, None].to(scores.device, non_blocking=True)

    repetition = column("repetition")
    again = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(counts.sum(1) > 0, again, scores)
    new = counts[:, 0]
    scores = scores - column("presence") * (new > 0) - column("frequency") * new
    return scores + torch.stack([x for draw in draws if (x := draw.shift) is not None])


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int], draws: Sequence[Draw]
) -> list[Logprobs | None]:
    rows: list[Logprobs | None] = [None] * len(draws)
    found = logprobs_of(logits, tokens, [draws[row].how.logprobs or 0 for row in wanted])
    for row, each in zip(wanted, found, strict=True):
        rows[row] = each
    return rows


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[Logprobs]:
    """Of a token a row, and of so many of the likeliest; by the model alone: before temperature, penalties and what is
    cut off."""
    most = max(counts)
    every = torch.log_softmax(logits.float(), -1)
    values, places = every.topk(min(most, every.shape[-1]), -1)
    chosen = every.gather(-1, tokens[:, None])[:, 0]
    return [
        Logprobs(each, tuple(zip(at[:count], best[:count], strict=True)))
        for count, each, best, at in zip(counts, chosen.tolist(), values.tolist(), places.tolist(), strict=True)
    ]
