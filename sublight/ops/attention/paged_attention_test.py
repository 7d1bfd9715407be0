"""Decoding over pages: by the rule, whatever lies in pages that nobody should read; bad tables before any launch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.ops.attention.attention import attention
from sublight.ops.attention.kv_write import kv_write
from sublight.ops.attention.kv_write import plan as plan_write
from sublight.ops.attention.paged_attention import PAGED_ATTENTION, _paged_attention, paged_attention, plan, reference
from sublight.ops.attention.pages import CODES, check_pages

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 20}, "capped": {"softcap": 5.0}}
SHAPE = {"batch": 3, "heads": 4, "kv_heads": 2, "q_len": 1, "kv_len": 70, "head_dim": 16, "page": 8, "ragged": 1}


def ours(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    return paged_attention(*tensors, provider="flash", **options)


def inputs(device: str, dtype: str = "float32", seed: int = 0, **sizes: int) -> Inputs:
    return PAGED_ATTENTION.inputs(SHAPE | sizes, dtype, device, seed)


@pytest.mark.parametrize("page", [1, 3, 16, 256])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_by_the_rule(page: int, options: str, dtype: str, device: str) -> None:
    how = OPTIONS[options]

    def draw(seed: int) -> list[correct.Error]:
        x = inputs(device, dtype, seed, page=page)
        return correct.forward_errors(lambda *x: ours(*x, **how), lambda *x: reference(*x, **how), x)

    error = correct.settled(draw, times=16)
    assert error.ok, error


def coded(cache: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a cache, and a scale for each token and head."""
    most = 127.0 if kind == torch.int8 else 448.0
    scales = cache.float().abs().amax(3) / most
    codes = cache.float() / scales[..., None]
    return (codes.round() if kind == torch.int8 else codes).to(kind), scales


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_of_8_bits_are_right_by_the_rule(kind: torch.dtype, dtype: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        q, k, v, table, lengths = inputs(device, dtype, seed)
        (k, k_scales), (v, v_scales) = coded(k, kind), coded(v, kind)

        def theirs(q: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            return reference(q, k, v, table, lengths, *(x.float() for x in scales))

        def launch(q: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            return ours(q, k, v, table, lengths, *scales, window=None)

        return correct.forward_errors(launch, theirs, (q, k_scales, v_scales))

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_both_ways_to_finish_are_taken(device: str) -> None:
    assert plan(*inputs(device), provider="flash", keys_per_program=16).kernel == "_paged_kernel, _combine_kernel"
    assert plan(*inputs(device), provider="flash", keys_per_program=80).kernel == "_paged_kernel"
    assert plan(*inputs(device)).provider == "flash"


@pytest.mark.parametrize("keys_per_program", [16, 80])
def test_what_lies_outside_of_a_sequence_changes_nothing(keys_per_program: int, device: str) -> None:
    q, k, v, table, lengths = inputs(device)
    expected = ours(q, k, v, table, lengths, keys_per_program=keys_per_program)
    page = k.shape[1]
    used = torch.zeros(k.shape[:2], dtype=torch.bool, device=device)
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        for key in range(length):
            used[row[key // page], key % page] = True
    poisoned = [x.masked_fill(~used[:, :, None, None], math.nan) for x in (k, v)]
    wild = table.clone()
    for entry, length in enumerate(lengths.tolist()):
        wild[entry, -(-length // page) :] = 10**6  # entries that no length needs may be anything
    assert torch.equal(ours(q, *poisoned, wild, lengths, keys_per_program=keys_per_program), expected)
    assert torch.equal(paged_attention(q, *poisoned, wild, lengths), paged_attention(q, k, v, table, lengths))


def test_pages_in_any_order_give_the_same_bits(device: str) -> None:
    q, k, v, table, lengths = inputs(device)
    order = table.flatten().long()
    in_order = torch.arange(table.numel(), device=device, dtype=torch.int32).view(table.shape)
    assert torch.equal(ours(q, k[order], v[order], in_order, lengths), ours(q, k, v, table, lengths))


def test_a_sequence_does_not_depend_on_the_others_where_the_cut_is_fixed(device: str) -> None:
    q, k, v, table, lengths = inputs(device)
    together = ours(q, k, v, table, lengths, keys_per_program=32)
    for entry in range(3):
        one = slice(entry, entry + 1)
        assert torch.equal(ours(q[one], k, v, table[one], lengths[one], keys_per_program=32), together[one])


def test_it_is_attention_over_the_gathered_keys(device: str) -> None:
    q, k, v, table, lengths = inputs(device, ragged=0, kv_len=40)

    def rows(cache: torch.Tensor) -> torch.Tensor:
        return cache[table.long()].flatten(1, 2).transpose(1, 2)

    whole = attention(q[:, :, None].double(), rows(k).double(), rows(v).double())[:, :, 0]
    assert (ours(q, k, v, table, lengths) - whole).abs().max() < 1e-5  # the rule is above: here only what is attended


def test_no_keys_give_zeros(device: str) -> None:
    q, k, v, table, lengths = inputs(device)
    lengths = lengths.clone()
    lengths[1] = 0
    for way in (ours, paged_attention):
        out = way(q, k, v, table, lengths)
        assert (out[1] == 0).all() and out.isfinite().all() and (out[0] != 0).any()


def test_a_page_that_is_not_there_is_refused_on_the_cpu_and_nan_on_a_gpu(device: str) -> None:
    q, k, v, table, lengths = inputs(device)
    wrong, long = table.clone(), lengths.clone()
    wrong[2, 1], long[2] = k.shape[0], 73
    if device == "cpu":
        for way in (ours, paged_attention):
            with pytest.raises(BadInput, match=r"block_table\[2, 1\] is 29: the cache has pages 0 to 28"):
                way(q, k, v, wrong, lengths)
            with pytest.raises(BadInput, match=r"sequence 2 has length 73: .* holds 0 to 72"):
                way(q, k, v, table, long)
    with pytest.raises(BadInput):
        check_pages(k, wrong, lengths)
    launch = torch.ops.sublight.paged_attention  # which looks at no numbers, as on a GPU; nor do PyTorch's ops
    ways = ((launch, 16), (launch, 80), (_paged_attention.reference, 0))
    for table_now, lengths_now in ((wrong, lengths), (table, long)):
        for (way, keys_per_program), softcap in itertools.product(ways, (0.0, 5.0)):
            how = (None, None, 0, softcap, 0.25, keys_per_program, "flash", False)
            out = way(q, k, v, table_now, lengths_now, *how)
            assert out[2].isnan().all() and out[:2].isfinite().all()
    free = table.clone()
    free[2, 0] = -1  # a page before the window
    out = _paged_attention.reference(q, k, v, free, lengths, None, None, 8, 0.0, 0.25, 0, "", False)
    assert out.isfinite().all()


Q, CACHE = torch.zeros(2, 4, 16), torch.zeros(3, 8, 2, 16)
TABLE, LENGTHS = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((Q[0], CACHE, CACHE, TABLE, LENGTHS), {}, "one new token"),
        ((Q, CACHE, CACHE[..., :8], TABLE, LENGTHS), {}, "use \\(pages, page_size"),
        ((Q, CACHE.half(), CACHE.half(), TABLE, LENGTHS), {}, "make them alike"),
        ((Q, CACHE.to(torch.int8), CACHE.to(torch.int8), TABLE, LENGTHS), {}, "need k_scales"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS), {"k_scales": CACHE[..., 0], "v_scales": CACHE[..., 0]}, "scales are for"),
        (
            (Q, CACHE.to(torch.int8), CACHE.to(torch.int8), TABLE, LENGTHS),
            {"k_scales": CACHE[0, 0, 0], "v_scales": CACHE[..., 0]},
            "one a token and head",
        ),
        ((Q[:, :3], CACHE, CACHE, TABLE, LENGTHS), {}, "must divide"),
        ((Q, CACHE.new_zeros(1, 257, 2, 16), CACHE.new_zeros(1, 257, 2, 16), TABLE, LENGTHS), {}, "1 to 256"),
        ((Q, CACHE, CACHE, TABLE.float(), LENGTHS), {}, "block_table is torch.float32"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS[:1]), {}, "lengths are"),
        ((Q, CACHE, CACHE, TABLE - 1, LENGTHS), {}, "is -1: the cache has pages 0 to 2"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS), {"provider": "paged"}, "use 'flash' or 'hopper'"),
        ((Q, CACHE, CACHE, TABLE, LENGTHS), {"window": 0}, "window 0: use a whole number"),
    ],
)
def test_bad_input_gets_one_line(args: tuple[torch.Tensor, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        paged_attention(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("provider", ["", "sublight"])
def test_new_keys_are_found_where_they_were_written(provider: str, device: str) -> None:
    generator = torch.Generator(device=device).manual_seed(0)
    k, v = (torch.randn(5, 2, 24, generator=generator, device=device) for _ in range(2))
    caches = [torch.full((4, 3, 2, 24), 7.0, device=device) for _ in range(2)]
    slots = torch.tensor([11, -1, 0, 4, -5], device=device)
    found = kv_write(k, v, *caches, slots, provider=provider)
    assert found[0] is caches[0] and found[1] is caches[1]
    for x, cache in zip((k, v), caches, strict=True):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[11, 0, 4]], x[[0, 2, 3]])
        assert (flat[[1, 2, 3, *range(5, 11)]] == 7).all()
    before = [x.clone() for x in caches]
    kv_write(k, v, *caches, torch.full_like(slots, -1), provider=provider)  # nothing but padding
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))
    assert plan_write(k, v, *caches, slots, provider=provider).provider == "sublight"
    if device == "cpu":
        with pytest.raises(BadInput, match=r"slots\[1\] is 12: the cache has places 0 to 11"):
            kv_write(k, v, *caches, slots.masked_fill(slots == -1, 12), provider=provider)
