"""Shapes that the profiler left out: bounds by grids are never above the truth, gradients go to the right op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sublight.trace.complete import CHUNK, FEW_TENSORS, least_elements
from sublight.trace.costs import cost_of
from sublight.trace.load import load
from sublight.trace.record import NONE, Trace

ADAM = "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(T)"
AMSGRAD = ADAM.replace("<4>", "<5>")
STEPS = "void multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<float, 1, 1, 0>>(T)"
ADDED = "void multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float, 2, 2, 0>>(T)"
INDEX = "void at::native::index_elementwise_kernel<128, 4, gpu_index_kernel<OpaqueType<4>>>(long)"
GATHER = "void at::native::vectorized_gather_kernel<16, long>(char*)"
LISTS = ["TensorList"] * 6


class Tape:
    """Ops on one thread, each with its launches, as a Chrome trace."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.launches = 100, 0

    def op(self, name: str, *kernels: tuple[str, int], inside: str = "", tid: int = 1, **args: Any) -> None:
        start, self.now = self.now, self.now + 10
        for kernel, blocks in kernels:
            self.launches += 1
            self._span("cuda_runtime", "cudaLaunchKernel", self.now, 2, tid=tid, args={"correlation": self.launches})
            ran = {"correlation": self.launches, "grid": [blocks, 1, 1], "block": [512, 1, 1], "stream": 7, "device": 0}
            self._span("kernel", kernel, self.now + 50, 5, pid=0, tid=7, args=ran)
            self.now += 4
        self.now += 10
        self._span("cpu_op", name, start, self.now - start, tid=tid, args=args)
        if inside:
            self._span("cpu_op", inside, start + 1, self.now - start - 2, tid=tid, args=args)
        self.now += 10

    def _span(self, kind: str, name: str, ts: float, dur: float, pid: int = 9, **more: Any) -> None:
        self.events.append({"ph": "X", "cat": kind, "name": name, "pid": pid, "ts": ts, "dur": dur, **more})

    def load(self, folder: Path) -> Trace:
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return load(path)[0]


def lists(name: str = "", **more: Any) -> dict[str, Any]:
    return {"Input Dims": [[]] * 6, "Input type": LISTS, "Concrete Inputs": [""] * 6, **more}


def shaped(*dims: Any, sequence: int | None = None, kinds: str = "float") -> dict[str, Any]:
    numbered = {} if sequence is None else {"Sequence number": sequence}
    return {"Input Dims": list(dims), "Input type": [kinds if shape else "" for shape in dims], **numbered}


def detail(trace: Trace, name: str, which: int = 0) -> Any:
    rows = trace.rows_named(lambda other: other == name).tolist()
    return trace.detail_of(rows[which])


