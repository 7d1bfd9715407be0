"""The processes of one run: who they are, and how they agree. Started by torchrun, one a GPU, or several on a CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sublight.errors import BadInput

PATIENCE = timedelta(minutes=10)  # for a rank that says nothing: one that has died is noticed at once
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.total(x) / self.world

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks, the same on each."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; on the host, so that no GPU is waited for."""
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def first_does(self, make: Callable[[], T]) -> T:
        """Rank 0 makes it, all get it; what was wrong there is raised everywhere."""
        found: list[Any] = [None, None]
        if self.is_first:
            try:
                found[0] = make()
            except BadInput as error:
                found[1] = str(error)
        dist.broadcast_object_list(found)
        if found[1] is not None:
            raise BadInput(found[1])
        return found[0]  # type: ignore[no-any-return]


def is_about_another(error: RuntimeError) -> bool:
    """Whether this is what a process sees when another has gone, by gloo or NCCL."""
    words = str(error)
    return isinstance(error, dist.DistError) or any(
        each in words for each in ("gloo", "NCCL", "Connection reset", "Connection closed", "Broken pipe")
    )


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Inside, this process is one of those that torchrun has started."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = device == "cuda"
    if on_gpu and local >= torch.cuda.device_count():
        raise BadInput(f"rank {rank} has no GPU: start at most {torch.cuda.device_count()} processes here")
    here = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(here)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(rank=rank, world=world, device=here, mesh=init_device_mesh(here.type, (world,)))
    finally:
        dist.destroy_process_group()
