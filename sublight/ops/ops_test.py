"""Every kernel of every op against its float64 reference, by the twice-PyTorch's-error rule, and inside PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from sublight import correct
from sublight.backend import device as device_facts
from sublight.backend.launch import CHECKED, watching
from sublight.conftest import HAS_GPU
from sublight.correct import Inputs
from sublight.cost import Shape, shape_text
from sublight.errors import BadInput
from sublight.op import Op
from sublight.ops import OPS, find
from sublight.ops.kernels import rows
from sublight.ops.softmax import softmax

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")  # the interpreter's bf16 is wrong
ENOUGH = 2**14  # elements that an error is taken over …
ROWS = 24  # … and rows: a row's errors share its sum's, so few would be luck (the interpreter has no time for so many)
MOST_INTERPRETED = 2**15  # elements: the interpreter takes seconds for more
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, 60000.0)
CASES = [  # on the CPU fp16 takes every third shape: it differs from fp32 in what is converted, not in what is where
    pytest.param(op.at(shape), shape, dtype, id=f"{op.name}-{shape_text(shape)}-{dtype}")
    for op in OPS
    for i, shape in enumerate(op.test_shapes)
    for dtype in DTYPES
    if HAS_GPU or dtype == "float32" or i % 3 == 1
]
EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def draws(op: Op, shape: Shape) -> int:
    few = math.ceil(ROWS / shape[op.batch]) if HAS_GPU and op.batch in shape else 1
    return min(64 if HAS_GPU else 12, max(few, ENOUGH // math.prod(shape[key] for key in op.keys)))


def grads_for(op: Op, inputs: Inputs, seed: int = 7) -> Inputs:
    return correct.random_grads(op.reference, inputs, wrt=op.wrt, seed=seed)


def as_tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(one: object, other: object) -> bool:
    return all(torch.equal(a, b) for a, b in zip(as_tuple(one), as_tuple(other), strict=True))


@pytest.mark.parametrize(("op", "shape", "dtype"), CASES)
def test_forward_is_as_right_as_pytorch(op: Op, shape: Shape, dtype: str, device: str) -> None:
    writes = bool(op.writes)

    def draw(seed: int) -> list[correct.Error]:
        x = op.inputs(shape, dtype, device, seed)
        return correct.forward_errors(op.judged(op.launch), op.judged(op.reference), x, writes=writes)

    error = correct.settled(draw, draws(op, shape))
    assert error.ok, error


@pytest.mark.parametrize(("op", "shape", "dtype"), [case for case in CASES if case.values[0].launch_backward])
def test_backward_is_as_right_as_pytorch(op: Op, shape: Shape, dtype: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        x = op.inputs(shape, dtype, device, seed)
        return correct.backward_errors(op.launch_backward, op.reference, x, grads_for(op, x, seed), wrt=op.wrt)

    error = correct.settled(draw, draws(op, shape))
    assert error.ok, error


def gapped(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that do not follow one another, with NaN between them."""
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), math.nan if x.is_floating_point() else 1)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, columns first."""
    return x.mT.contiguous().mT


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values from an address that is no multiple of 16 bytes."""
    room = x.new_empty(x.numel() + 1)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def folded(x: torch.Tensor) -> torch.Tensor:
    """The same values with a dimension more in front."""
    return x.unsqueeze(0)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


LAYOUTS = (as_it_is, gapped, turned, shifted)


