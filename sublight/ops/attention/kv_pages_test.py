"""Pages copied and gathered: nothing else is touched, codes come out as numbers, what is not there is never read."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention import kv_copy as copying
from sublight.ops.attention import kv_gather as gathering
from sublight.ops.attention.kv_copy import kv_copy
from sublight.ops.attention.kv_gather import kv_gather
from sublight.ops.attention.kv_write import kv_write
from sublight.ops.attention.pages import CODES

PAGES, PAGE, HEADS, SIZE = 7, 4, 3, 24


def coded_cache(code: torch.dtype, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every place written."""
    generator = torch.Generator(device=device).manual_seed(1)
    k, v = (torch.randn(PAGES * PAGE, HEADS, SIZE, generator=generator, device=device) for _ in range(2))
    caches = [torch.zeros(PAGES, PAGE, HEADS, SIZE, dtype=code, device=device) for _ in range(2)]
    scales = [torch.zeros(PAGES, PAGE, HEADS, device=device) for _ in range(2)]
    kv_write(k, v, *caches, torch.arange(PAGES * PAGE, device=device), *scales)
    return caches, scales


@pytest.mark.parametrize("code", CODES)
def test_copies_take_codes_and_scales_along_and_leave_the_rest(code: torch.dtype, device: str) -> None:
    caches, scales = coded_cache(code, device)
    before = [x.clone() for x in (*caches, *scales)]
    sources, targets = torch.tensor([4, 0], device=device), torch.tensor([1, 6], device=device)
    assert copying.plan(*caches, sources, targets, *scales).kernel == "_kv_copy_kernel"
    kv_copy(*caches, sources, targets, *scales)
    for old, now in zip(before, (*caches, *scales), strict=True):
        expected = [old[page] for page in (0, 4, 2, 3, 4, 5, 0)]
        assert all(torch.equal(x.float(), y.float()) for x, y in zip(now, expected, strict=True))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gathered_codes_are_numbers_by_the_rule(code: torch.dtype, dtype: str, device: str) -> None:
    caches, scales = coded_cache(code, device)
    table = torch.tensor([[5, 1, 0], [2, 3, 6], [4, 4, 4]], device=device)
    lengths = torch.tensor([9, 12, 0], device=device)
    kind = getattr(torch, dtype)
    assert gathering.plan(*caches, table, lengths, *scales, dtype=kind).kernel == "_kv_gather_kernel"
    ours = kv_gather(*caches, table, lengths, *scales, dtype=kind)
    theirs, truth = (gathering.reference(*caches, table, lengths, *scales, each) for each in (kind, torch.float64))
    for name, *three in zip("kv", ours, theirs, truth, strict=True):
        error = correct.error(name, *three)
        assert error.ok, error
        assert (three[0][0, 9:] == 0).all() and (three[0][2] == 0).all()


def test_pages_that_nobody_has_are_never_read(device: str) -> None:
    """On a GPU nobody looks at the numbers: what they point to is NaN, the rest is right."""
    caches = [torch.randn(PAGES, PAGE, HEADS, SIZE, device=device) for _ in range(2)]
    table, lengths = torch.tensor([[5, 99], [2, -3]], device=device), torch.tensor([8, 8], device=device)
    how = (*caches, table, lengths, None, None, torch.float32, "sublight")
    for way in (gathering._kv_gather.by_kernels, gathering._kv_gather.reference):
        for cache, found in zip(caches, way(*how), strict=True):
            assert torch.equal(found[0, :4], cache[5]) and torch.equal(found[1, :4], cache[2])
            assert found[:, 4:].isnan().all()
    before = [x.clone() for x in caches]
    sources, targets = torch.tensor([99, 0, 1], device=device), torch.tensor([2, -1, 3], device=device)
    copying._kv_copy.by_kernels(*caches, sources, targets, None, None, "sublight")
    for old, now in zip(before, caches, strict=True):
        old[3] = old[1]
        assert torch.equal(old, now)


CACHE = torch.zeros(3, 4, 1, 16)
PAIR = torch.tensor([0, 1])
TABLE, LENGTHS = torch.tensor([[0, 1]]), torch.tensor([5])


@pytest.mark.skipif(HAS_GPU, reason="on a GPU nobody looks at numbers")
@pytest.mark.parametrize(
    ("call", "args", "options", "words"),
    [
        (kv_copy, (CACHE, CACHE, PAIR, PAIR + 5), {}, r"targets\[0\] is 5: the cache has pages 0 to 2"),
        (kv_copy, (CACHE, CACHE, PAIR, PAIR + 1), {}, "source and target"),
        (kv_copy, (CACHE, CACHE, PAIR, PAIR[:1]), {}, "use int32"),
        (kv_copy, (CACHE, CACHE.half(), PAIR, PAIR), {}, "use two alike"),
        (kv_copy, (CACHE, CACHE, PAIR, PAIR, CACHE[..., 0]), {}, "give both"),
        (kv_gather, (CACHE, CACHE, TABLE + 2, LENGTHS), {}, r"block_table\[0, 1\] is 3: the cache has pages 0 to 2"),
        (kv_gather, (CACHE, CACHE, TABLE, LENGTHS + 9), {}, "its row of the block table holds 0 to 8"),
        (kv_gather, (CACHE, CACHE, TABLE, LENGTHS), {"dtype": torch.float16}, "8-bit codes alone"),
        (kv_gather, (CACHE.to(torch.int8), CACHE.to(torch.int8), TABLE, LENGTHS), {}, "use k_scales"),
        (kv_gather, (CACHE, CACHE, TABLE, LENGTHS), {"provider": "torch"}, "unknown provider"),
    ],
)
def test_bad_input_gets_one_line(call: Any, args: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
