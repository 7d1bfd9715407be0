"""Every step of the ladder against float64, by the rule: masks, caps, shared heads, odd lengths, strides, gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.attention import attention, launch_backward, plan, reference
from sublight.ops.attention.ladder import WAYS, why_not
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.reference import attend_with_lse, in_step

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")  # the interpreter's bf16 is wrong
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "causal window": {"causal": True, "window": 20},
    "capped": {"causal": True, "softcap": 5.0},
    "scaled": {"scale": 0.7},
}
SIZES = {  # batch, heads, kv_heads, q_len, kv_len, head_dim: the interpreter's tiles are 16 x 32
    "one query": (2, 4, 1, 1, 33, 16),
    "equal": (1, 2, 2, 33, 33, 16),
    "more keys": (1, 4, 2, 17, 50, 24),
    "more queries": (1, 2, 1, 34, 17, 16),
}
TAKEN = tuple(name for name in WAYS if HAS_GPU or name != "hopper")  # Gluon is not interpreted
CASES = [  # the sizes take turns: together every mask meets every one
    pytest.param(sizes, mask, provider, dtype, id=f"{sizes}-{mask}-{provider}-{dtype}")
    for i, provider in enumerate(TAKEN)
    for j, mask in enumerate(MASKS)
    for n, dtype in enumerate(DTYPES)
    for m, sizes in enumerate(SIZES)
    if HAS_GPU or (i + j + 2 * n + m) % 4 == 0
]
LONG = ((1, 2, 1, 129, 127, 16), (1, 1, 1, 127, 129, 80), (1, 16, 1, 3, 129, 96), (1, 1, 1, 18, 40, 192))
LONG_ON_GPU = ((2, 4, 1, 1000, 1000, 128), (1, 4, 2, 129, 1000, 64), (1, 2, 2, 1000, 129, 256), (2, 8, 8, 17, 17, 40))
LONG_CASES = [
    pytest.param(sizes, mask, provider, dtype, id=f"{'x'.join(map(str, sizes))}-{mask}-{provider}-{dtype}")
    for i, sizes in enumerate(LONG + LONG_ON_GPU if HAS_GPU else LONG)
    for j, mask in enumerate(("causal", "window", "full"))
    for provider in TAKEN
    for n, dtype in enumerate(DTYPES)
    if HAS_GPU or (provider == "flash" and (i + j + n) % 2 == 0 and mask != "full")
]
EACH_WAY = pytest.mark.parametrize("provider", [name for name in TAKEN if name != "hopper"])


def tensors(sizes: tuple[int, ...], dtype: str, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v and a gradient of the result."""
    batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, dtype))

    q, dout = (random(batch, heads, q_len, head_dim) for _ in range(2))
    k, v = (random(batch, kv_heads, kv_len, head_dim) for _ in range(2))
    return q, k, v, dout


def check(sizes: tuple[int, ...], options: dict[str, Any], provider: str, dtype: str, device: str) -> None:
    """Values and every gradient by the rule."""
    q, k, v, _ = tensors(sizes, dtype, device)
    if reason := why_not(provider, q, k, v, window=options.get("window", 0), softcap=options.get("softcap", 0.0)):
        pytest.skip(f"{provider}: {reason}")

    def draw(seed: int) -> list[correct.Error]:
        q, k, v, dout = tensors(sizes, dtype, device, seed)

        def theirs(*x: torch.Tensor) -> torch.Tensor:
            return reference(*x, **options)

        return [
            *correct.forward_errors(lambda *x: attention(*x, provider=provider, **options), theirs, (q, k, v)),
            *correct.backward_errors(
                lambda *x: launch_backward(*x, provider=provider, **options), theirs, (q, k, v), dout
            ),
        ]

    few = sizes[0] * sizes[1] * sizes[3] < 16  # queries: of one sharp score the error is luck, and needs many draws
    error = correct.settled(draw, times=64 if few else 16)
    assert error.ok, error


@pytest.mark.gpu_seconds(1.5)
@pytest.mark.parametrize(("sizes", "mask", "provider", "dtype"), CASES)
def test_right_by_the_rule(sizes: str, mask: str, provider: str, dtype: str, device: str) -> None:
    check(SIZES[sizes], MASKS[mask], provider, dtype, device)


@pytest.mark.gpu_seconds(4)
@pytest.mark.parametrize(("sizes", "mask", "provider", "dtype"), LONG_CASES)
def test_right_past_a_tile(sizes: tuple[int, ...], mask: str, provider: str, dtype: str, device: str) -> None:
    check(sizes, MASKS[mask], provider, dtype, device)


