"""Prefill over pages: by the rule, bit for bit what a cache in one piece gives, shared prefixes, poisoned pages."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.ops.attention.packed_attention import packed_attention
from sublight.ops.attention.paged_attention_test import coded
from sublight.ops.attention.paged_prefill import PAGED_PREFILL, paged_prefill, plan, reference

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 6}, "capped": {"softcap": 5.0}}
SHAPE = {"batch": 3, "heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 40, "head_dim": 16, "page": 8, "ragged": 1}


def ours(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    return paged_prefill(*tensors, provider="sublight", **options)


def inputs(device: str, dtype: str = "float32", seed: int = 0, **sizes: int) -> Inputs:
    return PAGED_PREFILL.inputs(SHAPE | sizes, dtype, device, seed)


@pytest.mark.parametrize("page", [1, 3, 256])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_by_the_rule(page: int, options: str, dtype: str, device: str) -> None:
    how = OPTIONS[options]

    def draw(seed: int) -> list[correct.Error]:
        x = inputs(device, dtype, seed, page=page)
        return correct.forward_errors(lambda *x: ours(*x, **how), lambda *x: reference(*x, **how), x)

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_caches_of_8_bits_are_right_by_the_rule(device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        q, k, v, *rest = inputs(device, "float16", seed)
        (k, k_scales), (v, v_scales) = coded(k, torch.int8), coded(v, torch.int8)

        def theirs(q: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            return reference(q, k, v, *rest, *(x.float() for x in scales))

        return correct.forward_errors(lambda q, *scales: ours(q, k, v, *rest, *scales), theirs, (q, k_scales, v_scales))

    error = correct.settled(draw, times=16)
    assert error.ok, error


@pytest.mark.parametrize("window", [None, 6])
def test_pages_give_the_bits_of_one_piece(window: int | None, device: str) -> None:
    q, k, v, table, lengths, starts = inputs(device)
    in_pages = ours(q, k, v, table, lengths, starts, window=window)
    in_a_piece = [x[table.flatten().long()].reshape(3, 40, 2, 16) for x in (k, v)]  # a page holds a whole sequence
    alone = torch.arange(3, device=device)[:, None].int()
    assert torch.equal(in_pages, ours(q, *in_a_piece, alone, lengths, starts, window=window))


def test_it_is_packed_attention_over_the_gathered_keys(device: str) -> None:
    """Where no heads share keys a tile's rows are the same, and so are the bits."""
    q, k, v, table, lengths, starts = inputs(device, kv_heads=4)
    rows = [torch.cat([x[table[i].long()].flatten(0, 1)[: lengths[i]] for i in range(3)]) for x in (k, v)]
    key_starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    whole = packed_attention(q, *rows, starts, key_starts, causal=True, provider="flash")
    assert torch.equal(ours(q, k, v, table, lengths, starts), whole)


def test_chunks_give_the_bits_of_the_whole_prompt(device: str) -> None:
    q, k, v, table, lengths, _ = inputs(device, batch=1, q_len=40, kv_heads=4)
    whole = ours(q, k, v, table, lengths, torch.tensor([0, 40], device=device))
    for begin, end in ((0, 16), (16, 32), (32, 40)):  # interpreted, a product's bits depend on the row of the tile
        chunk = torch.tensor([0, end - begin], device=device)
        part = ours(q[begin:end], k, v, table, torch.full_like(lengths, end), chunk)
        assert torch.equal(part, whole[begin:end])


def test_sequences_may_share_a_prefix(device: str) -> None:
    q, k, v, table, lengths, starts = inputs(device, ragged=0)
    table = table.clone()
    table[1:, :2] = table[0, :2]  # two pages of eight keys
    together = ours(q, k, v, table, lengths, starts)
    for i in range(3):
        own = slice(int(starts[i]), int(starts[i + 1]))
        alone = ours(q[own], k, v, table[i : i + 1], lengths[i : i + 1], torch.tensor([0, 9], device=device))
        assert torch.equal(alone, together[own])


def test_what_lies_outside_of_a_sequence_changes_nothing(device: str) -> None:
    q, k, v, table, lengths, starts = inputs(device)
    expected = ours(q, k, v, table, lengths, starts)
    used = torch.zeros(k.shape[:2], dtype=torch.bool, device=device)
    wild = table.clone()
    for entry, (row, length) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        for key in range(length):
            used[row[key // 8], key % 8] = True
        wild[entry, -(-length // 8) :] = 10**6  # entries that no length needs may be anything
    poisoned = [x.masked_fill(~used[:, :, None, None], math.nan) for x in (k, v)]
    # pages before and after the cache as well: no key that nobody needs is read there
    poisoned = [
        torch.cat([torch.full_like(x[:1], math.nan), x, torch.full_like(x[:1], math.nan)])[1:-1] for x in poisoned
    ]
    assert torch.equal(ours(q, *poisoned, wild, lengths, starts), expected)
    past = torch.cat([q, torch.full_like(q[:2], math.nan)])
    assert torch.equal(ours(past, k, v, table, lengths, starts), torch.cat([expected, torch.zeros_like(q[:2])]))
    launch = torch.ops.sublight.paged_prefill  # which looks at no numbers, as on a GPU
    wrong = table.clone()
    wrong[1, 0] = len(k)
    out = launch(q, k, v, wrong, lengths, starts, None, None, 0, 0.0, 0.25, False, "sublight")
    assert out[starts[1] : starts[2]].isnan().all() and out[: starts[1]].isfinite().all()


def test_the_plan_names_the_kernel(device: str) -> None:
    assert plan(*inputs(device), provider="sublight").kernel == "_paged_prefill_kernel"
    assert plan(*inputs(device)).provider == "sublight"


Q, CACHE = torch.zeros(5, 4, 16), torch.zeros(3, 8, 2, 16)
TABLE, LENGTHS, STARTS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 4]), torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((Q[0], CACHE, CACHE, TABLE, LENGTHS, STARTS), {}, "use 3"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS, STARTS[:1]), {}, "sequences \\+ 1"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS, STARTS[:2]), {}, "block_table is"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS, STARTS * 2), {}, "rise from 0 to 5"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS - 2, STARTS), {}, "write the chunk's keys"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS * 9, STARTS), {}, "holds 0 to 16"),
        ((Q, CACHE, CACHE, TABLE + 3, LENGTHS, STARTS), {}, "pages 0 to 2"),
        ((Q[:, :3], CACHE, CACHE, TABLE, LENGTHS, STARTS), {}, "must divide"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS, STARTS), {"provider": "flash"}, "use 'sublight'"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS, STARTS), {"window": 0}, "window 0: use a whole number"),
    ],
)
def test_bad_input_gets_one_line(args: tuple[torch.Tensor, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        paged_prefill(*args, **options)
    assert "\n" not in str(caught.value)
