"""The caller's own mask and score functions, and prefixes, by the rule; their derivatives by source and by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.jit import tl, triton
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.attention import attention, launch_backward, plan, reference
from sublight.ops.attention.attention_test import check_second_derivatives, tensors
from sublight.ops.attention.mod_slopes import slope_function
from sublight.ops.attention.mods import in_torch, mod_arguments, same_document
from sublight.ops.attention.packed_attention import packed_attention

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
SIZES = {"one query": (2, 2, 1, 1, 33, 16), "more keys": (2, 4, 2, 17, 35, 16), "more queries": (1, 2, 2, 34, 18, 24)}
FAR = tl.constexpr(9)


@triton.jit
def distant(score, batch, head, query, key):
    """A bias by distance, steeper for later heads, hidden past some distance."""
    distance = tl.abs(query - key).to(tl.float32)
    score -= distance * (head + 1) * 0.05
    return tl.where(distance < FAR, score, -float("inf"))


@triton.jit
def curved(score, batch, head, query, key, bias_ptr):
    bias = tl.load(bias_ptr + head)
    bounded = 3.0 * score / (1.0 + tl.abs(score))
    warm = bounded * tl.sigmoid(bias * bounded)
    return warm + tl.maximum(0.5 * score, bias) - tl.exp(-0.1 * score) / 2.0


@triton.jit
def odd_heads_see_odd_keys(batch, head, query, key):
    return ((head + key + batch) % 2 == 0) & (query != 3)  # the fourth query sees nothing


def documents(device: str) -> torch.Tensor:
    return torch.arange(40, device=device) // 7


def options_of(name: str, sizes: tuple[int, ...], device: str) -> dict[str, Any]:
    batch, heads = sizes[:2]
    bias = torch.linspace(-0.5, 0.5, heads, device=device)
    return {
        "distant": {"score_mod": distant, "causal": True},
        "curved": {"score_mod": curved, "mod_tensors": (bias,), "window": 12},
        "documents": {"mask_mod": same_document, "mod_tensors": (documents(device),), "causal": True},
        "both": {"mask_mod": odd_heads_see_odd_keys, "score_mod": distant, "softcap": 4.0},
        "prefix": {"causal": True, "prefix": torch.tensor([5, 19][:batch], device=device)},
        "prefix and function": {"causal": True, "prefix": 30, "score_mod": distant},
    }[name]


NAMES = ("distant", "curved", "documents", "both", "prefix", "prefix and function")
CASES = [
    pytest.param(sizes, name, dtype, id=f"{sizes}-{name}-{dtype}")
    for i, sizes in enumerate(SIZES)
    for j, name in enumerate(NAMES)
    for n, dtype in enumerate(DTYPES)
    if HAS_GPU or (i + j + n) % 3 == 0
]


@pytest.mark.gpu_seconds(4)
@pytest.mark.parametrize(("sizes", "name", "dtype"), CASES)
def test_right_by_the_rule(sizes: str, name: str, dtype: str, device: str) -> None:
    options = options_of(name, SIZES[sizes], device)

    def draw(seed: int) -> list[correct.Error]:
        *x, dout = tensors(SIZES[sizes], dtype, device, seed)

        def theirs(*x: Any) -> Any:
            return reference(*x, **options)

        def backward(*x: Any) -> Any:
            return launch_backward(*x, **options)[:3]

        return [
            *correct.forward_errors(lambda *x: attention(*x, provider="flash", **options), theirs, tuple(x)),
            *correct.backward_errors(backward, theirs, tuple(x), dout),
        ]

    error = correct.settled(draw, times=64)
    assert error.ok, error


def test_a_prefix_is_what_a_mask_function_says(device: str) -> None:
    def draw(seed: int, prefix: int, **same: Any) -> list[correct.Error]:
        *x, dout = tensors((1, 2, 1, 40, 40, 16), "float32", device, seed)

        def ours(*x: Any) -> Any:
            return attention(*x, causal=True, prefix=prefix, provider="flash")

        def backward(dout: Any, *x: Any) -> Any:
            return correct.gradients(ours, x, dout)

        theirs = partial(reference, **same)
        inputs = tuple(x)
        return [
            *correct.forward_errors(ours, theirs, inputs),
            *correct.backward_errors(backward, theirs, inputs, dout),
        ]

    for prefix, same in ((18, {"mask_mod": before_18_or_behind}), (99, {})):
        error = correct.settled(partial(draw, prefix=prefix, **same))
        assert error.ok, f"{prefix}: {error}"
    *x, _ = tensors((1, 2, 1, 40, 40, 16), "float32", device)
    plain = attention(*x, causal=True, provider="flash")
    assert torch.equal(attention(*x, causal=True, prefix=0, provider="flash"), plain)


@triton.jit
def before_18_or_behind(batch, head, query, key):
    return (key < 18) | (key <= query)


def test_packed_sequences_have_the_bits_of_a_batch(device: str) -> None:
    q, k, v, _ = tensors((3, 2, 1, 5, 5, 16), "float32", device)
    flat = [x.transpose(1, 2).reshape(15, -1, 16) for x in (q, k, v)]
    starts = torch.tensor([0, 5, 10, 15], device=device)
    prefixes = torch.tensor([0, 2, 9], device=device)
    for options in (
        {"mask_mod": odd_heads_see_odd_keys, "score_mod": distant, "causal": True},
        {"prefix": prefixes, "causal": True},
    ):
        together = attention(q, k, v, provider="flash", **options).transpose(1, 2).reshape(15, 2, 16)
        assert torch.equal(packed_attention(*flat, starts, provider="flash", **options), together)


@pytest.mark.parametrize("function", [distant, curved])
def test_the_derivative_of_the_source_is_the_compositions(function: Any) -> None:
    bias = torch.tensor([0.3, -0.6])

    def slope(score: torch.Tensor) -> torch.Tensor:
        rest = mod_arguments(1, 2, 6, 7, (bias,) if function is curved else (), score.device)
        return in_torch(slope_function(function), score)(score, *rest).expand_as(score)

    def composition(score: torch.Tensor) -> torch.Tensor:
        rest = mod_arguments(1, 2, 6, 7, (bias,) if function is curved else (), score.device)
        with torch.enable_grad():
            leaf = score.detach().requires_grad_()
            return torch.autograd.grad(in_torch(function, leaf)(leaf, *rest).nan_to_num(neginf=0).sum(), leaf)[0]

    def draw(seed: int) -> list[correct.Error]:
        score = torch.randn(1, 2, 6, 7, generator=torch.Generator().manual_seed(seed))
        return correct.forward_errors(slope, composition, (score,))

    error = correct.settled(draw)
    assert error.ok, error


@triton.jit
def looped(score, batch, head, query, key):
    for _ in range(2):
        score = score * 0.5
    return score


@triton.jit
def quarter(score, batch, head, query, key):
    return score * 0.0 + 0.25


def test_a_function_beyond_the_rules_is_refused_before_a_launch_unless_it_has_a_derivative(device: str) -> None:
    q, k, v, _ = tensors((1, 2, 1, 5, 6, 16), "float32", device)
    attention(q, k, v, score_mod=looped, provider="flash")  # without a gradient it needs none
    leaf = q.clone().requires_grad_()
    with pytest.raises(BadInput, match=r"looped cannot be differentiated here .* give score_mod_grad=") as caught:
        attention(leaf, k, v, score_mod=looped, provider="flash")
    assert "\n" not in str(caught.value)

    def backward(dout: Any, *x: Any) -> Any:
        def call(*x: Any) -> Any:
            return attention(*x, score_mod=looped, score_mod_grad=quarter, provider="flash")

        return correct.gradients(call, x, dout)

    def draw(seed: int) -> list[correct.Error]:
        *x, dout = tensors((1, 2, 1, 5, 6, 16), "float32", device, seed)
        return correct.backward_errors(backward, partial(reference, scale=0.0625), tuple(x), dout)

    error = correct.settled(draw)
    assert error.ok, error


def test_compiled_and_twice_differentiated(device: str) -> None:
    q, k, v, dout = tensors((1, 2, 1, 6, 8, 16), "float32", device)

    def call(*x: torch.Tensor) -> torch.Tensor:
        return attention(*x, score_mod=distant, causal=True, provider="flash")

    expected = correct.gradients(call, (q, k, v), dout)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")  # a kernel as an argument breaks the graph
    again = correct.gradients(compiled, (q, k, v), dout)
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))

    theirs = partial(reference, score_mod=distant, causal=True)
    check_second_derivatives(call, theirs, (1, 2, 1, 6, 8, 16), device)


def test_the_plan_names_flash_and_others_refuse(device: str) -> None:
    q, k, v, _ = tensors((1, 2, 1, 4, 6, 16), "float32", device)
    assert plan(q, k, v, score_mod=distant).provider == "flash"
    with pytest.raises(BadInput, match="flash alone has own functions"):
        attention(q, k, v, mask_mod=odd_heads_see_odd_keys, provider="online")


X = torch.zeros(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score_mod": lambda score, *rest: score}, "score_mod is function: use a function under @triton.jit"),
        ({"prefix": 3}, "prefix goes with causal=True"),
        ({"prefix": 3, "causal": True, "window": 4}, "without a window"),
        ({"prefix": torch.zeros(3, dtype=torch.int32), "causal": True}, "use a number, or int32 \\(2,\\)"),
        ({"mod_tensors": (X,)}, "would not be read"),
        ({"score_mod": distant, "mod_tensors": (X, X, X)}, "2 at most"),
        ({"score_mod": distant, "mod_tensors": (X.mT,)}, "use one piece"),
        ({"score_mod_grad": distant}, "give both"),
    ],
)
def test_bad_input_gets_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        attention(X, X, X, **options)
    assert "\n" not in str(caught.value)
