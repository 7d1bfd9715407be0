"""The mask: the same from every kernel, tile and layout as from PyTorch; probabilities at their ends; bad input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from sublight import correct
from sublight.backend.record import launch_of
from sublight.errors import BadInput
from sublight.ops.kernels import column_sums, philox
from sublight.ops.pointwise import bias_dropout_residual as op
from sublight.ops.record import tuning

SEED = 2**35 + 4


def mask_of(rows: int, cols: int, dtype: torch.dtype, device: str, seed: int = SEED, p: float = 0.3) -> torch.Tensor:
    """What our forward kernel keeps."""
    ones = torch.ones(rows, cols, dtype=dtype, device=device)
    return op.launch(ones, torch.zeros_like(ones[0]), torch.zeros_like(ones), seed, p) != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cols", [1, 127, 130, 132, 264])
def test_kernels_keep_what_pytorch_keeps(cols: int, dtype: torch.dtype, device: str) -> None:
    rows = column_sums.FEW_ROWS + 1  # more than one program adds up, and an odd row is left
    expected = philox.kept(torch.tensor(SEED, device=device), (rows, cols), 0.3)
    assert torch.equal(mask_of(rows, cols, dtype, device), expected)
    dy = torch.randn(rows, cols, device=device).to(dtype)
    dx, _ = op.launch_backward(dy, SEED, 0.3)
    assert torch.equal(dx != 0, expected & (dy != 0))
    error = correct.worst(
        correct.forward_errors(
            lambda dy: op.launch_backward(dy, SEED, 0.3),
            lambda dy: op._backward_by_torch({"seed": None, "number": SEED, "p": 0.3}, (dy,))[:2],
            (dy,),
        )
    )
    assert error.ok, error


@pytest.mark.parametrize(("block", "warps", "rows"), [(256, 1, 1), (128, 4, 8), (1024, 2, 2)])
def test_the_tile_does_not_matter(block: int, warps: int, rows: int, device: str) -> None:
    dy = torch.randn(41, 264, device=device)
    tile = tuning.Tile(block=block, warps=warps, rows=rows, programs=3)
    for kernel, call in (
        ("bias_dropout_residual", lambda: mask_of(41, 264, torch.float32, device)),
        ("bias_dropout_backward", lambda: op.launch_backward(dy, SEED, 0.3)[0]),
    ):
        usual = call()
        token = tuning.TRIAL.set((kernel, tile))
        try:
            other = call()
        finally:
            tuning.TRIAL.reset(token)
        assert torch.equal(usual, other)


def test_the_layout_does_not_matter(device: str) -> None:
    x, bias, residual, seed = op.inputs({"rows": 9, "cols": 136}, "float32", device, 0)
    room = torch.full((9, 300), math.nan, device=device)
    room[:, 3:139] = x
    usual = op.launch(x, bias, residual, seed)
    assert torch.equal(usual, op.launch(room[:, 3:139], bias, residual, seed))
    assert torch.equal(usual, op.launch(x.T.contiguous().T, bias, residual.view(3, 3, 136).view(9, 136), seed))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**31, 2**63 - 1])
def test_a_number_is_as_good_as_a_tensor(seed: int, device: str) -> None:
    x, bias, residual, _ = op.inputs({"rows": 3, "cols": 200}, "float32", device, 0)
    tensor = torch.tensor(seed, device=device)
    for call in (op.launch, op.bias_dropout_residual, op.reference):
        assert torch.equal(call(x, bias, residual, seed), call(x, bias, residual, tensor))


def test_seeds_differ_in_their_upper_half_too(device: str) -> None:
    assert not torch.equal(*(mask_of(8, 128, torch.float32, device, seed) for seed in (5, 5 + 2**32)))


def test_probabilities_at_their_ends(device: str) -> None:
    x, bias, residual, seed = op.inputs({"rows": 7, "cols": 130}, "float32", device, 0)
    assert torch.equal(op.launch(x, bias, residual, seed, 0.0), residual + (x + bias))
    x[0, 0] = math.inf
    for call in (op.launch, op.bias_dropout_residual):
        assert torch.equal(call(x, bias, residual, seed, 1.0), residual)
    dx, dbias = op.launch_backward(x, seed, 1.0)
    assert not dx.any()
    assert not dbias.any()
    assert torch.equal(op.launch_backward(x, seed, 0.0)[0], x)


def test_the_library_op_has_the_gradient_of_the_reference(device: str) -> None:
    inputs = op.inputs({"rows": 65, "cols": 130}, "float32", device, 0)[:3]
    for seed, number in ((torch.tensor(7, device=device), 0), (None, 9)):
        library = partial(by_library, seed=seed, number=number)
        theirs = partial(op.reference, seed=number if seed is None else seed, p=0.3)
        (dy,) = correct.random_grads(theirs, inputs)

        def ours(dy: torch.Tensor, *inputs: torch.Tensor, library: Any = library) -> tuple[torch.Tensor, ...]:
            return correct.gradients(library, inputs, dy)

        error = correct.worst(correct.backward_errors(ours, theirs, inputs, dy))
        assert error.ok, error


def by_library(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None, number: int
) -> torch.Tensor:
    return torch.ops.sublight.bias_dropout_residual(x, bias, residual, seed, number, 0.3)


def test_another_number_needs_no_other_plan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed changes at every call: one plan, one compiled kernel, and still each number's own mask."""
    x, bias, residual, _ = op.inputs({"rows": 3, "cols": 200}, "float32", device, 0)
    plans: list[int] = []
    plan = op._bias_dropout_residual.plan
    noted = lambda *args: plans.append(args[4]) or plan(*args)  # noqa: E731
    object.__setattr__(op._bias_dropout_residual, "plan", noted)
    try:
        for seed in (0, 1, 16, 17, -5, 2**40):
            result = op.bias_dropout_residual(x, bias, residual, seed, 0.5003)  # a probability that no other test has
            number = torch.tensor(seed, device=device)
            assert torch.equal(result, op.bias_dropout_residual(x, bias, residual, number, 0.5003))
    finally:
        object.__setattr__(op._bias_dropout_residual, "plan", plan)
    assert len(plans) == 2  # with a number, and with a tensor
    for step in (plan(x, bias, residual, None, 0, 0.1).steps[0], op.plan_backward(x, None, 0, 0.1).steps[0]):
        assert step.free == ("number",)
        kinds = [specialised(step.kernel, number, step) for number in (0, 1, 16, 17, 2**40)]
        assert all(kind == ("i64", False) for kind in kinds), kinds


