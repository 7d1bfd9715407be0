"""How a model lies on several ranks, and how one batch's gradients come about: a class for each of PyTorch's ways.

`ddp` has the whole model everywhere, `fsdp` (FSDP2) a slice of every weight, `tp` the heads and the hidden columns of a
block, `pp` some blocks each. In the first two a rank takes its share of the sequences, in the others all of them.
Weights are DTensors where they are sliced; our ops see the plain tensors inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sublight.engines.train.data import split_labels
from sublight.engines.train.gpt2 import Gpt2
from sublight.engines.train.parallel.blocks import SplitBlock, Stage, interleave
from sublight.engines.train.parallel.ranks import Ranks
from sublight.engines.train.settings import Settings
from sublight.errors import BadInput


class Layout(Protocol):
    """What the loop needs of a model that lies on several ranks."""

    @property
    def module(self) -> nn.Module:
        """This rank's, with the names that the whole model's weights have."""

    def gradients(self, batch: torch.Tensor) -> torch.Tensor:
        """Of a batch in parts, the same on every rank; gives the mean loss, the same on every rank."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Without gradients, of sequences that every rank has."""


class Ddp:
    """The whole model on each rank; gradients are averaged while the backward pass runs."""

    def __init__(self, model: Gpt2, settings: Settings, ranks: Ranks) -> None:
        share(settings, ranks)
        self.module, self.ranks = model, ranks
        self._wrapped = DistributedDataParallel(model)

    def gradients(self, batch: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=batch.device)
        for number, part in enumerate(own(batch, self.ranks)):
            is_last = number == len(batch) - 1
            with contextlib.nullcontext() if is_last else self._wrapped.no_sync():
                loss = self._wrapped(*split_labels(part)) / len(batch)
                loss.backward()
            total = total + loss.detach()
        return self.ranks.mean(total)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.module(*split_labels(batch))  # type: ignore[no-any-return]


class Fsdp:
    """A slice of every weight on each rank, gathered block by block, and of its gradient and averages."""

    def __init__(self, model: Gpt2, settings: Settings, ranks: Ranks) -> None:
        share(settings, ranks)
        self.module, self.ranks = model, ranks
        narrow = getattr(torch, settings.dtype)
        policy = MixedPrecisionPolicy()
        if narrow != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ranks.mesh, mp_policy=policy)

    def gradients(self, batch: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=batch.device)
        for number, part in enumerate(own(batch, self.ranks)):
            self.module.set_requires_gradient_sync(number == len(batch) - 1)  # type: ignore[operator]
            loss = self.module(*split_labels(part)) / len(batch)
            loss.backward()
            total = total + loss.detach()
        return self.ranks.mean(total)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.module(*split_labels(batch))  # type: ignore[no-any-return]


class Tp:
    """Heads and hidden columns are shared out; norms, both tables and the loss are everywhere."""

    def __init__(self, model: Gpt2, settings: Settings, ranks: Ranks) -> None:
        if model.shape.heads % ranks.world:
            raise BadInput(f"--parallel tp: {ranks.world} ranks do not divide {model.shape.heads} heads")
        self.module, self.ranks = model, ranks
        styles = {
            "qkv": ColwiseParallel(),
            "out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        for block in model.blocks:
            assert isinstance(block, SplitBlock)
            interleave(block)
            parallelize_module(block, ranks.mesh, styles)  # type: ignore[arg-type]
            block.heads //= ranks.world

    def gradients(self, batch: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=batch.device)
        for part in batch:
            loss = self.module(*split_labels(part)) / len(batch)
            loss.backward()
            total = total + loss.detach()
        return total

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.module(*split_labels(batch))  # type: ignore[no-any-return]


class Pp:
    """Some blocks on each rank; the parts of a batch are on their way at once. The first and the last rank have the
    table of tokens, and add up its gradients."""

    def __init__(self, model: Gpt2, settings: Settings, ranks: Ranks) -> None:
        if model.shape.layers < ranks.world:
            raise BadInput(f"--parallel pp: {ranks.world} ranks for {model.shape.layers} layers: start fewer")
        self.module, self.ranks = Stage(model, ranks.rank, ranks.world), ranks
        self.parts = settings.accumulate if settings.accumulate > 1 else _most_parts(settings.batch, ranks.world)
        rows = settings.batch // self.parts
        ids = torch.zeros(rows, settings.context, dtype=torch.long, device=ranks.device)
        passed = torch.zeros(rows, settings.context, model.shape.dim, dtype=model.compute, device=ranks.device)
        passed.requires_grad_()  # so gradients are sent back

        stage = PipelineStage(
            self.module, ranks.rank, ranks.world, ranks.device, ids if ranks.is_first else passed, passed
        )
        kind = Schedule1F1B if self.parts >= ranks.world else ScheduleGPipe
        self._schedule = kind(stage, self.parts, loss_fn=self.module.loss)  # without one a rank has no backward pass
        self._ends = dist.new_group(sorted({0, ranks.world - 1}))

    def gradients(self, batch: torch.Tensor) -> torch.Tensor:
        ids, labels = split_labels(batch.flatten(0, 1))
        losses: list[torch.Tensor] = []
        total = torch.zeros((), device=batch.device)
        if self.module.is_last:
            given = (ids,) if self.module.is_first else ()
            self._schedule.step(*given, target=labels, losses=losses, return_outputs=False)
            total = torch.stack([loss.detach() for loss in losses]).mean()
        elif self.module.is_first:
            self._schedule.step(ids)
        else:
            self._schedule.step()
        if self.ranks.world > 1 and (self.module.is_first or self.module.is_last):
            dist.all_reduce(self.module.tokens.grad, group=self._ends)
        return self.ranks.total(total)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """One rank after another."""
        ids, labels = split_labels(batch)
        total = torch.zeros((), device=batch.device)
        x = ids
        if not self.module.is_first:
            dim, dtype = self.module.whole_shape.dim, self.module.compute
            x = torch.empty(*ids.shape, dim, dtype=dtype, device=batch.device)
            dist.recv(x, self.ranks.rank - 1)
        x = self.module(x)
        if self.module.is_last:
            total = self.module.loss(x, labels)
        else:
            dist.send(x, self.ranks.rank + 1)
        return self.ranks.total(total)


LAYOUTS: dict[str, type[Ddp] | type[Fsdp] | type[Tp] | type[Pp]] = {"ddp": Ddp, "fsdp": Fsdp, "tp": Tp, "pp": Pp}


def _most_parts(batch: int, stages: int) -> int:
    """The number of parts: as many as stages, if that divides the batch, since fewer leave stages idle."""
    return next(parts for parts in range(min(stages, batch), 0, -1) if batch % parts == 0)


def share(settings: Settings, ranks: Ranks) -> int:
    """Sequences of a part that each rank takes."""
    size = settings.batch // settings.accumulate
    if size % ranks.world:
        parts = f" in {settings.accumulate} parts" if settings.accumulate > 1 else ""
        raise BadInput(f"{ranks.world} ranks do not divide --batch {settings.batch}{parts}: choose one that they do")
    return size // ranks.world


def own(batch: torch.Tensor, ranks: Ranks) -> Iterator[torch.Tensor]:
    """This rank's sequences of each part."""
    for part in batch:
        yield part.tensor_split(ranks.world)[ranks.rank]


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def is_sliced(x: torch.Tensor) -> bool:
    return isinstance(x, DTensor) and any(placement.is_shard() for placement in x.placements)