@EACH_WAY
def test_gradients_are_as_good_as_the_compositions_where_one_weight_is_nearly_all(provider: str, device: str) -> None:
    """The gradient of a score is then a small difference: dweight and what is subtracted have to err alike."""

    def theirs(*x: torch.Tensor) -> torch.Tensor:
        return attend_with_lse(*x, Mask(causal=False, window=0), 0.0, 1.0)[0]

    def draw(seed: int) -> list[correct.Error]:
        q, k, v, dout = tensors((2, 2, 2, 16, 33, 16), "float32", device, seed)
        q, k = q.round(), k.round()  # scores and dweights are exact, in whatever order they are added up
        v, dout = ((x * 8).round() / 8 for x in (v, dout))
        call = partial(launch_backward, provider=provider, scale=1.0)
        return correct.backward_errors(call, theirs, (q, k, v), dout)

    error = correct.settled(draw, draws=4, times=1)
    assert error.ok, error


@EACH_WAY
def test_the_logarithm_of_the_sums_comes_out_and_has_a_gradient(provider: str, device: str) -> None:
    sizes = (1, 2, 1, 8, 5, 16)  # the first three queries see nothing

    def ours(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(*x, causal=True, provider=provider, return_lse=True)
        return out, lse[:, :, 3:]

    def theirs(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend_with_lse(*x, Mask(causal=True, window=0), 0.0, 0.25)
        return out, lse[:, :, 3:]

    def draw(seed: int) -> list[correct.Error]:
        x = tensors(sizes, "float32", device, seed)[:3]
        grads = correct.random_grads(theirs, x, seed=seed)
        backward = correct.backward_errors(lambda *all_: correct.gradients(ours, all_[2:], all_[:2]), theirs, x, grads)
        return [*correct.forward_errors(ours, theirs, x), *backward]

    error = correct.settled(draw, times=16)
    assert error.ok, error


@EACH_WAY
def test_a_query_that_sees_nothing_gets_zeros(provider: str, device: str) -> None:
    q, k, v, dout = tensors((1, 1, 1, 20, 3, 16), "float32", device)
    out, lse = attention(q, k, v, causal=True, provider=provider, return_lse=True)
    dq, dk, dv = launch_backward(dout, q, k, v, causal=True, provider=provider)
    assert (out[:, :, :17] == 0).all() and (dq[:, :, :17] == 0).all()
    assert (lse[:, :, :17] == -math.inf).all() and lse[:, :, 17:].isfinite().all()
    assert dk.isfinite().all() and dv.isfinite().all()
    assert torch.equal(attention(q, k, v, causal=True)[:, :, :17], out[:, :, :17])  # PyTorch's way as well


def test_the_last_query_stands_at_the_last_key(device: str) -> None:
    """Where PyTorch's is_causal would let the first query see the first key alone."""
    q, k, v, _ = tensors((1, 1, 1, 2, 40, 16), "float32", device)
    changed = v.clone()
    changed[:, :, 39] = 7.0  # hidden from the first of two queries, seen by the second
    for provider in ("", *TAKEN[:2], "flash"):
        one, other = (attention(q, k, x, causal=True, provider=provider) for x in (v, changed))
        assert torch.equal(one[:, :, 0], other[:, :, 0]) and not torch.equal(one[:, :, 1], other[:, :, 1])


@EACH_WAY
def test_tensors_may_lie_anyhow(provider: str, device: str) -> None:
    q, k, v, dout = tensors((2, 2, 1, 3, 20, 16), "float32", device)
    expected = attention(q, k, v, causal=True, provider=provider)
    gradients = launch_backward(dout, q, k, v, causal=True, provider=provider)

    def heads_inside(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def gapped(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x, math.nan)], 3)[..., : x.shape[3]]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.mT.contiguous().mT

    for moved in (heads_inside, gapped, turned):
        out = attention(*map(moved, (q, k, v)), causal=True, provider=provider)
        assert torch.equal(out, expected)
        found = launch_backward(*map(moved, (dout, q, k, v)), causal=True, provider=provider)
        assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))
    assert attention(*map(heads_inside, (q, k, v)), provider=provider).transpose(1, 2).is_contiguous()