@pytest.mark.parametrize(
    "sizes", [(1,), (CHUNK,), (CHUNK + 1,), (5, 7 * CHUNK, 3 * CHUNK - 1), (100,) * 36, (10**7,) * 3]
)
def test_the_bound_by_blocks_is_never_above_the_truth(sizes: tuple[int, ...]) -> None:
    blocks = sum(-(-size // CHUNK) for size in sizes)
    for few in (False, True):
        assert 0 < least_elements(ADAM, blocks, few=few) <= sum(sizes)


def test_large_tensors_are_nearly_all_counted() -> None:
    truth, blocks = 3 * 10**7, 3 * -(-(10**7) // CHUNK)
    assert least_elements(ADAM, blocks, few=True) > 0.9 * truth
    assert least_elements(ADAM, 36, few=True) == FEW_TENSORS[4] == 36, "each may be a small tensor"


@pytest.mark.parametrize("kernel", ["my_kernel", "void at::native::vectorized_elementwise_kernel<4, X>(int)"])
def test_nothing_is_known_of_other_kernels(kernel: str) -> None:
    assert least_elements(kernel, 1000) == 0


def test_a_fused_optimizer_over_many_tensors(tmp_path: Path) -> None:
    tape = Tape()
    tape.op("aten::_fused_adamw_", (ADAM, 320), (ADAM, 100), **lists())
    trace = tape.load(tmp_path)
    elements = (320 - 36 + 100 - 36) * CHUNK + 2 * 36
    assert detail(trace, "aten::_fused_adamw_").elements == elements
    found = cost_of("aten::_fused_adamw_", detail(trace, "aten::_fused_adamw_"), kernels=(ADAM,))
    assert found is not None and found.family == "optimizer" and found.dtype == "float32"
    assert (found.cost.read_bytes, found.cost.write_bytes) == (4 * 4 * elements, 3 * 4 * elements)
    assert found.cost.total_flops == 15 * elements
    with_maxima = cost_of("aten::_fused_adamw_", detail(trace, "aten::_fused_adamw_"), kernels=(AMSGRAD,))
    assert with_maxima is not None and with_maxima.cost.write_bytes == 4 * 4 * elements


def test_the_count_of_steps_tells_how_many_parameters_there_are(tmp_path: Path) -> None:
    tape = Tape()
    one = {"Input Dims": [[], []], "Input type": ["TensorList", "Scalar"], "Concrete Inputs": ["", "1"]}
    tape.op("aten::_foreach_add_", (STEPS, 53), **one)
    tape.op("aten::_fused_adamw_", (ADAM, 320), (ADAM, 100), **lists())
    tape.op("aten::_foreach_add_", (STEPS, 53), **{**one, "Concrete Inputs": ["", "0.5"]})  # adds something else
    tape.op("aten::_fused_adamw_", (ADAM, 320), (ADAM, 100), **lists())
    trace = tape.load(tmp_path)
    assert detail(trace, "aten::_fused_adamw_").elements == (420 - 53) * CHUNK + 53
    assert detail(trace, "aten::_fused_adamw_", 1).elements == (420 - 72) * CHUNK + 72


@pytest.mark.parametrize(("name", "reads"), [("aten::_foreach_add_", 2), ("aten::_foreach_add", 1)])
def test_foreach_over_many_tensors(name: str, reads: int, tmp_path: Path) -> None:
    tape = Tape()
    two = {"Input Dims": [[], []], "Input type": ["TensorList", "TensorList"]}
    tape.op(name, (ADDED, 320), (ADDED, 64), **two)
    trace = tape.load(tmp_path)
    elements = (320 - 64) * CHUNK + 2 * 64
    found = cost_of(name, detail(trace, name), kernels=(ADDED,))
    assert found is not None
    assert (found.cost.read_bytes, found.cost.write_bytes) == (4 * reads * elements, 4 * elements)


def test_shapes_that_were_recorded_stay(tmp_path: Path) -> None:
    tape = Tape()
    recorded = {"Input Dims": [[[8, 16]]] * 4, "Input type": ["TensorList"] * 4}
    tape.op("aten::_fused_adamw_", (ADAM, 320), **recorded)
    trace = tape.load(tmp_path)
    assert detail(trace, "aten::_fused_adamw_").elements == NONE


def test_a_launch_counts_for_the_op_around_it_alone(tmp_path: Path) -> None:
    tape = Tape()
    tape.op("aten::_fused_adamw_", **lists())
    tape.op("aten::other", (ADAM, 320), **lists())
    tape.op("aten::_fused_adamw_", (ADAM, 100), **lists())
    trace = tape.load(tmp_path)
    assert detail(trace, "aten::_fused_adamw_").elements == NONE
    assert detail(trace, "aten::_fused_adamw_", 1).elements == 100


@pytest.mark.parametrize(
    ("launches", "few"),
    [
        ((320, 100), True),
        ((320,), False),  # it may be full, or not
        ((300, 100), False),  # full of tensors, but of how many?
        ((2240, 320), False),
    ],
)
def test_how_many_tensors_a_launch_takes_shows_where_one_was_full(
    launches: tuple[int, ...], few: bool, tmp_path: Path
) -> None:
    tape = Tape()
    tape.op("aten::_fused_adamw_", *((ADAM, blocks) for blocks in launches), **lists())
    found = detail(tape.load(tmp_path), "aten::_fused_adamw_").elements
    assert found == sum(least_elements(ADAM, blocks, few=few) for blocks in launches)


@pytest.mark.parametrize(("kernel", "blocks", "elements"), [(INDEX, 5, 4 * 512 + 1), (GATHER, 32, 32 * 16)])
def test_indexing_by_the_grid(kernel: str, blocks: int, elements: int, tmp_path: Path) -> None:
    tape = Tape()
    tape.op("aten::index", (kernel, blocks), **shaped([1000, 16], []))
    trace = tape.load(tmp_path)
    found = cost_of("aten::index", detail(trace, "aten::index"), kernels=(kernel,))
    assert found is not None and found.family == "index"
    assert (found.cost.read_bytes, found.cost.write_bytes) == (4 * elements, 4 * elements)


def test_one_value_into_many_places(tmp_path: Path) -> None:
    tape = Tape()
    filled = {"Input Dims": [[1000, 16], [], []], "Input type": ["float", "", "float"]}
    tape.op("aten::index_put_", (INDEX, 5), inside="aten::_index_put_impl_", **filled)
    trace = tape.load(tmp_path)
    for name in ("aten::index_put_", "aten::_index_put_impl_"):
        found = cost_of(name, detail(trace, name), kernels=(INDEX,))
        assert found is not None and found.cost.write_bytes == 4 * (4 * 512 + 1)


def test_a_convolution_without_strides_has_the_shape_of_its_gradient(tmp_path: Path) -> None:
    tape = Tape()
    image = shaped([32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], sequence=7)
    tape.op("aten::conv2d", inside="aten::cudnn_convolution", **image)
    tape.op("CudnnConvolutionBackward", tid=2, **shaped([32, 64, 112, 112], sequence=7))
    trace = tape.load(tmp_path)
    found = cost_of("aten::cudnn_convolution", detail(trace, "aten::cudnn_convolution"))
    assert found is not None and found.shape == "32x3x224x224 * 64x3x7x7 -> 32x64x112x112"
    assert found.cost.write_bytes == 4 * 32 * 64 * 112 * 112
    assert found.cost.total_flops == 2 * 32 * 64 * 112 * 112 * 3 * 49


def test_an_op_without_a_gradient_does_not_get_the_next_ones(tmp_path: Path) -> None:
    """Both have one sequence number: the first made no node, so the counter stood still."""
    tape = Tape()
    for batch in (4, 8):
        tape.op("aten::index", **shaped([100, 16], [], sequence=3))
        tape.op("aten::conv2d", **shaped([batch, 3, 8, 8], [6, 3, 3, 3], [], sequence=4))
    tape.op("IndexBackward0", tid=2, **shaped([5, 16], sequence=3))
    tape.op("ConvolutionBackward0", tid=2, **shaped([8, 6, 6, 6], sequence=4))
    trace = tape.load(tmp_path)
    assert [detail(trace, "aten::index", at).out for at in (0, 1)] == [(), (5, 16)]
    assert [detail(trace, "aten::conv2d", at).out for at in (0, 1)] == [(), (8, 6, 6, 6)]
    found = cost_of("aten::index", detail(trace, "aten::index", 1))
    assert found is not None and found.cost.write_bytes == 4 * 80


def test_two_threads_with_one_number_tell_nothing(tmp_path: Path) -> None:
    tape = Tape()
    tape.op("aten::conv2d", **shaped([8, 3, 8, 8], [6, 3, 3, 3], [], sequence=4))
    for size in (6, 8):
        tape.op("ConvolutionBackward0", tid=2, **shaped([8, 6, size, size], sequence=4))
    assert detail(tape.load(tmp_path), "aten::conv2d").out == ()


@pytest.mark.parametrize("gradient", [[4, 6, 6, 6], [8, 5, 6, 6], [8, 6, 6], []])
def test_a_gradient_that_does_not_fit_is_not_believed(gradient: list[int], tmp_path: Path) -> None:
    tape = Tape()
    tape.op("aten::conv2d", **shaped([8, 3, 8, 8], [6, 3, 3, 3], [], sequence=4))
    tape.op("ConvolutionBackward0", tid=2, **shaped(gradient, sequence=4))
    assert cost_of("aten::conv2d", detail(tape.load(tmp_path), "aten::conv2d")) is None
