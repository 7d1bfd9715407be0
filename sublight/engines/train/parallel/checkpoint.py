"""Checkpoints of a run on several ranks, by torch.distributed.checkpoint: every rank writes what it has, into a folder
that gets its name when it is whole. Another number of ranks reads it as well."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from sublight.engines.train import checkpoint
from sublight.engines.train.parallel.ranks import Ranks
from sublight.errors import BadInput

KEPT = checkpoint.KEPT
FAILED = (Exception, CheckpointException)  # PyTorch's, of what any rank met, is no Exception
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # what belongs to a weight goes by its name, on any rank


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that are whole, oldest first."""
    return sorted(int(each.name[5:]) for each in folder.glob("step-*") if each.is_dir() and each.name[5:].isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int, ranks: Ranks) -> None:
    """All ranks together; older ones beyond the last few go."""
    part = path_of(folder, step).with_suffix(".part")
    if ranks.is_first:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.parent.mkdir(parents=True, exist_ok=True)
    model_state, optimizer_state = get_state_dict(module, optimizer, options=BY_NAME)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}
    try:
        state_dict_saver.save(state, checkpoint_id=str(part))
    except FAILED as error:
        raise BadInput(f"cannot write {part}: {_last_line(error)}; the checkpoint before it is whole") from None
    if ranks.is_first:
        shutil.rmtree(path_of(folder, step), ignore_errors=True)  # one that could not be read
        part.rename(path_of(folder, step))
        for old in steps(folder)[:-KEPT]:
            shutil.rmtree(path_of(folder, old), ignore_errors=True)
    ranks.any(False)  # nobody goes on before it has its name


def load(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, ranks: Ranks) -> int | None:
    """The newest into model and optimizer; gives its step, None where there is none."""
    found = ranks.first_does(lambda: steps(folder))
    for step in reversed(found):
        model_state, optimizer_state = get_state_dict(module, optimizer, options=BY_NAME)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(-1)}
        try:
            state_dict_loader.load(state, checkpoint_id=str(path_of(folder, step)))
            is_read = int(state["step"]) == step
        except FAILED:  # whatever is wrong with it, the one before it may be right
            is_read = False
        if not ranks.any(not is_read):
            set_state_dict(
                module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=BY_NAME
            )
            return int(step)
    if found:
        raise BadInput(f"none of the {len(found)} checkpoints in {folder} can be read: start again with another --out")
    return None


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
