"""Values from a warpgroup's registers: the arithmetic played here, who takes which product, the rule on a Hopper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.device import PRETEND, Facts
from sublight.ops.matmul import low_bit_matmul as family
from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL, low_bit_matmul, plan_product, reference
from sublight.ops.matmul.packing import block_of, quantize_weight, words_of
from sublight.ops.matmul.warpgroups import _take_apart


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bits", (2, 4))
@pytest.mark.parametrize("scale", (1.0, 2.0**-12, 3000.0))
def test_a_value_is_rounded_once(dtype: Any, bits: int, scale: float) -> None:
    """Each is off by half a unit in its last place, and by a quarter for the rest of its zero: at most half a scale,
    which is itself rounded to half a unit. By one unit where the zero lies far outside of the values."""
    draw = torch.Generator().manual_seed(bits)
    words = torch.randint(2**32, (4000,), generator=draw)
    zeros = torch.cat([torch.rand(3000, generator=draw) * 2**bits, torch.randn(1000, generator=draw) * 60]).to(dtype)
    scales = (torch.rand(4000, generator=draw) + 0.5).mul(scale).to(dtype)
    most = torch.tensor([0.75]).double().repeat(4000).index_fill(0, torch.arange(3000, 4000), 1.0)
    base = 128 if dtype == torch.bfloat16 else 1024
    raised = zeros.float() + base
    less = raised.to(dtype)
    rest = ((less.float() - raised) * scales.float()).to(dtype)
    for place in range(16 // bits):
        found = played(_take_apart(place, bits, dtype == torch.bfloat16), words, less, scales, rest)
        whole = torch.stack([(words >> place * bits + half) & (2**bits - 1) for half in (0, 16)])
        exact = (whole - zeros.double()) * scales.double()
        info = torch.finfo(dtype)
        unit = info.eps * torch.maximum(exact.abs(), scales.double()).clamp(min=info.smallest_normal)
        fits = exact.abs() < info.max  # larger ones are infinite in a weight made whole, too
        assert ((found - exact).abs() <= most * unit)[fits].all()


def played(ptx: str, words: Any, less: Any, scales: Any, rest: Any) -> Any:
    """The assembly, in float64 with each result rounded as the instruction rounds it."""
    kind, dtype = ("bf16x2", less.dtype) if less.dtype == torch.bfloat16 else ("f16x2", less.dtype)
    parts = re.fullmatch(
        r"{ \.reg \.b32 t; shr\.u32 t, \$1, (\d+); lop3\.b32 t, t, (\d+), (\d+), 0xEA; "
        rf"sub\.rn\.{kind} t, t, \$2; fma\.rn\.{kind} \$0, t, \$3, \$4; }}",
        ptx,
    )
    assert parts, ptx
    by, mask, one = map(int, parts.groups())
    register = ((words >> by) & mask) | one
    values = torch.stack([register & 0xFFFF, register >> 16]).to(torch.uint16).view(dtype).double()
    values = (values - less.double()).to(dtype).double()
    return (values * scales.double() + rest.double()).to(dtype).double()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made as for an H200, with kernels that would be compiled."""
    monkeypatch.setattr(family, "is_interpreted", lambda: False)
    monkeypatch.setattr(family, "takes_ptx", lambda: True)
    token = PRETEND.set(Facts(capability=90, shared_bytes=232448, multiprocessors=132))
    yield
    PRETEND.reset(token)


def planned(m: int, n: int = 4096, k: int = 4096, *, bits: int = 4, group: int = 128, dtype: Any = None) -> Any:
    made: dict[str, Any] = {"device": "meta", "dtype": dtype or torch.bfloat16}
    scales = torch.empty(n, k // group, **made)
    packed = torch.empty(n, words_of(k, bits), device="meta", dtype=torch.int32)
    return plan_product(torch.empty(m, k, **made), packed, scales, scales, bits, k)


def test_who_takes_which_rows(on_hopper: None) -> None:
    assert [planned(m).provider for m in (1, 8, 9, 16, 17, 128, 129)] == [
        *("fragments", "fragments", "rows", "rows", "warpgroups", "warpgroups", "whole")
    ]
    for plan in (
        planned(64, bits=8),
        planned(64, bits=1, group=512),
        planned(64, bits=2, group=32),  # eight scales a block would not fit into the registers
        planned(64, k=4100, group=4100),
        planned(64, dtype=torch.float32),
    ):
        assert plan.provider == "rows"
    PRETEND.set(Facts(capability=80))
    assert planned(64).provider == "rows"


@pytest.mark.parametrize(
    ("m", "n", "k", "bits", "splits"),
    [
        *((64, 14336, 4096, 4, 1), (64, 4096, 4096, 4, 4), (128, 4096, 14336, 4, 4)),
        *((100, 1000, 1536, 4, 1), (64, 64, 4096, 2, 2)),
    ],
)
def test_programs_for_all_multiprocessors(m: int, n: int, k: int, bits: int, splits: int, on_hopper: None) -> None:
    plan = planned(m, n, k, bits=bits, group=block_of(bits))
    step = plan.steps[0]
    assert plan.provider == "warpgroups" and step.grid == (-(-n // 128), splits, 1)
    assert len(plan.steps) == 1 + (splits > 1) and step.constants["IS_PART"] == (splits > 1)
    bytes_on_their_way = step.constants["STAGES"] * (128 * 64 + step.constants["BM"] * 2 * block_of(bits))
    assert step.constants["STAGES"] >= 2 and bytes_on_their_way + 2048 <= 232448


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    ("m", "n", "k", "bits", "group"),
    [
        *((64, 4096, 4096, 4, 128), (17, 200, 1024, 4, 32), (100, 1000, 1536, 4, 1536)),
        *((128, 300, 1000, 4, 1000), (33, 130, 4096, 2, 64)),
    ],
)
def test_the_rule_on_a_hopper(dtype: Any, m: int, n: int, k: int, bits: int, group: int) -> None:
    """Whole tiles and others, one part of k and several, groups inside a block and over all; the same bits twice."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")

    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator("cuda").manual_seed(seed)
        made: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": "cuda"}
        a, weight = torch.randn(m, k, **made), torch.randn(n, k, **made)
        weight[0], weight[1] = 0, 0.3
        inputs = (a, *quantize_weight(weight, bits, group))
        assert LOW_BIT_MATMUL.plan(*inputs, bits).provider == "warpgroups"
        assert torch.equal(low_bit_matmul(*inputs, bits), low_bit_matmul(*inputs, bits))
        return correct.forward_errors(
            lambda *args: low_bit_matmul(*args, bits), lambda *args: reference(*args, bits), inputs
        )

    error = correct.settled(draw)
    assert error.ok, error
