"""Every op on a GPU: captured, compiled, past 2^31 elements, repeatable to the bit, right at every benchmark width."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.cost import Shape
from sublight.op import Op
from sublight.ops import find
from sublight.ops.kernels import rows
from sublight.ops.ops_test import BATCHED, EACH_BATCHED, EACH_OP, as_tuple, batch_of, grads_for, same


@pytest.fixture
def repeatable(op: Op) -> Iterator[None]:
    """PyTorch's attention, which `attention` takes for gradients here, adds up dq in any order unless asked not to: two
    of its eager runs differ in that tensor, and in no other."""
    torch.use_deterministic_algorithms(op.name == "attention")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@EACH_OP
@pytest.mark.usefixtures("repeatable")
def test_a_graph_captures_it(op: Op) -> None:
    inputs = correct.leaves_of(op.inputs(op.shapes[-1], "bfloat16", "cuda", 0), op.wrt if op.launch_backward else ())
    grads = grads_for(op, inputs) if op.launch_backward else ()

    def run(*own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = as_tuple(op.call(*own))
        if not op.launch_backward:
            return outputs
        wanted = [x for x in own if x.requires_grad]
        return *outputs, *torch.autograd.grad([y for y in outputs if y.requires_grad], wanted, grads, retain_graph=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*(x.clone() if op.writes else x for x in inputs))
        eager = run(*(x.clone() if op.writes else x for x in inputs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)


@pytest.mark.gpu
@EACH_OP
def test_inductor_compiles_it(op: Op) -> None:
    inputs = op.inputs(op.shapes[-1], "bfloat16", "cuda", 0)
    compiled = torch.compile(op.call, fullgraph=True)(*(x.clone() for x in inputs))
    assert same(compiled, op.call(*(x.clone() for x in inputs)))


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
@EACH_BATCHED
def test_past_two_to_the_thirty_one_elements(op: Op) -> None:
    shape = {"rows": 2**19 + 3, "cols": 4104}
    inputs = op.inputs(shape, "bfloat16", "cuda", 0)
    mine = batch_of(op, shape, inputs)
    tail = tuple(x[-2:].clone() if i in mine else x for i, x in enumerate(inputs))
    few = as_tuple(op.launch(*(x.clone() if i in op.writes else x for i, x in enumerate(tail))))
    calls = op.judged(op.launch), op.judged(op.reference)
    error = correct.worst(correct.forward_errors(*calls, tail, writes=bool(op.writes)))
    assert error.ok, error
    for all_rows, last in zip(as_tuple(op.launch(*inputs)), few, strict=True):
        if all_rows.dim() and all_rows.shape[0] == shape["rows"]:
            assert torch.equal(all_rows[-2:], last)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in BATCHED if op.launch_backward], ids=lambda op: op.name)
def test_the_backward_pass_repeats_bit_for_bit(op: Op) -> None:
    x = op.inputs({"rows": 3000, "cols": 4096}, "bfloat16", "cuda", 0)
    grads = grads_for(op, x)
    first = op.launch_backward(*grads, *x)
    for _ in range(5):
        assert same(first, op.launch_backward(*grads, *x))


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@EACH_OP
def test_every_benchmark_width_is_right(op: Op, dtype: str) -> None:
    for shape in map(dict, sorted({tuple(fewer(op, shape, dtype).items()) for shape in op.shapes})):
        at = op.at(shape)
        x = op.inputs(shape, dtype, "cuda", 1)
        calls = op.judged(at.launch), op.judged(at.reference)
        error = correct.worst(correct.forward_errors(*calls, x, writes=bool(op.writes)))
        assert error.ok, (shape, error)
        if at.launch_backward:
            grads = grads_for(at, x)
            error = correct.worst(correct.backward_errors(at.launch_backward, at.reference, x, grads, wrt=op.wrt))
            assert error.ok, (shape, error)


REPEATED = (("rows",), ("batch",), ("tokens", "experts"), ("tensors",), ("pairs",), ("d0",))  # these together
MOST_BYTES, MOST_FLOPS = 2**29, 2**41  # float64 takes four times the bytes, and backward as much again


def fewer(op: Op, shape: Shape, dtype: str) -> Shape:
    """A shape of the same widths with less of what only repeats, so that a float64 reference fits and is quick."""
    most = {"numel": 2**22, "vocab": 2**13}
    found = {key: min(size, most.get(key, size)) for key, size in shape.items()}
    if found.get("cols", rows.MAX_COLS) < rows.MAX_COLS and "rows" in found:
        found["rows"] = 40  # of one row PyTorch's error may be small by luck
    for keys in REPEATED:
        while all(found.get(key, 0) > max(1, found.get("top_k", 1)) for key in keys) and is_dear(op, found, dtype):
            found |= {key: math.ceil(found[key] / 2) for key in keys}
    return found


def is_dear(op: Op, shape: Shape, dtype: str) -> bool:
    cost = op.cost(shape, dtype, "fwd")
    return cost.bytes > MOST_BYTES or sum(cost.flops.values()) > MOST_FLOPS


def test_fewer_rows_of_the_same_width() -> None:
    assert fewer(find("softmax"), {"rows": 32768, "cols": 4096}, "float16") == {"rows": 40, "cols": 4096}
    long = {"batch": 4, "heads": 16, "kv_heads": 16, "q_len": 16384, "kv_len": 16384, "head_dim": 128, "causal": 0}
    assert fewer(find("attention"), long, "bfloat16") == long | {"batch": 1}
    wide = {"m": 8192, "n": 28672, "k": 8192}
    assert fewer(find("matmul"), wide, "bfloat16") == wide
    experts = {"tokens": 4096, "hidden": 4096, "inner": 14336, "experts": 8, "top_k": 2}
    assert fewer(find("moe_experts"), experts, "bfloat16") == experts | {"tokens": 1024, "experts": 2}
