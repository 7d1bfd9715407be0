"""Packed sequences: by the rule, as each alone, whatever lies beside them; bad starts before any launch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.ops.attention.attention import attention
from sublight.ops.attention.attention import launch_backward as launch_backward_alone
from sublight.ops.attention.packed_attention import (
    launch,
    launch_backward,
    packed_attention,
    plan,
    reference,
)

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
LENGTHS = {  # queries and keys of each sequence: the interpreter's tiles are 16 x 32
    "one long": [(33, 40)],
    "some empty": [(0, 0), (5, 5), (0, 3), (17, 17), (3, 0)],
    "odd": [(1, 7), (16, 32), (2, 1)],
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 4},
    "capped": {"causal": True, "softcap": 3.0},
}


def tensors(
    lengths: list[tuple[int, int]],
    dtype: str,
    device: str,
    seed: int = 0,
    past: int = 0,
    heads: int = 2,
    kv_heads: int = 1,
) -> Inputs:
    """q, k, v, both starts and a gradient of the result; `past` tokens are behind the last sequence."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, 16, generator=generator, device=device, dtype=getattr(torch, dtype))

    def starts(side: int) -> torch.Tensor:
        return torch.tensor([sum(pair[side] for pair in lengths[:i]) for i in range(len(lengths) + 1)]).to(device)

    queries, keys = (sum(pair[side] for pair in lengths) + past for side in (0, 1))
    q, k, v, dout = random(queries, 2), random(keys, 1), random(keys, 1), random(queries, 2)
    return q, k, v, starts(0).int(), starts(1).int(), dout


@pytest.mark.gpu_seconds(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_right_by_the_rule(lengths: str, mask: str, dtype: str, device: str) -> None:
    options = MASKS[mask]

    def draw(seed: int) -> list[correct.Error]:
        *x, dout = tensors(LENGTHS[lengths], dtype, device, seed, past=3)
        theirs = partial(reference, **options)
        return [
            *correct.forward_errors(partial(launch, **options), theirs, tuple(x)),
            *correct.backward_errors(partial(launch_backward, **options), theirs, tuple(x), dout),
        ]

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_a_sequence_has_the_bits_that_it_has_alone(device: str) -> None:
    q, k, v, cu_q, cu_k, dout = tensors([(5, 9), (18, 33), (1, 2)], "float32", device)
    out, lse = packed_attention(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    gradients = launch_backward(dout, q, k, v, cu_q, cu_k, causal=True)
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        own_q, own_k, own_v, own_dout = (
            x[at].transpose(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys), (dout, rows))
        )
        alone, own_lse = attention(own_q, own_k, own_v, causal=True, provider="flash", return_lse=True)
        assert torch.equal(out[rows], alone[0].transpose(0, 1)) and torch.equal(lse[:, rows], own_lse[0])
        found = launch_backward_alone(own_dout, own_q, own_k, own_v, causal=True, provider="flash")
        for packed, expected, at in zip(gradients, found, (rows, keys, keys), strict=True):
            assert torch.equal(packed[at], expected[0].transpose(0, 1))


def test_neighbours_and_what_lies_past_the_last_change_nothing(device: str) -> None:
    q, k, v, cu_q, cu_k, dout = tensors([(4, 6), (3, 3)], "float32", device, past=2)
    own, keys = slice(0, 4), slice(0, 6)
    expected = packed_attention(q, k, v, cu_q, cu_k)
    gradients = launch_backward(dout, q, k, v, cu_q, cu_k)
    assert (expected[7:] == 0).all() and all((x[9 if x is not q else 7 :] == 0).all() for x in gradients)
    q[4:], k[6:], v[6:], dout[4:] = math.nan, math.nan, math.nan, math.nan
    assert torch.equal(packed_attention(q, k, v, cu_q, cu_k)[own], expected[own])
    found = launch_backward(dout, q, k, v, cu_q, cu_k)
    for poisoned, clean, at in zip(found, gradients, (own, keys, keys), strict=True):
        assert torch.equal(poisoned[at], clean[at])


def test_autograd_takes_the_kernels_and_the_starts_stay_where_they_are(device: str) -> None:
    q, k, v, cu_q, cu_k, dout = tensors([(4, 6), (3, 3)], "float32", device)
    assert plan(q, k, v, cu_q, cu_k).provider == "flash"
    call = partial(packed_attention, causal=True)
    found = correct.gradients(lambda *x: call(*x, cu_q, cu_k), (q, k, v), dout)
    expected = launch_backward(dout, q, k, v, cu_q, cu_k, causal=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    gapped = torch.stack([x.new_full(x.shape, math.nan) if i else x for i in (0, 1) for x in (q,)], 1)[:, 0]
    assert torch.equal(call(gapped, k, v, cu_q, cu_k), call(q, k, v, cu_q, cu_k))
    turned = q.mT.contiguous().mT
    assert torch.equal(call(turned, k, v, cu_q, cu_k), call(q, k, v, cu_q, cu_k))


Q, CU = torch.zeros(8, 2, 16), torch.tensor([0, 3, 8])


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((Q[None], Q, Q, CU), {}, "use 3"),
        ((Q, Q, Q, CU.float()), {}, "int32"),
        ((Q, Q, Q, torch.tensor([0, 9])), {}, "rise from 0 to 8"),
        ((Q, Q, Q, torch.tensor([0, 5, 3])), {}, "rise from 0"),
        ((Q, Q, Q, torch.tensor([1, 8])), {}, "rise from 0"),
        ((Q, Q, Q, CU, torch.tensor([0, 8])), {}, "as many of both"),
        ((Q, torch.zeros(8, 3, 16), torch.zeros(8, 3, 16), CU), {}, "must divide"),
        ((Q, Q, Q, CU), {"provider": "naive"}, "use 'flash'"),
        ((Q, Q, Q, CU), {"window": 0}, "window 0: use a whole number of keys from 1 on"),
        ((Q, Q, Q, CU), {"dropout": 1.0}, "below 1"),
    ],
)
def test_bad_input_gets_one_line(args: tuple[torch.Tensor, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        packed_attention(*args, **options)
    assert "\n" not in str(caught.value)


def test_a_way_that_cannot_take_the_heads_is_refused(device: str) -> None:
    narrow = Q[..., :12].to(device)
    with pytest.raises(BadInput, match="multiples of 8"):
        packed_attention(narrow, narrow, narrow, CU.to(device), provider="flash")
