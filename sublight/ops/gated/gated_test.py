"""The backward pass that makes the product again, and the projection that therefore need not hold it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sublight import correct
from sublight.backend.launch import watching
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.gated import gated, gated_linear
from sublight.ops.kernels.rows import random_rows

GATES: tuple[gated.Gate, ...] = ("silu", "none", "tanh")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]  # the interpreter's bf16 is wrong
EACH_GATE = pytest.mark.parametrize("by", GATES)


# -------------------------------------------------------------------------------------------------------- the kernels


@EACH_GATE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1, 127, 128, 520, 1025])
def test_the_gradients_stay_and_dy_becomes_the_product(
    by: gated.Gate, dtype: torch.dtype, cols: int, device: str
) -> None:
    gate, up, dy = (2 * torch.randn(3, 5, cols, device=device).to(dtype) for _ in range(3))
    product, x = gated.launch(gate, up, by), torch.cat((gate, up), -1)
    for views in ((gate, up), gated.halves(x)):
        mine = dy.clone()
        found = gated.launch_backward(mine, *views, by, again=True)
        assert torch.equal(mine, product)
        assert all(map(torch.equal, found, gated.launch_backward(dy, *views, by)))
    mine = dy.clone()
    assert torch.equal(
        gated.launch_halves_backward(mine, x, by, again=True), torch.cat(gated.launch_backward(dy, gate, up, by), -1)
    )
    assert torch.equal(mine, product)
    assert torch.equal(x, torch.cat((gate, up), -1))  # nothing else is written


@EACH_GATE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_three_are_as_right_as_pytorch(by: gated.Gate, dtype: torch.dtype, device: str) -> None:
    name, shape = str(dtype).removeprefix("torch."), {"rows": 64, "cols": 256}

    def ours(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mine = dy.clone()
        return *gated.launch_backward(mine, gate, up, by, again=True), mine

    def theirs(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            grads = correct.gradients(functools.partial(gated.reference, by=by), (gate, up), dy)
        return *grads, gated.reference(gate, up, by)

    draws = [
        correct.forward_errors(ours, theirs, (random_rows(shape, name, device, 7 * seed), *inputs))
        for seed in range(24)  # the largest of few errors is luck
        for inputs in [gated.inputs(shape, name, device, seed)]
    ]
    errors = [functools.reduce(correct.Error.merge, each) for each in zip(*draws, strict=True)]
    assert correct.worst(errors).ok, correct.worst(errors)


def test_only_memory_in_one_piece_is_written_over(device: str) -> None:
    x = torch.randn(4, 64, device=device)
    with pytest.raises(BadInput, match="contiguous"):
        gated.launch_backward(torch.randn(4, 65, device=device)[:, :64], x, x, "silu", again=True)


@pytest.mark.parametrize("name", ["gated_backward_again", "gated_halves_backward_again"])
def test_opcheck(name: str, device: str) -> None:
    x, dy = torch.randn(3, 128, device=device), torch.randn(3, 64, device=device)
    args = (dy, *gated.halves(x), "tanh") if name == "gated_backward_again" else (dy, x, "silu")
    assert set(torch.library.opcheck(getattr(torch.ops.sublight, name), args).values()) == {"SUCCESS"}


@EACH_GATE
def test_the_ops_do_as_the_kernels_do(by: gated.Gate, device: str) -> None:
    x, dy = torch.randn(3, 128, device=device), torch.randn(3, 64, device=device)
    one, other, third = dy.clone(), dy.clone(), dy.clone()
    dgate, dup = torch.ops.sublight.gated_backward_again(one, *gated.halves(x), by)
    dx = torch.ops.sublight.gated_halves_backward_again(other, x, by)
    assert torch.equal(torch.cat((dgate, dup), -1), dx) and torch.equal(one, other)
    assert torch.equal(dx, gated.launch_halves_backward(third, x, by, again=True)) and torch.equal(one, third)


def test_halves_in_one_row_are_one_piece(device: str) -> None:
    for rows, kernel in ((1, "_gated_kernel"), (2, "_gated_rows_kernel")):
        x = torch.randn(rows, 128, device=device)
        assert gated.plan_halves(x, "silu").kernel == kernel
        assert gated.plan_halves_backward(x[:, :64].contiguous(), x, "silu").kernel == kernel.replace(
            "kernel", "backward_kernel"
        )
        with watching() as steps:
            gated.swiglu(x)
        assert [step.name for step in steps] == [gated.plan(x, None, "silu").kernel] == [kernel]


# ----------------------------------------------------------------------------------------------------- the projection


@pytest.fixture
def by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass by PyTorch's ops, where our kernels could."""
    monkeypatch.setattr(gated_linear, "why_pytorch", lambda gate, up: "as asked")


