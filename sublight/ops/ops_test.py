"""Every kernel of every op against its float64 reference, by the twice-PyTorch's-error rule, and inside PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct  # noqa: E402
from sublight.conftest import HAS_GPU  # noqa: E402
from sublight.op import BadInput, Inputs, Op, shape_text  # noqa: E402
from sublight.ops import OPS, find, rows, softmax  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")  # the interpreter's bf16 is wrong
ENOUGH = 2**14  # elements that an error is taken over: a row's errors share its sum's, so few rows would be luck
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, 60000.0)
OP_SHAPES = [pytest.param(op, shape, id=f"{op.name}-{shape_text(shape)}") for op in OPS for shape in op.test_shapes]
EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def draws(op: Op, shape: dict[str, int], dtype: str, device: str) -> Iterator[Inputs]:
    for seed in range(min(64, max(1, ENOUGH // math.prod(shape.values())))):
        yield op.inputs(shape, dtype, device, seed)


def grad_for(x: torch.Tensor, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator(device=x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def pooled(errors: Iterator[list[correct.Error]]) -> correct.Error:
    total = next(errors)
    for more in errors:
        total = [one.merge(other) for one, other in zip(total, more, strict=True)]
    return correct.worst(total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), OP_SHAPES)
def test_forward_is_as_right_as_pytorch(op: Op, shape: dict[str, int], dtype: str, device: str) -> None:
    error = pooled(correct.forward_errors(op.launch, op.reference, x) for x in draws(op, shape, dtype, device))
    assert error.ok, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "shape"), [case for case in OP_SHAPES if case.values[0].launch_backward])
def test_backward_is_as_right_as_pytorch(op: Op, shape: dict[str, int], dtype: str, device: str) -> None:
    error = pooled(
        correct.backward_errors(op.launch_backward, op.reference, x, grad_for(x[0], seed))
        for seed, x in enumerate(draws(op, shape, dtype, device))
    )
    assert error.ok, error


@EACH_OP
def test_rows_may_be_apart_in_memory(op: Op, device: str) -> None:
    inputs = op.inputs(op.test_shapes[-1], "float32", device, 0)
    first = inputs[0].reshape(1, -1) if inputs[0].dim() == 1 else inputs[0]
    wide = torch.randn(3, 2 * first.shape[1] + 3, device=device)
    gapped, transposed = wide[:, : first.shape[1]], torch.randn(first.shape[1], 3, device=device).T
    for x in (gapped, transposed):
        others = (x,) if op.name == "add" else inputs[1:]
        assert torch.equal(op.launch(x, *others), op.launch(x.contiguous(), *(other.contiguous() for other in others)))


@EACH_OP
def test_more_than_two_dimensions(op: Op, device: str) -> None:
    inputs = op.inputs({**op.test_shapes[2]}, "float32", device, 0)
    if inputs[0].dim() == 1:
        folded, others = inputs[0][:512].view(4, 8, 16), (inputs[1][:512].view(4, 8, 16),)
    else:
        folded, others = inputs[0][:64].view(4, 16, -1), inputs[1:]
    flat = op.launch(folded.reshape(64, -1), *(o.reshape(64, -1) if op.name == "add" else o for o in others))
    result = op.launch(folded, *others)
    assert result.shape == folded.shape
    assert torch.equal(result.reshape(64, -1), flat)


@EACH_OP
def test_a_strange_value_stays_in_its_row(op: Op, device: str) -> None:
    shape = op.test_shapes[-1]
    x, *others = op.inputs(shape, "float32", device, 0)
    x = x.view(-1, 100_003 if x.dim() == 1 else x.shape[-1]).repeat(len(SPECIAL) + 1, 1)[: len(SPECIAL) + 1].clone()
    if op.name == "add":
        others = [others[0].view(1, -1).expand_as(x).contiguous()]
    for row, value in enumerate(SPECIAL):
        x[row, 5] = value
    # the CPU's float64 composition is the judge: PyTorch's fused kernels give NaN for a whole row where one value is
    expected = op.reference(x.double().cpu(), *(other.double().cpu() for other in others))
    result = op.launch(x, *others)
    assert torch.equal(torch.isfinite(result).cpu(), torch.isfinite(expected.float()))
    assert torch.isfinite(result[-1]).all()


@pytest.mark.parametrize("cols", [100, 3000, 40_000])
def test_softmax_of_masked_rows(cols: int, device: str) -> None:
    x = torch.randn(4, cols, device=device)
    x[0, : cols // 2] = -math.inf
    x[1, 1:] = -math.inf
    x[2] = -math.inf
    result, expected = softmax.launch(x), torch.softmax(x, -1)
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=1e-7)  # digits: see above
    assert torch.isnan(result[2]).all()
    assert result[1, 0] == 1


def test_each_softmax_kernel_is_reached() -> None:
    reached = {softmax.plan("softmax", shape["cols"], 4, packed=False) for shape in softmax.SOFTMAX.test_shapes}
    assert None in reached  # trailing
    assert {tile.rows > 1 for tile in reached if tile} == {True, False}
    assert any(tile.block > softmax.TILE_COLS for tile in reached if tile)


@EACH_OP
def test_wrong_input_is_refused_or_goes_to_pytorch(op: Op, device: str) -> None:
    x, *others = op.inputs(op.test_shapes[1], "float32", device, 0)
    for wrong in (x.long(), x.double(), x[:0]):
        assert op.choose(wrong, *others).provider == "torch"
    assert op.choose(x, *others).provider == ("sublight" if HAS_GPU and op.name != "add" else "torch")
    if others and op.name != "add":
        assert op.choose(x, others[0].half(), *others[1:]).provider == "torch"
        with pytest.raises((RuntimeError, BadInput)):
            op.call(x, *(other[:-1] for other in others))


def test_an_empty_batch_gives_an_empty_result(device: str) -> None:
    for op in OPS:
        x, *others = op.inputs(op.test_shapes[1], "float32", device, 0)
        empty = x[:0]
        assert op.call(empty, *(o[:0] if op.name == "add" else o for o in others)).shape == empty.shape


def test_unknown_op_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="softmax"):
        find("sofmax")


def registered(op: Op, x: Inputs) -> tuple[object, ...]:
    eps = () if op.name in ("add", "softmax") else (1e-5,)
    return (*x, *eps)


@EACH_OP
def test_opcheck(op: Op, device: str) -> None:
    inputs = op.inputs(op.test_shapes[1], "float32", device, 0)
    leaves = tuple(x.requires_grad_() for x in inputs)
    checks = torch.library.opcheck(getattr(torch.ops.sublight, op.name), registered(op, leaves))
    assert set(checks.values()) == {"SUCCESS"}, checks


@EACH_OP
def test_torch_compile_traces_the_whole_op(op: Op, device: str) -> None:
    inputs = op.inputs(op.test_shapes[2], "float32", device, 0)
    leaves = tuple(x.requires_grad_() for x in inputs)
    registered_op = getattr(torch.ops.sublight, op.name)

    def through_the_library(*tensors: torch.Tensor) -> torch.Tensor:
        result = registered_op(*registered(op, tensors))
        return result[0] if isinstance(result, tuple) else result

    compiled = torch.compile(through_the_library, fullgraph=True, backend="aot_eager")
    grad = grad_for(inputs[0])
    ours = torch.autograd.grad(compiled(*leaves), leaves, grad)
    plain = torch.autograd.grad(through_the_library(*leaves), leaves, grad)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    torch.compile(op.call, fullgraph=True, backend="aot_eager")(*leaves)


@pytest.mark.gpu
@EACH_OP
def test_a_graph_captures_it(op: Op) -> None:
    inputs = op.inputs(op.shapes[-1], "bfloat16", "cuda", 0)
    leaves = tuple(x.requires_grad_() for x in inputs)
    grad = grad_for(inputs[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = (op.call(*leaves), *torch.autograd.grad(op.call(*leaves), leaves, grad))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = op.call(*leaves)
        captured = (y, *torch.autograd.grad(y, leaves, grad, retain_graph=True))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))


@pytest.mark.gpu
@EACH_OP
def test_inductor_compiles_it(op: Op) -> None:
    inputs = op.inputs(op.shapes[-1], "bfloat16", "cuda", 0)
    assert torch.equal(torch.compile(op.call, fullgraph=True)(*inputs), op.call(*inputs))


@pytest.mark.gpu
@EACH_OP
def test_past_two_to_the_thirty_one_elements(op: Op) -> None:
    keys = op.keys
    shape = {"numel": 2**31 + 4096} if keys == ("numel",) else {"rows": 2**19 + 3, "cols": 4104}
    x, *others = op.inputs(shape, "bfloat16", "cuda", 0)
    y = op.launch(x, *others)
    tail = slice(-4096, None) if x.dim() == 1 else slice(-2, None)
    ends = [other[tail] if op.name == "add" else other for other in others]
    assert torch.equal(y[tail], op.launch(x[tail].clone(), *ends))
    error = correct.worst(correct.forward_errors(op.launch, op.reference, (x[tail].clone(), *ends)))
    assert error.ok, error


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_the_backward_pass_repeats_bit_for_bit(name: str) -> None:
    op = find(name)
    x = op.inputs({"rows": 3000, "cols": 4096}, "bfloat16", "cuda", 0)
    grad = grad_for(x[0])
    first = op.launch_backward(grad, *x)
    for _ in range(5):
        again = op.launch_backward(grad, *x)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@EACH_OP
def test_every_benchmark_width_is_right(op: Op, dtype: str) -> None:
    for shape in op.shapes:
        small = {key: min(size, 40) if key == "rows" else min(size, 2**22) for key, size in shape.items()}
        x = op.inputs(small, dtype, "cuda", 1)
        error = correct.worst(correct.forward_errors(op.launch, op.reference, x))
        assert error.ok, (shape, error)
        if op.launch_backward:
            error = correct.worst(correct.backward_errors(op.launch_backward, op.reference, x, grad_for(x[0])))
            assert error.ok, (shape, error)


def test_random_columns_differ() -> None:
    weight, bias = rows.random_columns({"rows": 1, "cols": 64}, "float32", "cpu", 0, 2)
    assert not torch.equal(weight, bias)
