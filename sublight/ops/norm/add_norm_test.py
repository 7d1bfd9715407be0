"""What a residual adds to a norm: the sum bit for bit, both gradients in one, an output that nobody uses."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.device import Facts
from sublight.conftest import HAS_GPU
from sublight.correct import Call, Inputs
from sublight.errors import BadInput
from sublight.op import Op
from sublight.ops.norm import add_norm, add_norm_tiles
from sublight.ops.norm.add_layer_norm import ADD_LAYER, ADD_LAYER_BACKWARD, ADD_LAYER_NORM
from sublight.ops.norm.add_rms_norm import ADD_RMS, ADD_RMS_BACKWARD, ADD_RMS_NORM

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
WIDTHS = (100, 3000, 40_000)  # rows in registers, several and one at a time; rows in chunks
EACH_OP = pytest.mark.parametrize("op", [ADD_LAYER_NORM, ADD_RMS_NORM], ids=lambda op: op.name)
EACH_WIDTH = pytest.mark.parametrize("cols", WIDTHS)


def library_call(op: Op, *inputs: torch.Tensor) -> Inputs:
    return getattr(torch.ops.sublight, op.name)(*op.library_args(*inputs))[:2]


@EACH_OP
@EACH_WIDTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_new_residual_is_pytorchs_sum(op: Op, cols: int, dtype: str, device: str) -> None:
    x, residual, *columns = op.inputs({"rows": 5, "cols": cols}, dtype, device, 0)
    x[0, :4] = torch.tensor([math.inf, math.nan, -0.0, 6e-8])
    residual[0, :4] = torch.tensor([-math.inf, 1.0, -0.0, 6e-8])
    residual *= 300  # so that the sum has to be rounded
    new_residual = op.launch(x, residual, *columns)[1]
    torch.testing.assert_close(new_residual, x + residual, rtol=0, atol=0, equal_nan=True)


@EACH_OP
@EACH_WIDTH
def test_y_is_the_norm_of_the_rounded_sum(op: Op, cols: int, device: str) -> None:
    x, residual, *columns = op.inputs({"rows": 5, "cols": cols}, "float16", device, 0)
    residual *= 300
    total = x + residual
    ours = op.launch(x, residual, *columns)[0]
    alone = op.launch(total, torch.zeros_like(total), *columns)[0]
    assert torch.equal(ours, alone)


@EACH_OP
@EACH_WIDTH
def test_an_unused_new_residual_adds_nothing(op: Op, cols: int, device: str) -> None:
    whole, back = (ADD_LAYER, ADD_LAYER_BACKWARD) if op is ADD_LAYER_NORM else (ADD_RMS, ADD_RMS_BACKWARD)
    x, residual, weight, *bias = op.inputs({"rows": 7, "cols": cols}, "float32", device, 0)
    dy, dsum = correct.random_grads(op.reference, (x, residual, weight, *bias))
    _, total, *stats = whole.by_kernels(x, residual, weight, *bias, 1e-5)
    without = back.by_kernels(dy, None, total, weight, *stats)
    zeros = back.by_kernels(dy, torch.zeros_like(dsum), total, weight, *stats)
    added = back.by_kernels(dy, dsum, total, weight, *stats)
    assert all(torch.equal(a, b) for a, b in zip(without, zeros, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(without[1:], added[1:], strict=True))
    assert not torch.equal(without[0], added[0])


@EACH_OP
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["y", "new_residual", "both"])
def test_gradients_of_the_outputs_that_are_used(op: Op, used: tuple[int, ...], device: str) -> None:
    inputs = op.inputs({"rows": 6, "cols": 40}, "float32", device, 0)
    weights = correct.random_grads(op.reference, inputs)

    def grads(call: Call, given: Inputs) -> list[torch.Tensor | None]:
        leaves = [x.detach().clone().requires_grad_() for x in given]
        outputs = call(*leaves)
        sum((outputs[i] * weights[i].to(outputs[i].dtype)).sum() for i in used).backward()
        return [leaf.grad for leaf in leaves]

    truth = grads(op.reference, tuple(x.double() for x in inputs))
    theirs = grads(op.reference, inputs)
    ours = grads(lambda *leaves: library_call(op, *leaves), inputs)
    for one, other, exact in zip(ours, theirs, truth, strict=True):
        assert (one is None) == (other is None) == (exact is None)
        if one is not None:
            assert correct.error("gradient", one, other, exact).ok


@EACH_OP
def test_the_two_gradients_can_be_changed_apart(op: Op, device: str) -> None:
    leaves = [x.requires_grad_() for x in op.inputs({"rows": 6, "cols": 40}, "float32", device, 0)]
    y, new_residual = library_call(op, *leaves)
    (y.sum() + new_residual.square().sum()).backward()
    x, residual = leaves[:2]
    assert torch.equal(x.grad, residual.grad)
    before = residual.grad.clone()
    x.grad.zero_()  # as an optimizer or gradient clipping does
    assert torch.equal(residual.grad, before)


@EACH_OP
def test_a_residual_of_another_shape(op: Op, device: str) -> None:
    x, residual, *columns = op.inputs({"rows": 6, "cols": 40}, "float32", device, 0)
    assert op.plan(x, residual[0], *columns).provider == "torch"
    for ours, theirs in zip(op.call(x, residual[0], *columns), op.reference(x, residual[0], *columns), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(BadInput, match="one shape"):
        op.launch(x, residual[0], *columns)
    with pytest.raises(BadInput, match="40 columns"):
        op.launch(x, residual, *(column[:-1] for column in columns))


def test_each_kernel_is_reached() -> None:
    shapes = [shape["cols"] for shape in ADD_RMS_NORM.test_shapes]
    forward = [add_norm_tiles.tile_of("", cols, 4, packed=False) for cols in shapes]
    backward = [add_norm_tiles.tile_of_backward("", cols, 4, Facts(), packed=False) for cols in shapes]
    for tiles in (forward, backward):
        held = [tile.block >= cols for tile, cols in zip(tiles, shapes, strict=True)]
        assert set(held) == {True, False}
        assert {tile.rows > 1 for tile, whole in zip(tiles, held, strict=True) if whole} == {True, False}


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_is_on_its_way_fits_in_shared_memory(
    shared_kib: int, itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu = Facts(capability=80, shared_bytes=shared_kib * 1024)
    for cols in add_norm.WIDTHS:
        tile = add_norm_tiles.tile_of_backward("", cols, itemsize, gpu, packed=itemsize == 2)
        assert add_norm_tiles._fits(tile, cols, itemsize, gpu), (cols, tile)
