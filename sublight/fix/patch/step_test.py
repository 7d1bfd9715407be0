"""A step leaves the model as it was, whatever its forward does to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sublight.fix.patch.expect import saving_s
from sublight.fix.patch.pay import timed
from sublight.fix.patch.record import Swap
from sublight.fix.patch.step import as_it_was


class Restless(torch.nn.Module):
    """Puts other tensors in the places of its own, counts its calls, and keeps what holds its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.codes = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.scale, self.aux = 0, 1.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.scale = self.calls + 1, self.scale * 0.5
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.codes = torch.nn.Parameter(self.codes.detach() + 1)
        y: torch.Tensor = self.lin(x)
        self.aux = y.sum()
        return y


def test_what_a_forward_replaces_is_put_back() -> None:
    model = Restless()
    mean, codes = model.mean, model.codes
    with as_it_was(model):
        model(torch.randn(3, 4)).sum().backward()
    assert (model.calls, model.scale, model.aux) == (0, 1.0, None)
    assert model.mean is mean and not mean.any() and model.codes is codes and not codes.any()


def test_it_is_put_back_where_the_step_is_interrupted() -> None:
    model = Restless().train()
    with pytest.raises(KeyboardInterrupt), as_it_was(model):
        model(torch.randn(3, 4))
        model.eval()
        raise KeyboardInterrupt
    assert model.calls == 0 and model.training and model.lin.weight.grad is None


def test_a_model_made_in_inference_mode_is_put_back() -> None:
    with torch.inference_mode():
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4)).eval()
    with as_it_was(model), torch.no_grad():
        model(torch.randn(3, 4))
    assert not model[0].running_mean.any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_part_is_let_be() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.jit.script(torch.nn.BatchNorm1d(4)))
    with as_it_was(model):
        model(torch.randn(3, 4))
        model.eval()
    assert model[1].training and not model[1].running_mean.any()


def test_timing_leaves_buffers_and_random_numbers() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    state = torch.get_rng_state()
    timed(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), time_limit_s=0.01)
    assert torch.equal(torch.get_rng_state(), state) and not model[0].running_mean.any()


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("with gradients it does not fit")


def test_what_cannot_be_timed_by_itself_saves_nobody_knows_what() -> None:
    x = torch.randn(3, 4).as_subclass(OnGpu)
    assert saving_s(torch.nn.GELU(), Swap(rule="any", forward=raises), (x,), {}) is None


def test_what_somebody_listens_to_is_not_timed() -> None:
    heard: list[Any] = []
    block = torch.nn.Sequential(torch.nn.Linear(4, 4))
    block[0].register_forward_hook(lambda *arguments: heard.append(arguments))
    x = torch.randn(3, 4).as_subclass(OnGpu)
    assert saving_s(block, Swap(rule="any", forward=torch.nn.Sequential.forward), (x,), {}) is None
    assert not heard
