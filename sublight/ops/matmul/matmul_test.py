"""Every step of the ladder at odd sizes and layouts, what follows a product, gradients, and what a plan says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend import native
from sublight.backend.device import PRETEND, Facts
from sublight.backend.launch import watching
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.matmul import matmul as family
from sublight.ops.matmul.epilogue import ACTIVATIONS
from sublight.ops.matmul.matmul import LADDER, MATMUL, matmul, plan_by, reference
from sublight.ops.matmul.product import Product, product_of
from sublight.ops.matmul.tiles import persistent_tile
from sublight.ops.record import call

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
SIZES = [(1, 15, 17), (16, 65, 63), (63, 16, 70), (65, 17, 40)]
if HAS_GPU:
    SIZES += [(4097, 65, 700), (17, 4097, 1000), (300, 1000, 4097)]


def along_k(m: int, n: int, k: int, **made: Any) -> tuple[Any, Any]:
    return torch.randn(m, k, **made), torch.randn(n, k, **made).T


def along_n(m: int, n: int, k: int, **made: Any) -> tuple[Any, Any]:
    return torch.randn(m, k, **made), torch.randn(k, n, **made)


def turned(m: int, n: int, k: int, **made: Any) -> tuple[Any, Any]:
    return torch.randn(k, m, **made).T, torch.randn(k, n, **made)


def sliced(m: int, n: int, k: int, **made: Any) -> tuple[Any, Any]:
    """Between other numbers, from an odd place on, and every second column."""
    return torch.randn(m, k + 9, **made)[:, 3 : 3 + k], torch.randn(k, 2 * n, **made)[:, ::2]


LAYOUTS = (along_k, along_n, turned, sliced)


def test_swiglu_halves_the_columns(device: str) -> None:
    made: dict[str, Any] = {"device": device, "dtype": torch.float64}
    a, b, bias, residual = (torch.randn(*size, **made) for size in ((3, 8), (8, 10), (10,), (3, 5)))
    a.requires_grad_()
    gate, up = (a @ b + bias).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up + residual
    found = matmul(a, b, bias, residual, activation="swiglu")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), a)[0] for y in (found, expected)))
    assert "swiglu" in MATMUL.plan(a, b, bias, residual, "swiglu").reason
    with pytest.raises(BadInput, match="halves the columns"):
        matmul(a, b[:, :9], activation="swiglu")


@pytest.mark.parametrize("provider", ("tensor_core", "skinny"))
def test_fp32_keeps_what_additions_lose(provider: str, device: str) -> None:
    """Blocks of k whose sums are 2**24, then ones, which fp32 cannot add to it, then -2**24: the ones are left."""
    a, b = torch.zeros(4, 32 * 10, device=device), torch.ones(32 * 10, 5, device=device)
    a[:, ::32] = torch.tensor([2.0**24, *[1.0] * 8, -(2.0**24)], device=device)
    assert torch.equal(MATMUL.providers[provider].launch(a, b), torch.full((4, 5), 8.0, device=device))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("provider", LADDER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_at_odd_sizes_and_layouts(
    dtype: str, provider: str, m: int, n: int, k: int, layout: Callable[..., Any], device: str
) -> None:
    step = MATMUL.providers[provider]

    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        inputs = layout(m, n, k, dtype=getattr(torch, dtype), device=device)
        if reason := step.why_not(*inputs):
            pytest.skip(reason)
        return correct.forward_errors(step.launch, reference, inputs)

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.parametrize("has", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("provider", LADDER)
def test_what_follows_a_product(provider: str, activation: str, has: tuple[bool, bool], device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        made: dict[str, Any] = {"dtype": torch.float16, "device": device}
        a, b = along_k(19, 24, 40, **made)
        bias, residual = torch.randn(24, **made), torch.randn(19, 24, **made)
        more = (bias if has[0] else None, residual if has[1] else None)

        def ours(*given: Any) -> Any:
            return MATMUL.providers[provider].launch(*given, *more, activation)

        def theirs(*given: Any) -> Any:
            own = [None if x is None else x.to(given[0].dtype) for x in more]
            return reference(*given, *own, activation)

        return correct.forward_errors(ours, theirs, (a, b))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.parametrize("provider", [name for name in LADDER if name != "skinny"])
def test_batches_of_products(provider: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        a, b = torch.randn(2, 3, 20, 33, device=device), torch.randn(2, 3, 33, 18, device=device)
        return correct.forward_errors(MATMUL.providers[provider].launch, reference, (a, b))

    error = correct.settled(draw)
    assert error.ok, error


def test_leading_dimensions_that_are_no_one_dimension_are_copied(device: str) -> None:
    a, b = torch.randn(4, 6, 5, 32, device=device)[:, :3].transpose(0, 1), torch.randn(3, 4, 32, 8, device=device)
    assert product_of(a, b) is None
    plan = MATMUL.plan(a, b)
    assert {"a", "b"} <= set(plan.copies) or HAS_GPU
    error = correct.settled(lambda seed: correct.forward_errors(MATMUL.launch, reference, (a, b)))
    assert error.ok, error


def test_gradients_are_as_right_as_pytorchs(device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        inputs = (
            torch.randn(2, 9, 20, device=device), torch.randn(24, 20, device=device).T,
            torch.randn(24, device=device), torch.randn(2, 9, 24, device=device),
        )  # fmt: skip
        grads = torch.randn(2, 9, 24, device=device)

        def ours(grad: Any, *given: Any) -> Any:
            return correct.gradients(lambda a, b, bias, residual: matmul(a, b, bias, residual), given, grad)

        return correct.backward_errors(ours, reference, inputs, grads)

    error = correct.settled(draw)
    assert error.ok, error


def test_a_gradient_that_nobody_wants_is_not_computed(device: str) -> None:
    x, weight = torch.randn(8, 16, device=device, requires_grad=True), torch.randn(12, 16, device=device)
    y = matmul(x, weight.T)
    with watching() as steps:
        y.sum().backward()
    assert x.grad is not None and (HAS_GPU or len({step.grid for step in steps}) == 1)


@pytest.mark.skipif(HAS_GPU, reason="there cuBLAS takes it")
def test_an_activations_gradient_is_pytorchs(device: str) -> None:
    x, weight = torch.randn(8, 16, device=device, requires_grad=True), torch.randn(12, 16, device=device)
    assert "gradient" in family._matmul.decide(x, weight.T, None, None, "gelu", False).reason
    ours = torch.autograd.grad(matmul(x, weight.T, activation="gelu").sum(), x)
    assert torch.equal(ours[0], torch.autograd.grad(torch.nn.functional.gelu(x @ weight.T).sum(), x)[0])


def test_few_rows_give_the_same_bits_every_time(device: str) -> None:
    a, b = along_k(5, 40, 4111, dtype=torch.float16, device=device)
    plan = plan_by("skinny", a, b, None, None, "none", False)
    assert plan.buffers["parts"].shape[0] > 1 and plan.kernel == "_rows_kernel, _add_parts_kernel"
    launch = MATMUL.providers["skinny"].launch
    assert torch.equal(launch(a, b), launch(a, b))


@pytest.mark.parametrize("shared_bytes", [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])  # MI300X, RTX, A100, H200
def test_few_rows_fit_every_gpus_shared_memory(shared_bytes: int) -> None:
    token = PRETEND.set(Facts(capability=80, shared_bytes=shared_bytes))
    try:
        for m, n in ((16, 64), (32, 64), (64, 64), (64, 96 * 128)):
            a, b = along_k(m, n, 256, dtype=torch.float16, device="cpu")
            c = plan_by("skinny", a, b, None, None, "none", False).steps[0].constants
            held_bytes = (c["num_stages"] - (shared_bytes == 64 * 1024)) * (c["BM"] + c["BN"]) * c["BK"] * 2
            assert held_bytes <= shared_bytes, f"{m} x {n}: {c}"  # AMD's pipeline holds one stage in registers
            assert shared_bytes < 227 * 1024 or c["num_stages"] == 4
    finally:
        PRETEND.reset(token)


@pytest.mark.parametrize("dtype", DTYPES if HAS_GPU else ("float16",))  # numpy's fp32 bits depend on a row's place
def test_a_row_has_the_same_bits_in_any_batch(dtype: str, device: str) -> None:
    """Forward and its gradient; 700 rows take other tiles than one where nobody asks."""
    many = 700 if HAS_GPU else 140
    made: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    a, b = along_k(many, 72, 136, **made)
    a.requires_grad_()
    dc = torch.randn(many, 72, **made)

    def with_gradient(rows: Any, dc: Any) -> tuple[Any, Any]:
        c = matmul(rows, b, batch_invariant=True)
        return c, torch.autograd.grad(c, rows, dc)[0]

    whole = with_gradient(a, dc)
    # in the interpreter rows at the same place of their tile: numpy's bits depend on that
    for first, last in ((0, 1), (128, 140), *([(683, 700)] if HAS_GPU else [])):
        part = with_gradient(a[first:last].detach().requires_grad_(), dc[first:last])
        assert all(torch.equal(one[first:last], other) for one, other in zip(whole, part, strict=True))
    error = correct.settled(
        lambda seed: correct.forward_errors(
            lambda *given: matmul(*given, batch_invariant=True), reference, (a.detach()[:20], b)
        )
    )
    assert error.ok, error


def test_what_no_kernel_of_ours_takes_is_not_called_invariant(device: str) -> None:
    a, b = along_k(4, 5, 6, device=device)
    with pytest.raises(BadInput, match="batch_invariant=True needs our kernel"):
        matmul(a.double(), b.double(), batch_invariant=True)
    with pytest.raises(BadInput, match="broadcasts a bias"):
        matmul(a, b, torch.zeros(1, 5, device=device), batch_invariant=True)
    assert matmul(a[:0], b, batch_invariant=True).shape == (0, 5)


@pytest.mark.skipif(HAS_GPU, reason="fills buffers on the CPU")
def test_what_lies_behind_an_aligned_row_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = along_n(20, 16, 21, dtype=torch.float16)
    plan = plan_by("persistent", a, b, None, None, "none", False)
    assert plan.kernel == "_align_kernel, _persistent_kernel" and plan.buffers["a_aligned"].shape == (20, 24)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(math.nan))
    assert torch.isfinite(MATMUL.providers["persistent"].launch(a, b)).all()


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        (90, torch.bfloat16, "_persistent_kernel"),
        (90, torch.float32, "_every_tile_kernel"),
        (80, torch.bfloat16, "_every_tile_kernel"),
    ],
)
def test_hoppers_copy_engine_is_for_hopper_and_16_bits(capability: int, dtype: Any, kernel: str) -> None:
    token = PRETEND.set(Facts(capability=capability))
    try:
        a, b = along_k(128, 64, 64, dtype=dtype)
        assert plan_by("persistent", a, b, None, None, "none", False).kernel == kernel
    finally:
        PRETEND.reset(token)


def test_fp32_is_rounded_where_pytorch_is_told_to() -> None:
    a, b = along_k(128, 64, 64)
    by_precision = {
        tf32: plan_by("swizzled", a, b, None, None, "none", tf32).steps[0].constants["PRECISION"]
        for tf32 in (False, True)
    }
    assert by_precision == {False: "ieee", True: "tf32"}


@pytest.mark.parametrize(
    ("a", "b", "product"),
    [
        (torch.empty(4, 6), torch.empty(6, 5), Product(4, 5, 6, 6, 1, 5, 1)),
        (torch.empty(2, 4, 6), torch.empty(5, 6).T, Product(8, 5, 6, 6, 1, 1, 6)),
        (torch.empty(2, 4, 6), torch.empty(2, 6, 5), Product(4, 5, 6, 6, 1, 5, 1, 2, 24, 30)),
        (torch.empty(4, 2, 6).transpose(0, 1), torch.empty(6, 5), None),
    ],
)
def test_sizes_and_strides(a: Any, b: Any, product: Product | None) -> None:
    assert product_of(a, b) == product


def test_the_tile_leaves_no_multiprocessor_without_work() -> None:
    gpu = Facts()
    assert persistent_tile(8192, 8192, gpu).bm == 128 and persistent_tile(8192, 8192, gpu).bn == 256
    assert persistent_tile(512, 4096, gpu).count(512, 4096) > 64  # of 128 x 256 there would be 64, for 132


def test_bad_input_is_refused_in_one_line(device: str) -> None:
    a, b = along_k(4, 5, 6, device=device)
    with pytest.raises(BadInput, match=r"unknown activation 'gelo': .*gelu"):
        matmul(a, b, activation="gelo")
    with pytest.raises(RuntimeError, match="4x6 and 4x6"):
        matmul(a, a)
    with pytest.raises(RuntimeError):
        matmul(a, b, torch.zeros(4, device=device))
    assert matmul(a[:0], b).shape == (0, 5) and matmul(a[:, :0], b[:0]).abs().max() == 0


def test_a_bias_of_another_data_type_is_added_as_a_residual_is(device: str) -> None:
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    a, b, bias = torch.randn(4, 8, **made), torch.randn(3, 8, **made).T, torch.randn(3, device=device)
    assert torch.equal(matmul(a, b, bias), a @ b + bias)
    for k in (8, 0):
        assert matmul(a[:, :k], b[:k], bias).dtype == matmul(a[:, :k], b[:k], None, bias.expand(4, 3)).dtype
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):  # a layer's, as a layer has it there
        expected = torch.nn.functional.linear(a, b.T, bias)
        assert torch.equal(matmul(a, b, bias), expected) and matmul(a, b, bias).dtype == expected.dtype


def test_where_it_need_not_be_the_same_every_time_parts_are_added_as_they_come(device: str) -> None:
    """k = 4100 is split in three, the last part shorter; bias, activation and residual follow the whole sum."""
    made: dict[str, Any] = {"dtype": torch.float16, "device": device}

    def ours(*given: Any) -> Any:
        return matmul(*given, activation="gelu", deterministic=False)

    def theirs(*given: Any) -> Any:
        return reference(*given, "gelu")

    def draw(seed: int) -> list[correct.Error]:
        torch.manual_seed(seed)
        inputs = (torch.randn(3, 4100, **made), torch.randn(40, 4100, **made).T)
        return correct.forward_errors(ours, theirs, (*inputs, torch.randn(40, **made), torch.randn(3, 40, **made)))

    assert correct.settled(draw).ok
    a, b = torch.randn(3, 4100, **made), torch.randn(40, 4100, **made).T
    plan = plan_by("atomic", a, b, None, None, "none", False)
    assert plan.buffers["parts"].shape == (1, 3, 40) and plan.buffers["parts"].is_zero and plan.steps[0].grid[1] == 3
    with pytest.raises(BadInput, match="exclude each other"):
        matmul(a, b, batch_invariant=True, deterministic=False)
    assert matmul(a[:0], b, deterministic=False).shape == (0, 40)


class OnGpu(torch.Tensor):
    """As far as a plan can see."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(("op", "provider"), [("_matmul", "torch"), ("_invariant", "invariant"), ("_atomic", "atomic")])
def test_the_hosts_time_never_sends_promised_bits_to_cublas(
    op: str, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small eager call is PyTorch's where that costs the host less, but not where its bits were promised."""
    monkeypatch.setattr(native.State, "module", None)
    monkeypatch.setattr(call, "SMALL_BYTES", 80e6)  # a test's calls are ours otherwise
    a, b = torch.zeros(2, 16).as_subclass(OnGpu), torch.zeros(16, 8).as_subclass(OnGpu)
    way = "skinny" if op == "_matmul" else provider
    plan = plan_by(way, torch.zeros(2, 16), torch.zeros(16, 8), None, None, "none", False)
    assert call.hosted(getattr(family, op), plan, (a, b)).provider == provider
