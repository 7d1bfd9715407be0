"""A GPT-2's sizes, and what follows from them: parameters, FLOPs. One dial, the depth, gives a whole model."""

from __future__ import annotations

from dataclasses import dataclass

from sublight.errors import BadInput

HEAD_DIM = 64
MOST_DEPTH = 96
VOCAB_MULTIPLE = 64  # tables are padded to it: products of odd widths are slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one model."""

    layers: int
    dim: int
    heads: int
    context: int
    vocab: int

    def __post_init__(self) -> None:
        if min(self.layers, self.dim, self.heads, self.context, self.vocab) < 1 or self.dim % self.heads:
            raise BadInput(f"no model has {self}: every size must be 1 or more, and the heads must divide dim")

    @property
    def parameters(self) -> int:
        """The number of parameters, the tied output head counted once.

        >>> Shape(layers=12, dim=768, heads=12, context=1024, vocab=50257).parameters
        124439808
        """
        block = 12 * self.dim**2 + 13 * self.dim  # four products with their biases, two norms
        return self.layers * block + (self.vocab + self.context + 2) * self.dim

    @property
    def train_flops_per_token(self) -> int:
        """Forward and backward: six for every weight that is multiplied, and the causal half of attention."""
        products = self.layers * 12 * self.dim**2 + self.vocab * self.dim
        attention = self.layers * 2 * self.context * self.dim // 2  # q times k, weights times v, half of each
        return 6 * (products + attention)


_SIZES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
SIZES = tuple(_SIZES)


def by_size(name: str, *, context: int, vocab: int) -> Shape:
    layers, dim, heads = _SIZES[name]
    return Shape(layers=layers, dim=dim, heads=heads, context=context, vocab=vocab)


def by_depth(depth: int, *, context: int, vocab: int) -> Shape:
    """A model of this depth, 64 wide for each layer, with a head for each 64: depth 12 is GPT-2.

    >>> by_depth(12, context=1024, vocab=50257) == by_size("gpt2", context=1024, vocab=50257)
    True
    """
    if not 1 <= depth <= MOST_DEPTH:
        raise BadInput(f"--depth {depth}: give layers from 1 to {MOST_DEPTH}; 12 is GPT-2")
    return Shape(layers=depth, dim=HEAD_DIM * depth, heads=depth, context=context, vocab=vocab)


def padded_vocab(vocab: int) -> int:
    """
    >>> padded_vocab(50257), padded_vocab(256)
    (50304, 256)
    """
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
