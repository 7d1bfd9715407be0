"""What is asked of a model: which step, how many sequences of which length, which data types, how many GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sublight.cost.dtypes import find_dtype

Mode = Literal["prefill", "decode", "forward", "train"]
MODES: tuple[Mode, ...] = ("prefill", "decode", "forward", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A data type for each kind of tensor."""

    products: str = "bfloat16"  # that matrix products run in, and what goes into them
    activations: str = "bfloat16"
    weights: str = "bfloat16"
    cache: str = "bfloat16"
    gradients: str = "bfloat16"
    optimizer: str = "float32"  # each of Adam's two averages
    master: str | None = None  # a second copy of the weights that the optimizer updates


def adapter_precision(precision: Precision) -> Precision:
    """Adapters are trained, whatever the weights beside them are stored in."""
    return replace(precision, products=precision.activations, weights=precision.gradients)


def outer_precision(precision: Precision) -> Precision:
    """Of tables and heads: 16 bits where the layers' weights have fewer, as checkpoints are published."""
    if find_dtype(precision.weights).bits >= 16:
        return precision
    return replace(precision, products=precision.activations, weights=precision.activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How many GPUs share the work, and in which way."""

    tensor: int = 1  # each product is cut; two all-reduces a layer
    pipeline: int = 1  # each GPU has some of the layers
    data: int = 1  # each GPU has a part of the batch
    expert: int = 1  # each GPU has some of the experts; tokens go to them and back

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data  # experts are spread over the GPUs that are there anyway

    @property
    def text(self) -> str:
        """
        >>> Parallel(tensor=8).text, Parallel(tensor=2, data=4, expert=8).text, Parallel().text
        ('TP 8', 'TP 2 · DP 4 · EP 8', 'one GPU')
        """
        parts = {"TP": self.tensor, "PP": self.pipeline, "DP": self.data, "EP": self.expert}
        return " · ".join(f"{name} {count}" for name, count in parts.items() if count > 1) or "one GPU"


ONE_GPU = Parallel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass: a prefill of prompts, one new token for each sequence, a pass without a cache, or a training step."""

    mode: Mode
    batch: int
    context: int  # tokens of a sequence; when decoding, those in the cache and the new one
    precision: Precision = Precision()
    checkpointing: bool = False  # a layer's activations are made again in the backward pass
    lora: int | None = None  # rank of adapters; the model itself is then not trained
    eager: bool = False  # activations are kept as PyTorch's own ops keep them, not as fused kernels do
    parallel: Parallel = ONE_GPU
    overlap: bool = True  # gradients travel while the backward pass runs

    @property
    def queries(self) -> int:
        """New tokens of a sequence."""
        return 1 if self.mode == "decode" else self.context

    @property
    def tokens(self) -> int:
        """New tokens of the whole batch."""
        return self.batch * self.queries

    @property
    def trains(self) -> bool:
        return self.mode == "train"