@EACH_WAY
def test_what_lies_behind_a_mask_changes_nothing(provider: str, device: str) -> None:
    q, k, v, dout = tensors((1, 1, 1, 17, 40, 16), "float32", device)
    expected = attention(q, k, v, causal=True, window=6, provider=provider)
    gradients = launch_backward(dout, q, k, v, causal=True, window=6, provider=provider)
    k, v = k.clone(), v.clone()
    k[:, :, :18], v[:, :, :18] = 9.0, 9.0  # the first query stands at 23 and sees from 18 on
    assert torch.equal(attention(q, k, v, causal=True, window=6, provider=provider), expected)
    dq, dk, dv = launch_backward(dout, q, k, v, causal=True, window=6, provider=provider)
    assert torch.equal(dq, gradients[0]) and torch.equal(dk[:, :, 18:], gradients[1][:, :, 18:])
    assert (dk[:, :, :18] == 0).all() and (dv[:, :, :18] == 0).all()


def test_a_batch_entry_does_not_depend_on_the_others(device: str) -> None:
    q, k, v, _ = tensors((3, 4, 2, 40, 40, 16), "float16", device)
    together = attention(q, k, v, causal=True, provider="flash")
    for entry in range(3):
        alone = attention(*(x[entry : entry + 1] for x in (q, k, v)), causal=True, provider="flash")
        assert torch.equal(alone, together[entry : entry + 1])


def test_the_plan_says_who_runs_and_why(device: str) -> None:
    q, k, v, _ = tensors((1, 2, 1, 17, 17, 16), "float32", device)
    assert plan(q, k, v).provider == "torch" and "in 16 bits alone" in plan(q, k, v).reason
    halves = [x.half() for x in (q, k, v)]
    assert plan(*halves, causal=True).provider == "torch" and "cuDNN's" in plan(*halves, causal=True).reason
    for options in ({"window": 4}, {"softcap": 30.0}, {"return_lse": True}):  # which PyTorch has no fused kernel for
        assert plan(*halves, causal=True, **options).provider == "flash", options
    assert plan(halves[0][:, :, :5], *halves[1:], causal=True).provider == "flash"
    for provider in (*TAKEN[:2], "flash"):
        found = plan(q, k, v, provider=provider)
        with watching() as steps:
            attention(q, k, v, provider=provider)
        assert found.provider == provider and found.kernel == ", ".join(dict.fromkeys(step.name for step in steps))
    with watching() as steps:
        attention(q, k, v)
    assert not steps
    odd = torch.zeros(1, 2, 17, 20, device=device)
    assert "multiples of 8" in plan(odd, odd, odd).reason


X = torch.zeros(1, 4, 8, 16)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((X, X[:, :3], X[:, :3]), {}, "must divide"),
        ((X[0], X, X), {}, "4, \\(batch"),
        ((X, X, X[:, :, :4]), {}, "do not fit"),
        ((X, X.half(), X), {}, "make them alike"),
        ((X.int(), X.int(), X.int()), {}, "floating-point"),
        ((X, X, X), {"provider": "flsh"}, "flash"),
        ((X, X, X), {"window": 0}, "from 1 on"),
        ((X, X, X), {"window": 2.5}, "whole number of keys"),
        ((X, X, X), {"softcap": math.nan}, "softcap nan: use a positive number"),
        ((X, X, X), {"scale": "x"}, "scale 'x': use a number"),
        ((X, [1.0], X), {}, "k is list: use a torch.Tensor"),
        ((X, X, X), {"dropout": 0.1, "seed": "7"}, "seed is str: use a whole number"),
        ((X, X, X), {"causal": True, "prefix": -1}, "prefix -1: use the number of keys"),
        ((X[..., :12], X[..., :12], X[..., :12]), {"provider": "flash"}, "leave provider out"),
        ((X, X, X), {"provider": "hopper"}, "leave provider out"),
    ],
)
def test_bad_input_gets_one_line(args: tuple[torch.Tensor, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        attention(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 40])
def test_masks_count_what_their_matrix_shows(causal: bool, window: int) -> None:
    mask = Mask(causal=causal, window=window)
    for q_len, kv_len in ((1, 1), (5, 3), (3, 5), (7, 7), (12, 4)):
        matrix = mask.matrix(q_len, kv_len, torch.device("cpu"))
        seen = torch.ones(q_len, kv_len, dtype=torch.bool) if matrix is None else matrix
        assert mask.blind(q_len, kv_len) == int((~seen.any(1)).sum())
        again = mask.needed(q_len, kv_len).matrix(q_len, kv_len, torch.device("cpu"))
        assert torch.equal(seen, torch.ones_like(seen) if again is None else again)


@EACH_WAY
def test_autograd_and_compile_take_a_named_step(provider: str, device: str) -> None:
    q, k, v, dout = tensors((1, 2, 1, 6, 8, 16), "float32", device)

    def call(*x: torch.Tensor) -> torch.Tensor:
        return attention(*x, causal=True, provider=provider)

    ours = correct.gradients(call, (q, k, v), dout)
    expected = launch_backward(dout, q, k, v, causal=True, provider=provider)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))
    again = correct.gradients(compiled, (q, k, v), dout)
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


