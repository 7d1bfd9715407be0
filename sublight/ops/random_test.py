"""Any shape, any layout: what the chosen shapes of ops_test do not think of."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.op import Op
from sublight.ops import find

LAYOUTS = ("together", "gapped", "offset", "transposed", "repeated")
random_cases = settings(
    max_examples=60 if HAS_GPU else 8 if os.environ.get("SUBLIGHT_CASES", "drawn") == "drawn" else 25,  # it is slow
    deadline=None,
    derandomize="CI" in os.environ,  # there the same cases every time; elsewhere new ones
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, elsewhere in memory."""
    rows, cols = x.shape
    if layout == "gapped":
        room = torch.full((rows, cols + 5), float("nan"), dtype=x.dtype, device=x.device)
        room[:, :cols] = x
        return room[:, :cols]
    if layout == "offset":  # no row starts at a 16-byte boundary
        room = torch.full((rows * cols + 3,), float("nan"), dtype=x.dtype, device=x.device)
        room[3:] = x.reshape(-1)
        return room[3:].view(rows, cols)
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "repeated":
        return x[:1].expand(rows, cols)
    return x


def check(op: Op, rows: int, cols: int, dtype: str, layout: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        first, *others = op.inputs({"rows": rows, "cols": cols}, dtype, device, seed)
        inputs = (laid_out(first, layout), *others)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        grad = laid_out(torch.randn(first.shape, generator=generator, device=device, dtype=first.dtype), layout)
        forward = correct.forward_errors(op.launch, op.reference, inputs)
        backward = correct.backward_errors(op.launch_backward, op.reference, inputs, grad)
        # of equal rows a sum over rows is a multiple: PyTorch's order of additions may make it exact every time
        return [*forward, *(backward[:1] if layout == "repeated" else backward)]

    error = correct.settled(draw, times=64)  # a row of three columns is three numbers a draw
    assert error.ok, error


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
@random_cases
@given(
    rows=st.integers(1, 9),
    cols=st.one_of(st.integers(1, 300), st.integers(1, 9000), st.sampled_from([2047, 2048, 2049, 4096, 4097, 8193])),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"] if HAS_GPU else ["float32", "float16"]),
    layout=st.sampled_from(LAYOUTS),
)
@example(rows=2, cols=1, dtype="float32", layout="together")  # a gradient of exactly zero, unless products are fused
def test_any_shape_and_layout(name: str, rows: int, cols: int, dtype: str, layout: str, device: str) -> None:
    check(find(name), rows, cols, dtype, layout, device)


@random_cases
@given(rows=st.integers(1, 40), cols=st.integers(1, 3000), layout=st.sampled_from(LAYOUTS))
def test_add_of_any_shape_and_layout(rows: int, cols: int, layout: str, device: str) -> None:
    x, y = torch.randn(2, rows, cols, device=device)
    assert torch.equal(find("add").launch(laid_out(x, layout), y), laid_out(x, layout) + y)
