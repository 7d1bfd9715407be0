"""Keys that are turned and coded on their way into the cache: by the rule, as `rope` and `quantize` do it apart."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.launch import watching
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.kv_write import kv_write, plan, reference
from sublight.ops.attention.paged_attention import paged_attention
from sublight.ops.attention.pages import CODES

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
PAGES, PAGE, HEADS, SIZE, TOKENS = 5, 4, 3, 24, 9


def new(dtype: str, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """k, v, slots in no order of which some are skipped, cos, sin and positions."""
    generator = torch.Generator(device=device).manual_seed(seed)
    k, v = (
        torch.randn(TOKENS, HEADS, SIZE, generator=generator, device=device, dtype=getattr(torch, dtype))
        for _ in range(2)
    )
    slots = torch.randperm(PAGES * PAGE, generator=generator, device=device)[:TOKENS]
    slots[[2, 5]] = -1
    angles = torch.rand(40, SIZE // 2, generator=generator, device=device) * 6
    positions = torch.randint(0, 40, (TOKENS,), generator=generator, device=device)
    return k, v, slots, angles.cos(), angles.sin(), positions


def room(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [torch.zeros(PAGES, PAGE, HEADS, SIZE, dtype=dtype, device=device) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("style", "rotary_dim", "is_whole"), [("half", 24, False), ("interleaved", 16, True)])
def test_turned_keys_are_right_by_the_rule(
    style: str, rotary_dim: int, is_whole: bool, dtype: str, device: str
) -> None:
    def draw(seed: int) -> list[correct.Error]:
        k, v, slots, cos, sin, positions = new(dtype, device, seed)
        cos, sin = (x[:, : rotary_dim // 2] for x in (cos, sin))
        if is_whole:  # each angle twice
            cos, sin = (x.repeat_interleave(2, 1) for x in (cos, sin))
        how: dict[str, Any] = {"style": style, "rotary_dim": rotary_dim}

        def call(function: Any, k: Any, v: Any, cos: Any, sin: Any, **more: Any) -> Any:
            caches = room(k.dtype, device)
            return function(k, v, *caches, slots, None, None, cos, sin, positions, **how, **more)

        return correct.forward_errors(
            lambda *x: call(kv_write, *x, provider="sublight"), lambda *x: call(reference, *x), (k, v, cos, sin)
        )

    error = correct.settled(draw, times=32)
    assert error.ok, error


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_stand_for_numbers_as_near_as_pytorchs(code: torch.dtype, dtype: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        k, v, slots, cos, sin, positions = new(dtype, device, seed)
        numbers = []
        for function, more in ((kv_write, {"provider": "sublight"}), (reference, {})):
            caches = room(code, device)
            scales = [torch.zeros(PAGES, PAGE, HEADS, device=device) for _ in range(2)]
            function(k, v, *caches, slots, *scales, cos, sin, positions, **more)
            numbers.append([x.float() * scale[..., None] for x, scale in zip(caches, scales, strict=True)])
        k, v, cos, sin = (x.double() for x in (k, v, cos, sin))
        truth = reference(k, v, *room(torch.float64, device), slots, None, None, cos, sin, positions)
        return [correct.error(name, *three) for name, *three in zip("kv", *numbers, truth, strict=True)]

    error = correct.settled(draw, times=32)
    assert error.ok, error


def test_what_is_written_is_what_attention_reads(device: str) -> None:
    """Coded on the way in, decoded on the way out: near to what the numbers themselves give."""
    k, v, *_ = new("float32", device)
    slots = torch.arange(TOKENS, device=device)
    table, lengths = torch.tensor([[0, 1, 2]], device=device), torch.tensor([TOKENS], device=device)
    q = torch.randn(1, HEADS, SIZE, device=device)
    exact = paged_attention(q, *kv_write(k, v, *room(torch.float32, device), slots), table, lengths)
    scales = [torch.zeros(PAGES, PAGE, HEADS, device=device) for _ in range(2)]
    caches = kv_write(k, v, *room(torch.int8, device), slots, *scales)
    coded = paged_attention(q, *caches, table, lengths, *scales)
    assert 0 < float((exact - coded).abs().max()) < float(v.abs().max()) / 50


def test_nothing_else_is_written_and_what_is_no_number_stays_none(device: str) -> None:
    k, v, slots, cos, sin, positions = new("float32", device)
    k[0, 1, 3], v[1, 0, 0] = float("nan"), float("inf")
    caches = [torch.full_like(x, 7) for x in room(torch.int8, device)]
    scales = [torch.full((PAGES, PAGE, HEADS), 3.0, device=device) for _ in range(2)]
    kv_write(k, v, *caches, slots, *scales, cos, sin, positions, provider="sublight")
    others = torch.ones(PAGES * PAGE, dtype=torch.bool, device=device)
    others[slots[slots >= 0]] = False
    for cache, scale in zip(caches, scales, strict=True):
        assert (cache.view(-1, HEADS, SIZE)[others] == 7).all() and (scale.view(-1, HEADS)[others] == 3).all()
    assert scales[0].view(-1, HEADS)[slots[0], 1].isnan() and scales[1].view(-1, HEADS)[slots[1], 0].isinf()


def test_the_plan_says_what_happens_on_the_way(device: str) -> None:
    k, v, slots, cos, sin, positions = new("float16", device)
    caches = room(torch.float16, device)
    assert plan(k, v, *caches, slots).kernel == "_kv_write_kernel"
    made = plan(k, v, *caches, slots, cos=cos, sin=sin, positions=positions)
    assert made.reason.endswith("turned on the way")
    with watching() as steps:
        kv_write(k, v, *caches, slots, cos=cos, sin=sin, positions=positions)
    assert made.kernel == ", ".join(step.name for step in steps) == "_kv_write_turned_kernel"


K = torch.zeros(2, 1, 16)
CACHE = torch.zeros(2, 4, 1, 16)
SLOTS, ANGLES = torch.tensor([0, 1]), torch.zeros(9, 8)


@pytest.mark.parametrize(
    ("caches", "options", "words"),
    [
        (CACHE, {"cos": ANGLES}, "give all three"),
        (CACHE, {"cos": ANGLES, "sin": ANGLES, "positions": SLOTS + 8}, r"positions\[1\] is 9: .* 0 to 8"),
        (CACHE, {"cos": ANGLES, "sin": ANGLES, "positions": SLOTS, "rotary_dim": 7}, "even number"),
        (CACHE, {"cos": ANGLES, "sin": ANGLES, "positions": SLOTS, "style": "halves"}, "use 'half'"),
        (CACHE, {"cos": ANGLES[:, :3], "sin": ANGLES, "positions": SLOTS}, r"use \(max_len, 8\)"),
        (CACHE, {"k_scales": CACHE[..., 0]}, "give both"),
        (CACHE, {"k_scales": CACHE[..., 0], "v_scales": CACHE[..., 0]}, "scales are for int8"),
        (CACHE.to(torch.int8), {}, "give k_scales"),
    ],
)
def test_bad_input_gets_one_line(caches: torch.Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        kv_write(K, K, caches, caches, SLOTS, **options)
    assert "\n" not in str(caught.value)