def tensors(device: str, dtype: torch.dtype, *, halves: bool, bias: bool) -> tuple[torch.Tensor, ...]:
    """Gate, up (or both in one), the weight, the bias."""
    shapes = [(2, 32, 512)] if halves else [(2, 32, 256)] * 2
    found = [torch.randn(shape, device=device).to(dtype) for shape in (*shapes, (48, 256), *([(48,)] if bias else []))]
    return tuple(found)


def call(by: gated.Gate, halves: bool, linear: Callable[..., Any]) -> Callable[..., Any]:
    def result(gate: torch.Tensor, *rest: Any) -> Any:
        up, weight, *bias = (None, *rest) if halves else rest
        return linear(gate, up, weight, bias[0] if bias else None, by)

    return result


def in_pytorch(gate: torch.Tensor, up: Any, weight: torch.Tensor, bias: Any, by: gated.Gate) -> torch.Tensor:
    return F.linear(gated.reference(*(gated.halves(gate) if up is None else (gate, up)), by), weight, bias)


@EACH_GATE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_it_is_as_right_as_pytorch(
    by: gated.Gate,
    dtype: torch.dtype,
    bias: bool,
    halves: bool,
    by_kernel: bool,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    if not by_kernel:
        request.getfixturevalue("by_pytorch")
    inputs = tensors(device, dtype, halves=halves, bias=bias)
    ours, theirs = call(by, halves, gated_linear.gated_linear), call(by, halves, in_pytorch)
    dy = correct.random_grads(theirs, inputs)
    errors = [
        *correct.forward_errors(ours, theirs, inputs),
        *correct.backward_errors(lambda dy, *inputs: correct.gradients(ours, inputs, dy), theirs, inputs, dy),
    ]
    assert len(errors) == 1 + len(inputs)
    assert correct.worst(errors).ok, correct.worst(errors)
    with watching() as steps:
        correct.gradients(ours, inputs, dy)
    assert any("backward" in step.name for step in steps) == by_kernel


def test_the_product_takes_its_gradients_memory(device: str) -> None:
    gate, up, dh = (torch.randn(3, 64, device=device) for _ in range(3))
    with torch.no_grad():
        _, h = gated_linear.backward_with_product(dh, gate, up, "silu")
        assert h is dh
        _, h = gated_linear.backward_with_product(dh, torch.cat((gate, up), -1), None, "silu")
        assert h is dh


@EACH_GATE
@pytest.mark.parametrize("halves", [True, False])
def test_gradients_of_gradients(by: gated.Gate, halves: bool) -> None:
    inputs = tensors("cpu", torch.float64, halves=halves, bias=True)
    small = [x[:1, :2].detach() if x.dim() == 3 else x[:2].detach() for x in inputs]
    small = [x[..., : 6 if halves and i == 0 else 3] if x.dim() > 1 else x for i, x in enumerate(small)]
    leaves = [x.clone().requires_grad_() for x in small]
    assert torch.autograd.gradgradcheck(call(by, halves, gated_linear.gated_linear), leaves)


def test_backward_under_autocast_keeps_the_data_type(device: str) -> None:
    inputs = [x.requires_grad_() for x in tensors(device, torch.float32, halves=False, bias=True)]
    grads = []
    for context in (contextlib.nullcontext(), torch.autocast(device, torch.bfloat16)):
        y = gated_linear.gated_linear(*inputs, "silu")
        with context:
            grads.append(torch.autograd.grad(y, inputs, torch.ones_like(y)))
    assert all(map(torch.equal, *grads))


# ------------------------------------------------------------------------------------------------ where it takes over


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def asked(
    change: Callable[[dict[str, Any]], None] = lambda x: None, within: Callable[[], Any] = contextlib.nullcontext
) -> bool:
    """Whether it takes over for small tensors that ask for gradients, but for a change of them."""
    given: dict[str, Any] = {
        "gate": torch.ones(2, 3, requires_grad=True),
        "up": torch.ones(2, 3, requires_grad=True),
        "weight": torch.nn.Parameter(torch.ones(4, 3)),
        "bias": torch.nn.Parameter(torch.ones(4)),
    }
    change(given)
    with within():
        return gated_linear.holds_product(**given)


def test_training_is_where_it_takes_over() -> None:
    assert asked()
    assert asked(lambda x: x.update(bias=None))
    assert asked(lambda x: x["bias"].requires_grad_(False))
    assert asked(lambda x: x["up"].requires_grad_(False)) and asked(lambda x: x["gate"].requires_grad_(False))
    assert asked(lambda x: x.update(gate=torch.ones(2, 6, requires_grad=True), up=None))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x["weight"].requires_grad_(False),
        lambda x: (x["gate"].requires_grad_(False), x["up"].requires_grad_(False)),
        lambda x: x.update(gate=x["gate"].detach(), up=None),
        lambda x: x.update(weight=x["weight"].double()),
        lambda x: x.update(bias=x["bias"].double()),
        lambda x: x.update(up=x["up"][:1]),
        lambda x: x.update(gate=x["gate"].as_subclass(Own)),
        lambda x: x.update(weight=x["weight"].as_subclass(Own)),
        lambda x: x.update(bias=x["bias"].to("meta")),
        lambda x: x.update(weight=x["weight"].to_sparse()),
    ],
)
def test_tensors_that_it_leaves(change: Callable[[dict[str, Any]], None]) -> None:
    assert not asked(change)