def specialised(kernel: Any, number: int, step: Any) -> tuple[str, bool]:
    """The type of `number` in the compiled kernel, and whether that depends on its value, by Triton's own rules."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"])
    tensors = [torch.empty(16) for _ in step.on]
    launch = launch_of(kernel, (*tensors, *step.values((number,))), step.constants, grid=step.grid, capability=90)
    return launch.signature.get("number", "constant"), "number" in launch.aligned or "number" in launch.constants


def test_bad_input(device: str) -> None:
    x, bias, residual, seed = op.inputs({"rows": 3, "cols": 64}, "float32", device, 0)
    for call in (op.launch, op.bias_dropout_residual):
        with pytest.raises(BadInput, match="probability"):
            call(x, bias, residual, seed, 1.5)
        with pytest.raises(BadInput, match="int64"):
            call(x, bias, residual, seed.float())
        with pytest.raises(BadInput, match="int64"):
            call(x, bias, residual, torch.arange(2, device=device))
        with pytest.raises((BadInput, RuntimeError)):
            call(x, bias[:-1], residual, seed)
    with pytest.raises(BadInput, match="residual"):
        op.launch(x, bias, residual[:2], seed)
    with pytest.raises(BadInput, match="bias"):
        op.launch(x, bias.half(), residual, seed)
    for wrong in (x.long(), x.double(), x[:0]):
        assert op.plan(wrong, bias, residual, seed).provider == "torch"
