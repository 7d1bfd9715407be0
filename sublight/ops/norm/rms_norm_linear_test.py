"""What `rms_norm_linear` does beside its shapes in the record: a residual, no norm, weights that may be read early."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.norm import rms_norm_linear as module
from sublight.ops.norm.rms_norm_linear import launch, reference, rms_norm_linear

DTYPE = torch.bfloat16 if HAS_GPU else torch.float16


def made(n: int, k: int, device: str, seed: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    sizes = ((1, k), (k,), (n, k), (1, n))
    return tuple(torch.randn(size, generator=generator, device=device, dtype=DTYPE) for size in sizes)


@pytest.mark.parametrize("has_norm", [True, False])
def test_a_residual_is_added(has_norm: bool, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        x, norm, weight, residual = made(37, 300, device, seed)

        def by(call: Any) -> Any:
            return lambda x, norm, weight, residual: call(x, norm if has_norm else None, weight, residual=residual)

        return correct.forward_errors(by(launch), by(reference), (x, norm, weight, residual * 20))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.gpu
def test_reading_early_changes_nothing(device: str) -> None:
    """A chain in which each launch begins while the one before ends, captured and replayed: the same bits."""
    x, norm, weight, _ = made(4096, 4096, device)
    weight *= 0.02

    def chain(frozen: bool) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = rms_norm_linear(y, norm, weight, residual=y, frozen=frozen)
        return y

    plain = chain(False)
    assert torch.equal(chain(True), plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(True)
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, plain)


def test_only_what_is_frozen_is_read_early() -> None:
    """The plan of a GPU's tensors is not at hand here; a CPU's never begins early."""
    x, norm, weight, residual = made(8, 64, "cpu")
    plan = module._rms_norm_linear.plan(x, norm, weight, None, residual, 1e-6, False, True)
    assert plan.steps[0].constants["EARLY"] is False and "launch_pdl" not in plan.steps[0].constants


def test_a_residual_of_another_shape_is_refused() -> None:
    x, norm, weight, residual = made(8, 64, "cpu")
    with pytest.raises(BadInput, match=r"residual \(1, 7\): use \(1, 8\)"):
        rms_norm_linear(x, norm, weight, residual=residual[:, :7])
    with pytest.raises(BadInput, match="leave it out of a gated product"):
        rms_norm_linear(x, norm, weight, residual=residual, gated=True)