def test_a_named_step_can_be_differentiated_twice(device: str) -> None:
    ours = partial(attention, causal=True, provider="flash")
    check_second_derivatives(ours, partial(reference, causal=True), (1, 2, 1, 5, 6, 16), device)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_without_keys_gradients_are_zeros(softcap: float, device: str) -> None:
    """As PyTorch's are, so that what is before in a network gets its gradient."""
    q, k, v = (torch.randn(1, 2, length, 16, device=device, requires_grad=True) for length in (3, 0, 0))
    out = attention(q, k, v, softcap=softcap)
    out.sum().backward()
    assert out.shape == q.shape and not out.any() and q.grad is not None and not q.grad.any()
    assert k.grad is not None and v.grad is not None and k.grad.shape == k.shape


def check_second_derivatives(ours: Any, theirs: Any, sizes: tuple[int, ...], device: str) -> None:
    def second(call: Any, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in x]
        # PyTorch's fused attention has no second derivative, its composition has
        with torch.enable_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    def draw(seed: int) -> list[correct.Error]:
        *x, _ = tensors(sizes, "float32", device, seed)
        return correct.forward_errors(partial(second, ours), partial(second, theirs), tuple(x))

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.parametrize("provider", ["online", "flash"])
def test_a_score_has_the_same_bits_in_every_pass_of_fp32(provider: str, device: str) -> None:
    """The compiler may not fuse a score's last product into the difference that follows, here but not there."""
    q, k, v, dout = tensors((1, 2, 1, 17, 33, 16), "float32", device)
    with watching() as steps:
        launch_backward(dout, q, k, v, provider=provider)
    assert len(steps) == 3 and all(step.constants["enable_fp_fusion"] is False for step in steps)
    with watching() as steps:
        launch_backward(*(x.half() for x in (dout, q, k, v)), provider=provider)
    assert all("enable_fp_fusion" not in step.constants for step in steps)


@pytest.mark.parametrize("provider", ["", "flash"])
def test_autocast_chooses_the_data_type_as_for_pytorchs_own(provider: str, device: str) -> None:
    """Keys that were turned in fp32 beside values in 16 bits are nothing to refuse there."""
    q, k, v, dout = tensors((1, 2, 1, 6, 8, 16), "float32", device)
    leaves = [x.requires_grad_() for x in (q, k, v.half())]
    with torch.autocast(device, torch.float16):
        out = attention(*leaves, causal=True, provider=provider)
    assert out.dtype == torch.float16
    grads = torch.autograd.grad(out, leaves, dout.half())
    assert [x.dtype for x in grads] == [torch.float32, torch.float32, torch.float16]
    halves = [x.detach().half() for x in leaves]
    assert torch.equal(out, attention(*halves, causal=True, provider=provider))
    with pytest.raises(BadInput, match="make them alike"):
        attention(*leaves, causal=True, provider=provider)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_read_as_bf16(kind: Any) -> None:
    q, k, v = (torch.randn(1, 2, 5, 16).to(kind) for _ in range(3))
    out = attention(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(*(x.to(torch.bfloat16) for x in (q, k, v)), causal=True))


@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (2, 3, 5, 16)])
def test_pytorchs_kernels_get_rows_in_step(shape: tuple[int, ...]) -> None:
    room = torch.randn(*shape[:3], shape[3] + 3)
    apart = room[..., : shape[3]]
    got = in_step(apart)
    assert torch.equal(got, apart) and not any(stride % 4 for stride in got.stride()[:3])
    whole = apart.clone(memory_format=torch.contiguous_format)
    assert in_step(whole) is whole
    shifted = torch.randn(whole.numel() + 1)[1:].view(shape)  # cuDNN's kernels read it out of step, too
    assert torch.equal(in_step(shifted), shifted) and in_step(shifted).data_ptr() % 16 == 0
