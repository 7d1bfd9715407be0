"""Kernels compiled ahead: all that a step needs, and nothing of the model is changed by it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import sublight
from sublight.fix.patch.ahead import begin, compile_for
from sublight.fix.patch.step import as_it_was, is_inert


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width)
        self.act, self.down = torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        self.stats = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stats(x + self.down(self.act(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def test_on_the_cpu_there_is_nothing_to_compile() -> None:
    assert compile_for(Block(8), torch.randn(4, 8)) == 0


def test_a_step_leaves_gradients_buffers_modes_and_random_numbers() -> None:
    model = Block(8)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with as_it_was(model):
        model(torch.randn(4, 8)).sum().backward()
        model.eval()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight)) and model.down.weight.grad is None
    assert model.training and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("value", "inert"),
    [
        (torch.ones(1), True),
        ({"input_ids": torch.ones(1), "use_cache": False, "past_key_values": None}, True),
        ((torch.ones(1), [2, "x", 1.5]), True),
        ({"past_key_values": object()}, False),
        ((torch.ones(1), {"deep": [object()]}), False),
    ],
)
def test_what_a_call_may_leave_traces_in(value: Any, inert: bool) -> None:
    assert is_inert(value) is inert


def test_what_fails_in_the_background_is_not_heard_of() -> None:
    ran = threading.Event()

    def fail() -> None:
        ran.set()
        raise ValueError("nobody hears this")

    begin(fail).join()
    assert ran.is_set()


@pytest.mark.gpu
@pytest.mark.parametrize("trains", (True, False))
def test_after_it_a_step_compiles_nothing(trains: bool) -> None:
    from triton import knobs

    width = 1536 if trains else 1792  # of no other test: its kernels are not compiled yet
    model = Block(width).to("cuda", torch.bfloat16).train(trains)
    x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = sublight.patch(model, x, quiet=True)
    assert told.swapped and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    compiled: list[str] = []
    knobs.compilation.listener = lambda **told: compiled.append(str(told["metadata"].get("name")))
    try:
        with torch.set_grad_enabled(trains):
            y = model(x)
        if trains:
            y.sum().backward()
    finally:
        knobs.compilation.listener = None
    assert not compiled and bool(y.isfinite().all())
