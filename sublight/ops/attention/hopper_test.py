"""The step for one GPU: who takes which tile, when the plan goes to it, and its gradients where there is such a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend import device as devices
from sublight.backend.device import PRETEND, Facts
from sublight.conftest import HAS_GPU
from sublight.ops.attention import attention as calls
from sublight.ops.attention import hopper, ladder
from sublight.ops.attention.attention import attention, plan
from sublight.ops.attention.ladder import WAYS
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.parts import Sizes
from sublight.ops.attention.reference import attend_with_lse

H200 = Facts(capability=90, shared_bytes=232448, multiprocessors=132)
NEEDS_HOPPER = pytest.mark.skipif(not HAS_GPU, reason="Gluon is not interpreted: needs a Hopper GPU")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans are made as for an H200, with kernels that would be compiled."""
    for module in (devices, hopper):
        monkeypatch.setattr(module, "is_interpreted", lambda: False)
    monkeypatch.setattr(ladder, "_is_hopper", lambda: True)
    token = PRETEND.set(H200)
    yield
    PRETEND.reset(token)


def on_meta(batch: int, heads: int, length: int, head_dim: int) -> Any:
    return torch.empty(batch, heads, length, head_dim, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "length"), [(64, 4096), (64, 16384), (32, 8192), (3, 700), (128, 512), (7, 5000)])
def test_every_tile_is_dealt_out_once(heads: int, length: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = -(-length // hopper.QUERIES)
    programs, together, span = hopper.dealt(Sizes(1, heads, heads, length, length, 128), blocks, causal, 132)
    tiles = heads * blocks
    assert heads % together == 0 and tiles % span == 0 and span % min(span, together * blocks) == 0
    dealt = []
    for program in range(programs):
        stub = SimpleNamespace(
            num_programs=lambda axis: programs,
            program_id=lambda axis, program=program: program,
            where=lambda condition, a, b: a if condition else b,
        )
        monkeypatch.setattr(hopper, "gl", stub)
        for number in range(tiles // span * -(-span // programs)):
            index, is_there = hopper._index_of.fn(number, span)
            if is_there:
                dealt.append(index)
    assert sorted(dealt) == list(range(tiles))


@pytest.mark.usefixtures("pretend")
def test_the_plan_goes_where_an_h200_was_faster() -> None:
    q, half = on_meta(4, 16, 4096, 128), on_meta(4, 16, 4096, 64)
    for causal in (False, True):
        assert plan(q, q, q, causal=causal).provider == "hopper"
    assert plan(half, half, half, causal=True).provider == "hopper" and "1.03" in plan(q, q, q).reason
    for inputs, words in (
        ((half, half, half), "not faster"),
        ((on_meta(1, 8, 4096, 128),) * 3, "not faster"),
        ((on_meta(16, 16, 2048, 128),) * 3, "not faster"),
        ((q.clone().requires_grad_(), q, q), "with a gradient"),
    ):
        found = plan(*inputs)
        assert found.provider == "torch" and words in found.reason
    with torch.no_grad():
        assert plan(q.clone().requires_grad_(), q, q).provider == "hopper"
    assert plan(q, q, q, window=100).provider == "flash"


@pytest.mark.usefixtures("pretend")
def test_gradients_take_one_pass_where_the_copy_engine_reads_them() -> None:
    q = on_meta(1, 4, 300, 128)
    how = Mask(causal=True, window=0), 0.0, 0.1
    steps = WAYS["hopper"].backward(q, False, q, q, q, q, *how).steps
    assert [step.name for step in steps] == ["_begin_kernel", "_backward_kernel", "_end_kernel"]
    uneven = torch.empty(1, 4, 300, 129, dtype=torch.bfloat16, device="meta")[..., :128]
    assert WAYS["hopper"].backward(uneven, False, q, q, q, q, *how).provider == "flash"


@pytest.mark.parametrize(("is_asked", "expected"), [(False, "hopper"), (True, "flash")])
def test_gradients_that_must_not_depend_on_the_order_of_additions(
    is_asked: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(calls, "_backward", SimpleNamespace(call=lambda *args: taken.append(args[-1])))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_asked)
    x = torch.zeros(1, 1, 2, 4)
    calls._BackwardOf(results=1).call(x, x, x, x, x, x[..., 0], x, True, 0, 0.0, 1.0, "hopper")
    assert taken == [expected]


@NEEDS_HOPPER
@pytest.mark.parametrize("sizes", [(2, 4, 2, 300, 300, 128), (1, 4, 1, 200, 333, 64), (1, 2, 2, 333, 130, 128)])
def test_gradients_of_hopper_with_that_of_the_sums(sizes: tuple[int, ...], device: str) -> None:
    batch, heads, kv_heads, q_len, kv_len, head_dim = sizes

    def random(*shape: int) -> Any:  # heads inside of rows, as a projection leaves them
        batch, heads, rows, columns = shape
        return torch.randn(batch, rows, heads, columns, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, dout = (random(batch, heads, q_len, head_dim) for _ in range(2))
    k, v = (random(batch, kv_heads, kv_len, head_dim) for _ in range(2))
    dlse = torch.randn(batch, heads, q_len, device=device)
    if hopper.why_not(q, k, v, Mask(causal=True, window=0), 0.0, 0.1):
        pytest.skip("not a Hopper GPU")
    sees = torch.arange(q_len, device=device) + kv_len - q_len >= 0  # the others' sums are -inf

    def loss(out: Any, lse: Any) -> Any:
        return (out * dout.to(out.dtype)).sum() + torch.where(sees, lse * dlse.to(lse.dtype), 0.0).sum()

    def gradients(call: Any, dtype: Any) -> Any:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(loss(*call(*leaves)), leaves)

    mask, scale = Mask(causal=True, window=0), head_dim**-0.5
    ours = gradients(lambda *x: attention(*x, causal=True, provider="hopper", return_lse=True), torch.bfloat16)
    theirs = gradients(lambda *x: attend_with_lse(*x, mask, 0.0, scale), torch.bfloat16)
    truth = gradients(lambda *x: attend_with_lse(*x, mask, 0.0, scale), torch.float64)
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert (one - right).norm() <= 2 * (other - right).norm()
