"""Every kernel of every op against its float64 reference, by the twice-PyTorch's-error rule, and inside PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable
from functools import partial

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
    def masked(seed: int) -> torch.Tensor:
        x = torch.randn(4, cols, generator=torch.Generator(device).manual_seed(seed), device=device)
        x[0, : cols // 2] = -math.inf
        x[1, 1:] = -math.inf
        x[2] = -math.inf
        return x

    error = correct.settled(
        lambda seed: correct.forward_errors(softmax.launch, partial(torch.softmax, dim=-1), (masked(seed),))
    )
    assert error.ok, error
    result = softmax.launch(masked(0))
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


WAITING = ("grouped_matmul", "packed_attention", "paged_prefill")  # PyTorch's ops wait for lengths, off GPUs
TRACED = [op for op in OPS if "bfloat16" in op.dtypes and not op.writes and op.name not in WAITING]


@pytest.mark.parametrize("op", TRACED, ids=lambda op: op.name)
def test_pytorchs_ops_are_traced_where_sizes_vary(op: Op, device: str) -> None:
    """Where there is no GPU a call in bf16 is PyTorch's. Its sizes are symbols to torch.compile then, not numbers, and
    tensors to torch.jit.trace."""
    torch._dynamo.reset()
    inputs = op.inputs(op.test_shapes[2], "bfloat16", device, 0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager", dynamic=True)
        traced = torch.jit.trace(op.call, inputs, check_trace=False)
        assert same(compiled(*inputs), op.call(*inputs))
        assert same(traced(*inputs), op.call(*inputs))


def test_random_columns_differ() -> None:
    weight, bias = rows.random_columns({"rows": 1, "cols": 64}, "float32", "cpu", 0, 2)
    assert not torch.equal(weight, bias)
