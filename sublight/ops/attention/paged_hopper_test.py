"""Decoding's step for one GPU: what it takes, how sequences are cut, and its results where there is such a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend import device as devices
from sublight.backend.device import PRETEND, Facts
from sublight.errors import BadInput
from sublight.ops.attention import paged_attention as paged
from sublight.ops.attention import paged_hopper
from sublight.ops.attention.paged_attention import PAGED_ATTENTION, paged_attention, plan, reference
from sublight.ops.attention.rope_kv_write import rope_kv_write

H200 = Facts(capability=90, shared_bytes=232448, multiprocessors=132)
KEYS = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "page", "ragged")


def inputs(*sizes: int, dtype: str = "bfloat16", device: str = "meta", seed: int = 0) -> Any:
    return PAGED_ATTENTION.inputs(dict(zip(KEYS, sizes, strict=True)), dtype, device, seed)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans are made as for an H200, with kernels that would be compiled."""
    for module in (devices, paged, paged_hopper):
        monkeypatch.setattr(module, "is_interpreted", lambda: False)
    token = PRETEND.set(H200)
    yield
    PRETEND.reset(token)


@pytest.mark.parametrize("pairs", [1, 8, 9, 16, 40, 64, 128, 131, 300, 1024])
@pytest.mark.parametrize("capacity", [1, 32, 33, 65, 1000, 4096, 32768, 131072])
def test_no_program_of_a_cluster_is_without_a_block(pairs: int, capacity: int) -> None:
    cut = paged_hopper.cut_for(pairs, capacity, 132)
    blocks = -(-capacity // cut.keys)
    assert cut.cluster in (1, 2, 4, 8, 16) and cut.cluster < 2 * blocks, "half of the programs at most wait for others"
    assert cut.keys // cut.warps == 16, "what one product of a warp takes"
    shared_bytes = 2 * cut.stages * cut.keys * 128 * 2
    assert 2 * (shared_bytes + 1024) <= 227 * 1024, "two programs on a multiprocessor: else clusters wait for room"


def test_the_plan_takes_it_where_it_can(pretend: None) -> None:
    for batch, programs in ((1, 16), (16, 2), (128, 1)):
        x = inputs(batch, 32, 8, 1, 4096, 128, 16, 0)
        made = plan(*x)
        assert (made.provider, made.kernel) == ("hopper", "_paged_hopper_kernel")
        assert made.steps[0].constants["num_ctas"] == programs and ("part" in made.buffers) == (programs > 1)
        assert plan(*x, provider="flash").provider == "flash"
    assert plan(*inputs(64, 32, 8, 1, 1100, 128, 16, 0)).steps[0].tile == (1, 32, 3, 2)  # the fastest of six there
    for sizes in ((64, 32, 8, 1, 1000, 128, 16, 0), (1, 32, 8, 1, 512, 128, 16, 0)):  # not timed
        assert plan(*inputs(*sizes)).provider == "flash"
        assert plan(*inputs(*sizes), provider="hopper").provider == "hopper"
    x = inputs(1, 32, 8, 1, 4096, 128, 16, 0)
    constants = plan(*x, window=100, softcap=3.0).steps[0].constants
    assert constants["WINDOW"] and constants["SOFTCAP"]
    for options in ({"batch_invariant": True}, {"keys_per_program": 64}):
        assert plan(*x, **options).provider == "flash"
        with pytest.raises(BadInput, match="parts of a given length"):
            plan(*x, **options, provider="hopper")


def test_only_this_step_begins_early(pretend: None) -> None:
    x = inputs(1, 32, 8, 1, 4096, 128, 16, 0)
    for options, is_early in (({}, False), ({"dependent": True}, True)):
        constants = plan(*x, **options).steps[0].constants
        assert constants["DEPENDENT"] == is_early and constants.get("launch_pdl", False) == is_early
    assert not any("launch_pdl" in step.constants for step in plan(*x, provider="flash", dependent=True).steps)


def test_a_table_that_is_copied_first_is_waited_for(pretend: None) -> None:
    q, k, v, table, lengths = inputs(2, 32, 8, 1, 4096, 128, 16, 0)
    made = plan(q, k, v, table.T.contiguous().T, lengths, dependent=True)
    constants = made.steps[0].constants
    assert made.copies == ("block_table",) and not constants["DEPENDENT"] and "launch_pdl" not in constants


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["one program", "two programs", "sixteen programs", "one key"])
def test_early_launches_see_the_newest_key(case: str) -> None:
    """A chain inside of a graph: the key is written by the launch before, q by one before that."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for Hopper")
    q, k, v, table, lengths = inputs(*CASES[case], device="cuda")
    batch, kv_heads, dim, page = len(q), k.shape[2], q.shape[2], k.shape[1]
    heads = q.shape[1] + 2 * kv_heads
    last = (lengths - 1).long()
    slots = table.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    angles = torch.rand(64, dim // 2, device="cuda")
    cos, sin, positions = angles.cos().to(q.dtype), angles.sin().to(q.dtype), torch.arange(batch, device="cuda") % 64
    source = torch.randn(batch, heads, dim, device="cuda", dtype=q.dtype)
    qkv = torch.zeros_like(source)

    def step(early: bool) -> Any:
        qkv.copy_(source)
        turned = rope_kv_write(qkv, cos, sin, positions, k, v, slots, dependent=early)[0]
        return paged_attention(turned, k, v, table, lengths, provider="hopper", dependent=early)

    step(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            out = step(True)
    for seed in range(5):
        source.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        expected = step(False)
        k.view(-1, *k.shape[2:])[slots], v.view(-1, *v.shape[2:])[slots], qkv[:] = torch.nan, torch.nan, torch.nan
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((1, 32, 8, 1, 64, 128, 16, 0), "float32", "16-bit caches"),
        ((1, 32, 8, 1, 64, 80, 16, 0), "bfloat16", "heads of 64 or 128"),
        ((1, 28, 4, 1, 64, 128, 16, 0), "bfloat16", "1, 2, 4, 8 or 16 of them"),
    ],
)
def test_the_rest_goes_to_the_step_for_any_gpu(sizes: Any, dtype: str, reason: str, pretend: None) -> None:
    x = inputs(*sizes, dtype=dtype)
    assert plan(*x).provider == "flash"
    with pytest.raises(BadInput, match=reason):
        plan(*x, provider="hopper")


def test_rows_elsewhere_than_at_16_bytes_are_not_its(pretend: None) -> None:
    q, k, v, table, lengths = inputs(1, 4, 2, 1, 1024, 64, 16, 0)
    apart = torch.empty(*k.shape[:3], 67, dtype=k.dtype, device="meta")[..., :64]
    assert plan(q, k, v, table, lengths).provider == "hopper"
    assert plan(q, apart, apart, table, lengths).provider == "flash"
    assert plan(q, k, v.mT.contiguous().mT, table, lengths).provider == "flash"


CASES = {
    "one program": (70, 8, 4, 1, 333, 128, 1, 1),
    "one wide program": (140, 2, 2, 1, 2100, 64, 16, 1),
    "two programs": (20, 32, 8, 1, 700, 128, 16, 1),
    "sixteen programs": (2, 32, 8, 1, 4095, 128, 16, 1),
    "sixteen wide programs": (1, 8, 2, 1, 17000, 128, 64, 1),
    "all heads share": (2, 16, 1, 1, 130, 64, 7, 1),
    "long pages": (3, 8, 4, 1, 2049, 128, 256, 1),
    "one key": (1, 4, 2, 1, 1, 64, 16, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}], ids=["plain", "window", "capped"])
@pytest.mark.parametrize("case", CASES)
def test_right_by_the_rule_whatever_lies_past_the_end(case: str, options: dict[str, Any], dtype: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for Hopper")

    def draw(seed: int) -> list[correct.Error]:
        q, k, v, table, lengths = inputs(*CASES[case], dtype=dtype, device="cuda", seed=seed)
        page, number = k.shape[1], torch.arange(table.shape[1] * k.shape[1], device="cuda")
        for entry, length in enumerate(lengths.tolist()):
            past = number[length:]
            for x in (k, v):
                x[table[entry, past // page].long(), past % page] = torch.nan
        return correct.forward_errors(
            lambda *x: paged_attention(*x, provider="hopper", **options), lambda *x: reference(*x, **options),
            (q, k, v, table, lengths),
        )  # fmt: skip

    error = correct.settled(draw, times=16)
    assert error.ok, error


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["one program", "sixteen programs"])
def test_same_bits_again_and_nan_where_no_page_is(case: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for Hopper")
    q, k, v, table, lengths = inputs(*CASES[case], device="cuda")
    first = paged_attention(q, k, v, table, lengths, provider="hopper")
    for _ in range(20):
        assert torch.equal(first, paged_attention(q, k, v, table, lengths, provider="hopper"))
    broken, longer = table.clone(), lengths.clone()
    broken[1, 0], longer[1] = k.shape[0], table.shape[1] * k.shape[1] + 1
    for tensors in ((q, k, v, broken, lengths), (q, k, v, table, longer)):
        out = paged_attention(*tensors, provider="hopper")
        assert out[1].isnan().all() and torch.equal(out[0], first[0])
