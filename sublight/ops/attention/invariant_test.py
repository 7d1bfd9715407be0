"""Modes that promise bits: gradients the same in every run, results the same in any batch and over any pages; and pages
that are looked at where the caller asks for it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.attention import attention, plan
from sublight.ops.attention.attention_test import tensors
from sublight.ops.attention.paged_attention import INVARIANT_KEYS, paged_attention
from sublight.ops.attention.paged_attention import plan as paged_plan
from sublight.ops.attention.paged_prefill import paged_prefill

LENGTH = 600 if HAS_GPU else 70  # past a block of keys on a GPU, past two of the interpreter's
DTYPES = ("float16", "bfloat16", "float32") if HAS_GPU else ("float16", "float32")


def in_pages(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """Caches and a table for keys (batch, kv_heads, length, head_dim), pages in no order."""
    batch, heads, length, size = k.shape
    width = -(-length // page)
    order = torch.randperm(batch * width, device=k.device).view(batch, width)
    caches = []
    for x in (k, v):
        rows = x.new_full((batch, width * page, heads, size), float("nan"))  # poison past the end
        rows[:, :length] = x.transpose(1, 2)
        cache = rows.new_empty(batch * width, page, heads, size)
        cache[order] = rows.view(batch, width, page, heads, size)
        caches.append(cache)
    return *caches, order.to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "page"), [(2, 2, 7), *(((4, 1, 16),) if HAS_GPU else ())])
def test_paged_prefill_has_the_bits_of_one_piece(heads: int, kv_heads: int, page: int, dtype: str, device: str) -> None:
    """Heads that share keys on a GPU alone: numpy's products, which the interpreter takes, depend on a row's place."""
    q, k, v, _ = tensors((2, heads, kv_heads, 33, LENGTH, 64 if HAS_GPU else 16), dtype, device)
    whole = attention(q, k, v, causal=True, batch_invariant=True)
    starts, lengths = torch.tensor([0, 33, 66], device=device), torch.tensor([LENGTH, LENGTH], device=device)
    flat = q.transpose(1, 2).reshape(66, heads, -1)
    paged = paged_prefill(flat, *in_pages(k, v, page), lengths, starts, batch_invariant=True)
    assert torch.equal(paged.view(2, 33, heads, -1).transpose(1, 2), whole)


@pytest.mark.parametrize("dtype", DTYPES[: 3 if HAS_GPU else 1])
def test_a_batch_entry_has_its_bits_in_any_batch(dtype: str, device: str) -> None:
    q, k, v, dout = tensors((3, 2, 1, 17, LENGTH // 2, 16) if HAS_GPU else (3, 1, 1, 3, 20, 16), dtype, device)

    def call(*x: Any) -> Any:
        return attention(*x, causal=True, batch_invariant=True)

    out, grads = call(q, k, v), correct.gradients(call, (q, k, v), dout)
    own = slice(1, 2)
    assert torch.equal(call(*(x[own] for x in (q, k, v))), out[own])
    alone = correct.gradients(call, tuple(x[own] for x in (q, k, v)), dout[own])
    assert all(torch.equal(one, other[own]) for one, other in zip(alone, grads, strict=True))


def test_the_mode_is_right_by_the_rule(device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        q, k, v, dout = tensors((1, 2, 1, 20, 40, 16), "float16", device, seed)

        def ours(*x: Any) -> Any:
            return attention(*x, causal=True, batch_invariant=True)

        def theirs(*x: Any) -> Any:
            return attention(*x, causal=True, provider="")

        return [
            *correct.forward_errors(ours, theirs, (q, k, v)),
            *correct.backward_errors(
                lambda dout, *x: correct.gradients(ours, x, dout), theirs, (q, k, v), dout
            ),
        ]  # fmt: skip

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_decoding_is_cut_alike_in_every_batch(device: str) -> None:
    q, k, v, _ = tensors((3, 4, 2, 1, LENGTH, 16), "float16", device)
    caches = in_pages(k, v, 4)
    lengths = torch.tensor([LENGTH, 5, 33], device=device)
    together = paged_attention(q[:, :, 0], *caches, lengths, batch_invariant=True)
    made = paged_plan(q[:, :, 0], *caches, lengths, batch_invariant=True)
    assert f"{INVARIANT_KEYS} keys a program" in made.reason
    one = paged_attention(q[1:2, :, 0], *caches[:2], caches[2][1:2], lengths[1:2], batch_invariant=True)
    assert torch.equal(one[0], together[1])


def test_deterministic_goes_to_flash_whose_backward_writes_no_place_twice(device: str) -> None:
    q, k, v, dout = tensors((1, 2, 1, 40, 40, 16), "float16", device)
    assert plan(q, k, v, causal=True, deterministic=True).provider == "flash"

    def call(*x: Any) -> Any:
        return attention(*x, causal=True, deterministic=True)

    runs = [correct.gradients(call, (q, k, v), dout) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    with pytest.raises(BadInput, match="flash alone is"):
        attention(q, k, v, deterministic=True, provider="online")
    odd = torch.zeros(1, 2, 8, 20, device=device)
    with pytest.raises(BadInput, match=r"batch_invariant=True, .* does not take this \(heads of 20"):
        attention(odd, odd, odd, batch_invariant=True)


def test_pages_are_looked_at_where_the_caller_asks(device: str) -> None:
    """On a GPU without it the host does not wait, and what is not there gives NaN."""
    q, k, v, _ = tensors((1, 2, 1, 1, 8, 16), "float32", device)
    k_cache, v_cache, table = in_pages(k, v, 4)
    lengths = torch.tensor([8], device=device)
    for wrong_table, wrong_lengths, words in (
        (table + 9, lengths, "the cache has pages 0 to 1"),
        (table, lengths + 1, "sequence 0 has length 9"),
    ):
        with pytest.raises(BadInput, match=words):
            paged_attention(q[:, :, 0], k_cache, v_cache, wrong_table, wrong_lengths, check=True)
        with pytest.raises(BadInput, match=words):
            starts = torch.tensor([0, 1], device=device)
            paged_prefill(q[:, :, 0], k_cache, v_cache, wrong_table, wrong_lengths, starts, check=True)