@pytest.mark.parametrize(
    "within", [torch.no_grad, torch.inference_mode, forward_ad.dual_level, lambda: torch.autocast("cpu")]
)
def test_modes_that_it_leaves(within: Callable[[], Any]) -> None:
    assert not asked(within=within)


def test_who_watches_sees_it_all(device: str) -> None:
    inputs = [x.requires_grad_() for x in tensors(device, torch.float32, halves=False, bias=False)]
    assert asked(within=Watch)
    with Watch() as watch:
        gated_linear.gated_linear(*inputs, None, "silu").sum().backward()
    assert watch.names.count("aten::mm") == 3
    assert watch.names.count("sublight::gated_backward_again") == 1


def test_transforms_and_traces_are_left() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(asked())
        return x * 2

    torch.vmap(f)(torch.ones(2))
    torch.func.grad(lambda x: f(x).sum())(torch.ones(2))
    torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert len(seen) == 3 and not any(seen)


def test_checkpoints_are_left() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(asked())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    assert seen == [False, False]
    seen.clear()
    checkpoint(f, x, use_reentrant=True).sum().backward()
    assert seen == [False, True]  # all is made again, whoever makes it
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert asked()


def test_a_compiler_is_left() -> None:
    def f(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gate + int(gated_linear.holds_product(gate, up, weight))

    x = torch.zeros(3, 3, requires_grad=True)
    assert torch.compile(f, backend="eager", fullgraph=True)(x, x, x).sum() == 0
    assert f(x, x, x).sum() == 9
