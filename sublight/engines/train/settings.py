"""How a run trains: what was told, and what follows from the model and the machine where nothing was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sublight.engines.train.layers import ATTENTIONS, MODES, Attention, Mode
from sublight.engines.train.shape import Shape
from sublight.errors import BadInput, one_of

MOST_LR = 1e6  # what is far beyond any that trains; AdamW multiplies by it in fp32
LEAST_LR = 0.1  # of the highest: where the cosine ends
WARMUP = 0.05  # of all steps
GPT2_LR, GPT2_DIM = 6e-4, 768
DTYPES = ("float32", "bfloat16")
PARALLEL = ("ddp", "fsdp", "tp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that the numbers of a run depend on, beside its data and its model's sizes."""

    steps: int
    batch: int  # sequences of one step, on all devices
    accumulate: int = 1  # parts that a step's batch is computed in
    context: int
    lr: float
    warmup: int
    weight_decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.0
    seed: int = 1337
    mode: Mode = "ours"
    attention: Attention = "ours"
    dtype: str = "float32"
    beta2: float = 0.95  # of AdamW's average of squares
    graph: bool = True  # a step of ours as one CUDA graph, on a GPU
    deterministic: bool = False  # on a GPU sums in a fixed order: slower, and a resumed run is the same bits
    parallel: str = ""  # ddp, fsdp, tp or pp: how the ranks that torchrun starts share the work
    threads: int = 1  # of the CPU: sums over threads round otherwise with another number of them
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 100
    time_limit_s: float = math.inf

    def check(self, shape: Shape) -> None:
        """Before anything is computed."""
        for name in ("steps", "batch", "accumulate", "context", "eval_every", "eval_batches", "save_every", "threads"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: give 1 or more")
        if not 0 < self.lr <= MOST_LR:
            raise BadInput(f"--lr {self.lr}: give a number above 0, as in --lr 1e-3")
        if not 0 <= self.dropout < 1 or not self.clip >= 0 or not self.weight_decay >= 0:
            raise BadInput(
                f"--dropout {self.dropout}, --clip {self.clip}, --weight-decay {self.weight_decay}: "
                "give 0 or more, and a dropout below 1"
            )
        if not 0 <= self.beta2 < 1:
            raise BadInput(f"--beta2 {self.beta2}: give a number from 0 to below 1")
        if self.batch % self.accumulate:
            raise BadInput(f"--accumulate {self.accumulate} does not divide --batch {self.batch}: choose one that does")
        if not 0 <= self.warmup <= self.steps:
            raise BadInput(f"--warmup {self.warmup}: give a number of steps from 0 to {self.steps}")
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"--seed {self.seed}: give a whole number, 0 or more")
        if self.context > shape.context:
            raise BadInput(f"--context {self.context} is longer than the model's {shape.context} positions")
        one_of("mode", self.mode, MODES)
        one_of("attention", self.attention, ATTENTIONS)
        one_of("dtype", self.dtype, DTYPES)
        if self.parallel:
            one_of("parallel", self.parallel, PARALLEL)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def lr_at(self, step: int) -> float:
        """Up in a line, then down along half a cosine.

        >>> s = Settings(steps=100, batch=1, context=1, lr=1.0, warmup=10)
        >>> s.lr_at(0), s.lr_at(9), s.lr_at(10), round(s.lr_at(55), 3), round(s.lr_at(99), 3)
        (0.1, 1.0, 1.0, 0.55, 0.1)
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        part = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (LEAST_LR + (1 - LEAST_LR) * 0.5 * (1 + math.cos(math.pi * part)))

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return data | {"time_limit_s": None if math.isinf(self.time_limit_s) else self.time_limit_s}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        known = {field.name for field in fields(cls)}
        limit = data.get("time_limit_s")
        return cls(**{key: value for key, value in data.items() if key in known} | {"time_limit_s": limit or math.inf})


def default_lr(shape: Shape) -> float:
    """Smaller for wider models: GPT-2's at GPT-2's width."""
    return float(f"{GPT2_LR * math.sqrt(GPT2_DIM / shape.dim):.1e}")