@pytest.mark.gpu_seconds(4)
@EACH_OP
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_why_names_is_what_is_launched(
    op: Op, layout: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    for shape, dtype in itertools.product(op.test_shapes, (dtype for dtype in DTYPES if dtype in op.dtypes)):
        inputs = tuple(
            layout(x) if x.dim() > 1 or layout in (as_it_is, shifted) else x.clone()
            for x in op.inputs(shape, dtype, device, 0)
        )
        if math.prod(inputs[0].shape) > MOST_INTERPRETED and not HAS_GPU:
            continue  # the plan of a large shape is looked at below, without being run
        at = op.at(shape)
        plan = at.plan(*inputs)
        with watching() as steps:
            at.call(*inputs)
        launched = ", ".join(dict.fromkeys(step.name for step in steps))
        assert launched == (plan.kernel if plan.provider != "torch" else ""), (shape, dtype, plan)


@EACH_OP
def test_a_plan_is_for_one_kind_of_call(op: Op, device: str) -> None:
    """A plan that is kept is used for other tensors of its kind: what it was compiled for must fit them."""
    token = CHECKED.set(True)
    try:
        for layout in (as_it_is, shifted):
            for seed in range(2):
                op.call(*map(layout, op.inputs(op.test_shapes[1], "float32", device, seed)))
    finally:
        CHECKED.reset(token)


class Refused(Exception):
    """A call of ours that is not differentiated twice: in which words, and who ran it."""


@pytest.mark.parametrize("op", [op for op in OPS if op.launch_backward], ids=lambda op: op.name)
def test_a_derivative_of_the_derivative_is_right_or_refused(op: Op, device: str) -> None:
    def second(call: Callable[..., object], leaves: Inputs) -> list[torch.Tensor | None]:
        outputs = [y for y in as_tuple(call(*leaves)) if y.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        first = torch.autograd.grad(sum((y * y).sum() for y in outputs), wanted, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), wanted, allow_unused=True))

    def draw(seed: int) -> list[correct.Error]:
        inputs = op.inputs(op.test_shapes[1], "float32", device, seed)
        try:
            ours = second(op.call, correct.leaves_of(inputs, op.wrt))
        except RuntimeError as refused:  # NotImplementedError is one
            raise Refused(str(refused), op.plan(*inputs).provider) from refused
        with sdpa_kernel([SDPBackend.MATH]):  # PyTorch's fused attention has no second derivative
            theirs = second(op.reference, correct.leaves_of(inputs, op.wrt))
        double = correct.leaves_of(tuple(x.double() if x.is_floating_point() else x for x in inputs), op.wrt)
        triples = list(zip(ours, theirs, second(op.reference, double), strict=True))
        assert all((one is None) == (other is None) for one, other, _ in triples)
        return [correct.error("second derivative", *triple) for triple in triples if triple[0] is not None]

    try:
        error = correct.settled(draw, times=64)  # a loss is one number a draw
    except Refused as refused:
        words, provider = refused.args
        is_torchs = provider == "torch" and re.search("derivative for aten::_scaled_dot_product.* is not impl", words)
        assert is_torchs or "has no second derivative" in words, words
        return
    assert error.ok, error


@EACH_OP
@pytest.mark.parametrize("moved", [gapped, turned])
def test_rows_may_be_apart_in_memory(op: Op, moved: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    shape = {"numel": 100_000} if op.keys == ("numel",) else op.test_shapes[-1]
    inputs = op.inputs(shape, "float32", device, 0)
    if op.keys == ("numel",):
        inputs = tuple(x.view(50, -1) for x in inputs)
    apart = tuple(moved(x) if x.dim() > 1 else x.clone() for x in inputs)
    assert any(x.dim() > 1 and not x.is_contiguous() for x in apart)
    assert same(op.launch(*apart), op.launch(*(x.clone() for x in inputs)))


BATCHED = [op for op in OPS if op.batch in op.keys and op.keys == ("rows", "cols")]
EACH_BATCHED = pytest.mark.parametrize("op", BATCHED, ids=lambda op: op.name)


def batch_of(op: Op, shape: Shape, tensors: tuple[torch.Tensor, ...]) -> list[int]:
    """Which of them hold an entry's own values."""
    return [i for i, x in enumerate(tensors) if x.dim() and x.shape[0] == shape[op.batch]]


@EACH_BATCHED
def test_more_than_two_dimensions(op: Op, device: str) -> None:
    shape = {"rows": 12, "cols": 130}
    inputs = op.inputs(shape, "float32", device, 0)
    mine = batch_of(op, shape, inputs)
    folded = tuple(x.view(3, 4, *x.shape[1:]) if i in mine else x for i, x in enumerate(inputs))
    flat, result = as_tuple(op.launch(*inputs)), as_tuple(op.launch(*folded))
    for one, other in zip(flat, result, strict=True):
        if one.dim() and one.shape[0] == 12:
            assert other.shape == (3, 4, *one.shape[1:])
        assert torch.equal(one.flatten(), other.flatten())


@EACH_BATCHED
def test_a_strange_value_stays_in_its_row(op: Op, device: str) -> None:
    shape = {"rows": len(SPECIAL) + 1, "cols": op.test_shapes[-1]["cols"]}
    inputs = op.inputs(shape, "float32", device, 0)
    for row, value in enumerate(SPECIAL):
        inputs[0][row, 5] = value
    # the CPU's float64 composition is the judge: PyTorch's fused kernels give NaN for a whole row where one value is
    expected = as_tuple(op.reference(*(x.double().cpu() if x.is_floating_point() else x.cpu() for x in inputs)))
    for result, truth in zip(as_tuple(op.launch(*inputs)), expected, strict=True):
        if truth.dim() == 0 or truth.shape[0] != shape["rows"] or not truth.is_floating_point():
            continue  # a sum over rows: nothing stays anywhere
        assert torch.equal(torch.isfinite(result.float()).cpu(), torch.isfinite(truth.float()))
        assert torch.isfinite(result[-1].float()).all()


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


@EACH_BATCHED
def test_wrong_input_is_refused_or_goes_to_pytorch(op: Op, device: str) -> None:
    x, *others = op.inputs(op.test_shapes[1], "float32", device, 0)
    for wrong in (x.long(), x.double(), x[:0]):
        with contextlib.suppress(BadInput):
            assert op.plan(wrong, *others).provider == "torch"
    if not HAS_GPU:
        assert op.plan(x.bfloat16(), *others).provider == "torch"  # whose arithmetic the interpreter gets wrong
    if others and others[0].is_floating_point():
        assert op.plan(x, others[0].half(), *others[1:]).provider == "torch"
        with pytest.raises((RuntimeError, BadInput)):
            op.call(x, *(other[..., :-1] for other in others))


@EACH_BATCHED
def test_an_empty_batch_gives_an_empty_result(op: Op, device: str) -> None:
    shape = op.test_shapes[1]
    inputs = op.inputs(shape, "float32", device, 0)
    mine = batch_of(op, shape, inputs)
    empty = tuple(x[:0] if i in mine else x for i, x in enumerate(inputs))
    ours, theirs = as_tuple(op.call(*empty)), as_tuple(op.reference(*empty))
    assert [y.shape for y in ours] == [y.shape for y in theirs]


def test_unknown_op_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="softmax"):
        find("sofmax")


