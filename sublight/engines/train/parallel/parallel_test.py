"""Each way of sharing a model out gives the losses of one process; another number of ranks goes on with a checkpoint.

The rule is `correct`'s: over twelve steps no loss is further from float64's than twice the plain process's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from sublight import correct
from sublight.engines.train import data, log
from sublight.engines.train.loop import Trainer
from sublight.engines.train.parallel import checkpoint, fakes
from sublight.engines.train.parallel.ranks import joined
from sublight.errors import BadInput

ROOT = Path(__file__).parents[4]
MOST_S = 300  # processes start slowly on a busy machine
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}


def torchrun(folder: Path, how: str, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), "-m", fakes.__name__, str(folder), how, *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=MOST_S)


def started(folder: Path, how: str, ranks: int, *words: str) -> None:
    """As torchrun does, without a process of its own."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", fakes.__name__, str(folder), how, *words]
    processes = []
    for rank in map(str, range(ranks)):
        environment = ENVIRONMENT | meeting | {"RANK": rank, "LOCAL_RANK": rank}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, err = process.communicate(timeout=MOST_S)
        assert process.returncode == 0, err[-2000:]


def free_port() -> int:
    """Below those that the system hands out: another test's connection could take one of them before rank 0 does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def losses(folder: Path) -> torch.Tensor:
    """Of steps and evaluations, in order."""
    rows = log.read(folder / log.NAME)
    return torch.tensor([row.get("loss", row.get("held_out_loss")) for row in rows], dtype=torch.float64)


def alone(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """The same run in one process."""
    made = fakes.made(folder, "", 12)
    trainer = Trainer(made, data.opened(made.tokens), torch.device("cpu"))
    trainer.model.to(dtype).compute = dtype
    trainer.train()
    return losses(folder)


@pytest.fixture(scope="module")
def known(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor]:
    """One process's losses, in fp32 and in fp64."""
    folder = tmp_path_factory.mktemp("alone")
    return alone(folder / "32", torch.float32), alone(folder / "64", torch.float64)


def assert_as_alone(folder: Path, known: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = losses(folder)
    assert len(found) == 15  # twelve steps, three evaluations
    error = correct.error("losses", found.float(), known[0].float(), known[1])
    assert error.ok, error


CASES = [(how, ranks) for how in ("fsdp", "ddp", "tp", "pp") for ranks in (2, 4)]


@pytest.mark.parametrize(("how", "ranks"), CASES)
def test_losses_are_those_of_one_process(
    how: str, ranks: int, tmp_path: Path, known: tuple[torch.Tensor, torch.Tensor]
) -> None:
    started(tmp_path, how, ranks, "12")
    assert_as_alone(tmp_path, known)
    state = torch.load(tmp_path / "whole.pt")
    assert len(state) == 52 and all(x.isfinite().all() for x in state.values())


@pytest.mark.parametrize("how", ["fsdp", "ddp", "tp", "pp"])
def test_a_rank_that_dies_is_reported_and_another_number_goes_on(
    how: str, tmp_path: Path, known: tuple[torch.Tensor, torch.Tensor]
) -> None:
    broken = torchrun(tmp_path, how, 2, "12", "1", "6")
    assert broken.returncode != 0 and "exitcode  : 9" in broken.stderr
    assert max(row["step"] for row in log.read(tmp_path / log.NAME)) >= 4
    started(tmp_path, how, 4, "12")
    assert_as_alone(tmp_path, known)


def test_a_checkpoint_that_cannot_be_read_gives_way_and_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**meeting, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch's own, which names the rank, would stay behind
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    with joined("cpu") as ranks:
        for step in (1, 2):
            checkpoint.save(module, optimizer, tmp_path, step, ranks)
        (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"half of it")
        assert checkpoint.load(module, optimizer, tmp_path, ranks) == 1
        checkpoint.save(module, optimizer, tmp_path, 2, ranks)
        assert checkpoint.load(module, optimizer, tmp_path, ranks) == 2
        (tmp_path / "step-00000003.part").write_text("no folder, so nothing can be written into it")
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(BadInput, match="cannot write"):
            checkpoint.save(module, optimizer, tmp_path, 3, ranks)


def test_a_wrong_share_would_be_seen(known: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What a rank that read another's sequences would give: losses of another run."""
    other = known[0] * (1 + 1e-4)
    assert not correct.error("losses", other.float(), known[0].float(), known[1]).ok


def test_settings_travel(tmp_path: Path) -> None:
    made = fakes.made(tmp_path, "pp", 12)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["parallel"] == "pp"
    assert replace(made.settings, parallel="") == fakes.made(tmp_path / "other", "", 12).settings
