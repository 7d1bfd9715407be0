"""ALiBi, sinks and dropout: by the rule with the same draws in both, gradients of sinks, refusals in one line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.attention import attention, launch_backward, plan, reference
from sublight.ops.attention.attention_test import tensors
from sublight.ops.attention.extended import NO_EXTRAS, composed
from sublight.ops.attention.extras import kept_by_torch
from sublight.ops.attention.packed_attention import packed_attention

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
SIZES = {"one query": (1, 2, 1, 1, 33, 16), "more keys": (1, 4, 2, 17, 35, 16), "more queries": (2, 2, 2, 18, 6, 24)}
EXTRAS = ("alibi", "sinks", "dropout", "all")


def extras(names: str, heads: int, device: str) -> dict[str, Any]:
    generator = torch.Generator(device=device).manual_seed(5)
    all_of: dict[str, dict[str, Any]] = {
        "alibi": {"alibi_slopes": 2.0 ** -torch.arange(1, heads + 1, device=device)},
        "sinks": {"sinks": torch.randn(heads, generator=generator, device=device)},
        "dropout": {"dropout": 0.3, "seed": torch.tensor([2**40 + 77], device=device)},
    }
    if names == "all":
        together = {key: value for each in all_of.values() for key, value in each.items()}
        return together | {"causal": True, "window": 9, "softcap": 3.0}
    return all_of[names] | {"causal": names != "dropout"}


@pytest.mark.gpu_seconds(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", EXTRAS)
@pytest.mark.parametrize("sizes", SIZES)
def test_right_by_the_rule(sizes: str, names: str, dtype: str, device: str) -> None:
    options = extras(names, SIZES[sizes][1], device)
    sinks = options.pop("sinks", None)

    def draw(seed: int) -> list[correct.Error]:
        *x, dout = tensors(SIZES[sizes], dtype, device, seed)
        inputs = (*x, sinks) if sinks is not None else tuple(x)

        def theirs(q: Any, k: Any, v: Any, sink: Any = None) -> Any:
            return reference(q, k, v, sinks=sink, **options)

        def ours(q: Any, k: Any, v: Any, sink: Any = None) -> Any:
            return attention(q, k, v, sinks=sink, provider="flash", **options)

        def backward(dout: Any, q: Any, k: Any, v: Any, sink: Any = None) -> Any:
            found = launch_backward(dout, q, k, v, sinks=sink, **options)
            return found if sink is not None else found[:3]

        return [
            *correct.forward_errors(ours, theirs, inputs),
            *correct.backward_errors(backward, theirs, inputs, dout),
        ]

    error = correct.settled(draw, times=64)  # a sink has one gradient a draw
    assert error.ok, error


def test_a_seed_draws_the_same_mask_everywhere_and_another_one_another(device: str) -> None:
    q, k, v, _ = tensors((2, 2, 1, 5, 40, 16), "float32", device)
    v = torch.eye(40, 16, device=device).expand(2, 1, 40, 16).contiguous()  # the result shows the weights
    call = partial(attention, q, k, v, dropout=0.4, provider="flash")
    assert torch.equal(call(seed=3), call(seed=3)) and not torch.equal(call(seed=3), call(seed=4))
    seed = torch.tensor([3], device=device)
    stays = kept_by_torch(seed, torch.arange(4, device=device), 5, 40, 0.4).view(2, 2, 5, 40)
    assert torch.equal(call(seed=seed) != 0, stays[..., :16])
    torch.manual_seed(1)
    one = call()
    other = call()
    torch.manual_seed(1)
    assert torch.equal(call(), one) and not torch.equal(one, other)


def test_a_weight_is_dropped_as_often_as_told_and_the_mean_stays() -> None:
    stays = kept_by_torch(torch.tensor([11]), torch.arange(40), 100, 100, 0.2)
    share = 1 - float(stays.double().mean())
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / stays.numel()) ** 0.5  # five standard deviations
    neighbours = (stays[:, :, 1:] == stays[:, :, :-1]).double().mean()
    assert abs(float(neighbours) - (0.2**2 + 0.8**2)) < 0.01


def test_packed_sequences_draw_what_a_batch_draws(device: str) -> None:
    q, k, v, _ = tensors((3, 2, 1, 5, 5, 16), "float32", device)
    options = extras("all", 2, device)
    flat = [x.transpose(1, 2).reshape(15, -1, 16) for x in (q, k, v)]
    starts = torch.tensor([0, 5, 10, 15], device=device)
    together = attention(q, k, v, provider="flash", **options).transpose(1, 2).reshape(15, 2, 16)
    assert torch.equal(packed_attention(*flat, starts, **options), together)


def test_autograd_reaches_sinks_and_lse(device: str) -> None:
    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attention(q, k, v, sinks=sinks, causal=True, provider="flash", return_lse=True)

    def theirs(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return composed(q, k, v, None, sinks, *NO_EXTRAS[2:], True, 0, 0.0, 0.25)

    def draw(seed: int) -> list[correct.Error]:
        x = (*tensors((1, 2, 1, 4, 6, 16), "float32", device, seed)[:3], torch.tensor([0.3, -1.0], device=device))
        grads = correct.random_grads(theirs, x, seed=seed)
        return correct.backward_errors(lambda *all_: correct.gradients(ours, all_[2:], all_[:2]), theirs, x, grads)

    error = correct.settled(draw, times=32)
    assert error.ok, error


def test_a_query_without_keys_still_has_its_sink(device: str) -> None:
    q, k, v, _ = tensors((1, 2, 1, 5, 4, 16), "float32", device)
    sinks = torch.tensor([0.5, -1.0], device=device)
    none = k[:, :, :0]
    _, lse = attention(q, none, none, sinks=sinks, return_lse=True)
    assert torch.equal(lse, sinks[None, :, None].expand_as(lse))
    starts, ends = (torch.tensor(each, device=device, dtype=torch.int32) for each in ((0, 3, 5), (0, 4, 4)))
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    _, lse = packed_attention(*flat, starts, ends, sinks=sinks, return_lse=True)
    assert torch.equal(lse[:, 3:], sinks[:, None].expand(2, 2))


def test_the_plan_names_flash_and_others_refuse(device: str) -> None:
    q, k, v, _ = tensors((1, 2, 1, 4, 6, 16), "float32", device)
    assert plan(q, k, v, dropout=0.1).provider == "flash"
    with pytest.raises(BadInput, match="flash alone has dropout"):
        attention(q, k, v, dropout=0.1, provider="naive")


X = torch.zeros(1, 4, 8, 16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes are .* use float32 \\(4,\\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks are"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "detach"),
        ({"dropout": -0.1}, "from 0 to below 1"),
        ({"seed": 3}, "without dropout"),
        ({"dropout": 0.1, "seed": torch.zeros(1)}, "seed is"),
    ],
)
def test_bad_input_gets_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        attention(X, X, X, **options)
    assert "\n" not in str(caught.value)