def library_call(op: Op) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The outputs of torch.ops.sublight.<name> that the reference has too, less what it keeps for its gradient."""
    registered, count = getattr(torch.ops.sublight, op.name), []

    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not count:
            count.append(len(as_tuple(op.reference(*inputs))))
        outputs = registered(*op.library_args(*inputs))
        return as_tuple(outputs)[: count[0]] if outputs is not None else tuple(inputs[i] for i in op.writes)

    return call


@EACH_OP
def test_opcheck(op: Op, device: str) -> None:
    inputs = correct.leaves_of(op.inputs(op.test_shapes[1], "float32", device, 0), op.wrt if not op.writes else ())
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if any(x.dtype == torch.float8_e4m3fn for x in inputs):
        utilities = utilities[1:]  # PyTorch's check of a schema multiplies its inputs, which it cannot do with fp8
    checks = torch.library.opcheck(getattr(torch.ops.sublight, op.name), op.library_args(*inputs), test_utils=utilities)
    assert set(checks.values()) == {"SUCCESS"}, checks


@EACH_OP
def test_a_traced_tensor_is_not_asked_for_its_address(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile traces a gradient: fake tensors on a GPU, while nobody says that a compiler is at work."""

    asked = []

    def no_address(x: torch.Tensor) -> int:
        asked.append(x.shape)
        raise RuntimeError("Cannot access data pointer of Tensor")

    inputs = op.inputs(op.test_shapes[1], next(reversed(op.dtypes)), "cpu", 0)
    monkeypatch.setattr(torch.Tensor, "data_ptr", no_address)
    monkeypatch.setattr(device_facts, "_facts", lambda _: device_facts.Facts(capability=90, multiprocessors=132))
    with FakeTensorMode():
        traced = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x
            for x in inputs
        ]
        try:
            op.call(*traced)
        except RuntimeError as problem:
            if "not linked with support for cuda" not in str(problem):
                raise
            pytest.skip("a CPU build of torch indexes no tensor on a GPU, not even a fake one")
    assert not asked


@EACH_OP
def test_torch_compile_traces_the_whole_op(op: Op, device: str) -> None:
    torch._dynamo.reset()  # `call` is the same code for every op, and so much is compiled of one code only so often
    inputs = op.inputs(op.test_shapes[2], "float32", device, 0)
    for call in (library_call(op), op.call):
        call(*(x.clone() for x in inputs))
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert same(compiled(*(x.clone() for x in inputs)), call(*(x.clone() for x in inputs)))
        if op.launch_backward:
            grads = grads_for(op, inputs)
            ours = correct.gradients(compiled, inputs, grads, wrt=op.wrt)
            assert same(ours, correct.gradients(call, inputs, grads, wrt=op.wrt))


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


def test_random_columns_differ() -> None:
    weight, bias = rows.random_columns({"rows": 1, "cols": 64}, "float32", "cpu", 0, 2)
    assert not torch.equal(weight, bias)
