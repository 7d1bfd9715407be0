"""rope, rope_ and qk_norm_rope: styles, partial heads, positions, layouts, in place, gradients, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.backend.device import PRETEND, Facts
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.rotary import qk_norm_rope, rope, rotary

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")  # the interpreter's bf16 is wrong
SIZES = {"batch": 2, "q_len": 37, "heads": 6, "kv_heads": 2, "head_dim": 24}
MAX_LEN = 50
EACH_STYLE = pytest.mark.parametrize("style", rotary.STYLES)


def drawn(dtype: str, device: str, rotary_dim: int = 24, **sizes: int) -> tuple[torch.Tensor, ...]:
    """q, k, and tables of MAX_LEN rows."""
    angles = rotary.angles(MAX_LEN, rotary_dim, device)
    kind = getattr(torch, dtype)
    return *rotary.random_heads(SIZES | sizes, dtype, device, 0), angles.cos().to(kind), angles.sin().to(kind)


def positions_for(q: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=q.device).manual_seed(1)
    return torch.randint(0, MAX_LEN, q.shape[:2], generator=generator, device=q.device)


def weights_for(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=q.device).manual_seed(2)
    first, second = (torch.randn(q.shape[-1], generator=generator, device=q.device) for _ in range(2))
    return (1 + first / 4).to(q.dtype), (1 + second / 4).to(q.dtype)


def heads_before_tokens(x: torch.Tensor) -> torch.Tensor:
    """The same values, laid out (batch, heads, tokens, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def of_one_product(x: torch.Tensor) -> torch.Tensor:
    """The same values, as q lies in what one product gives for q, k and v."""
    room = torch.full((*x.shape[:2], 3 * x.shape[2], x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
    room[:, :, : x.shape[2]] = x
    return room[:, :, : x.shape[2]]


def at_an_odd_place(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element away from any alignment."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def right(errors: list[correct.Error]) -> bool:
    return correct.worst(errors).ok


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placed", [False, True], ids=["counted", "positions"])
@pytest.mark.parametrize("rotary_dim", [24, 16, 2])
@EACH_STYLE
def test_values_and_gradients(style: rotary.Style, rotary_dim: int, placed: bool, dtype: str, device: str) -> None:
    q, k, cos, sin = drawn(dtype, device, rotary_dim)
    how: dict[str, Any] = {"positions": positions_for(q) if placed else None, "style": style, "rotary_dim": rotary_dim}
    ours, theirs = partial(rope.launch, **how), partial(rope.reference, **how)
    assert right(correct.forward_errors(ours, theirs, (q, k, cos, sin)))
    grads = correct.random_grads(theirs, (q, k, cos, sin), wrt=(0, 1))
    back = partial(rope.launch_backward, **how)
    assert right(correct.backward_errors(back, theirs, (q, k, cos, sin), grads, wrt=(0, 1)))
    assert torch.equal(ours(q, k, cos, sin)[0][..., rotary_dim:], q[..., rotary_dim:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [24, 16])
@EACH_STYLE
def test_values_and_gradients_with_norms(style: rotary.Style, rotary_dim: int, dtype: str, device: str) -> None:
    q, k, cos, sin = drawn(dtype, device, rotary_dim)
    inputs = (q, k, *weights_for(q), cos, sin)
    how: dict[str, Any] = {"positions": positions_for(q), "style": style, "rotary_dim": rotary_dim}
    theirs = partial(qk_norm_rope.reference, **how)
    assert right(correct.forward_errors(partial(qk_norm_rope.launch, **how), theirs, inputs))
    grads = correct.random_grads(theirs, inputs, wrt=(0, 1, 2, 3))
    back = partial(qk_norm_rope.launch_backward, **how)
    assert right(correct.backward_errors(back, theirs, inputs, grads, wrt=(0, 1, 2, 3)))


@EACH_STYLE
def test_tables_of_other_widths_and_types(style: rotary.Style, device: str) -> None:
    q, k, cos, sin = drawn("float16", device)
    expected = rope.launch(q, k, cos, sin, style=style)
    twice = [torch.cat((x, x), -1) if style == "half" else x.repeat_interleave(2, -1) for x in (cos, sin)]
    together = torch.cat((cos, sin), -1).chunk(2, -1)  # as engines keep them
    for tables in (twice, together, [x.float() for x in (cos, sin)], [x.T.contiguous().T for x in (cos, sin)]):
        assert all(map(torch.equal, rope.launch(q, k, *tables, style=style), expected))
    assert all(map(torch.equal, rope.reference(q, k, *twice, style=style), rope.reference(q, k, cos, sin, style=style)))


@pytest.mark.parametrize("moved", [heads_before_tokens, of_one_product, at_an_odd_place, torch.clone])
@EACH_STYLE
def test_layouts_and_in_place(style: rotary.Style, moved: Any, device: str) -> None:
    q, k, cos, sin = drawn("float16", device, 16)
    how: dict[str, Any] = {"positions": positions_for(q), "style": style, "rotary_dim": 16}
    expected = rope.launch(q, k, cos, sin, **how)
    q2, k2 = moved(q), moved(k)
    assert not rope.plan(q2, k2, cos, sin, **how).copies
    result = rope.launch(q2, k2, cos, sin, **how)
    assert all(map(torch.equal, result, expected))
    if q2.is_contiguous() or moved is heads_before_tokens:
        assert result[0].stride() == q2.stride()
    written = rope.launch(q2, k2, cos, sin, **how, in_place=True)
    assert written[0] is q2
    assert written[1] is k2
    assert all(map(torch.equal, written, expected))
    norms = [qk_norm_rope.launch(*pair, *weights_for(q), cos, sin, **how) for pair in ((q, k), (moved(q), moved(k)))]
    assert all(map(torch.equal, *norms))


def test_each_way_to_load_pairs_is_reached(device: str) -> None:
    q, k, cos, sin = drawn("float16", device)

    def pairs(q: torch.Tensor, k: torch.Tensor, interleaved: bool, rotary_dim: int = 24) -> str:
        tables = cos[:, : rotary_dim // 2].contiguous(), sin[:, : rotary_dim // 2].contiguous()
        return str(rope.plan_turn(q, k, *tables, None, rotary_dim, interleaved).steps[0].constants["PAIRS"])

    assert pairs(q, k, False) == "halves"
    assert pairs(q, k, True) == "words"
    assert pairs(at_an_odd_place(q), k, True) == "neighbours"
    assert pairs(q[..., :7].clone(), k[..., :7].clone(), True, 6) == "neighbours"


@EACH_STYLE
def test_an_odd_head_with_a_rest(style: rotary.Style, device: str) -> None:
    inputs = drawn("float32", device, 6, head_dim=7, heads=3, kv_heads=1)
    how: dict[str, Any] = {"style": style, "rotary_dim": 6}
    assert right(correct.forward_errors(partial(rope.launch, **how), partial(rope.reference, **how), inputs))


@pytest.mark.parametrize("batch", [1, 5, 130])
def test_one_token_of_each_sequence(batch: int, device: str) -> None:
    q, k, cos, sin = drawn("float32", device, batch=batch, q_len=1)
    for positions in (None, positions_for(q), positions_for(q)[:1]):
        how = {"positions": positions}
        assert right(
            correct.forward_errors(partial(rope.launch, **how), partial(rope.reference, **how), (q, k, cos, sin))
        )


def test_positions_of_other_types_and_strides(device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    positions = positions_for(q)
    expected = rope.launch(q, k, cos, sin, positions)
    for same in (positions.int(), positions.T.contiguous().T, positions.repeat_interleave(2, 1)[:, ::2]):
        assert all(map(torch.equal, rope.launch(q, k, cos, sin, same), expected))
    one = rope.launch(q, k, cos, sin, positions[:1])
    assert all(map(torch.equal, one, rope.launch(q, k, cos, sin, positions[:1].repeat(2, 1))))


def test_a_position_outside_the_tables_gives_nan(device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    positions = positions_for(q)
    expected = rope.launch(q, k, cos, sin, positions)
    wrong = positions.clone()
    wrong[0, 3], wrong[1, 5] = MAX_LEN, -1
    for x, y in zip(rope.launch(q, k, cos, sin, wrong), expected, strict=True):
        assert torch.isnan(x[0, 3]).all()
        assert torch.isnan(x[1, 5]).all()
        assert torch.equal(torch.isnan(x).any(-1).any(-1), wrong != positions)
        assert torch.equal(torch.nan_to_num(x)[wrong == positions], y[wrong == positions])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_strange_value_stays_in_its_head(value: float, device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    q[1, 4, 2, 5] = value
    inputs = (q, k, *weights_for(q), cos, sin)
    for ours, theirs, given in (
        (rope.launch, rope.reference, (q, k, cos, sin)),
        (qk_norm_rope.launch, qk_norm_rope.reference, inputs),
    ):
        # the CPU's float64 composition is the judge: PyTorch's fused norm for GPUs gives NaN for the whole head
        for result, truth in zip(ours(*given), theirs(*(x.double().cpu() for x in given)), strict=True):
            assert torch.equal(torch.isfinite(result).cpu(), torch.isfinite(truth))
    assert torch.isfinite(rope.launch(q, k, cos, sin)[0]).sum() >= q.numel() - 2


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("head_dim", {"k": (2, 37, 2, 22)}, "alike in all but heads"),
    ("tokens", {"k": (2, 36, 2, 24)}, "alike in all but heads"),
    ("three dimensions", {"q": (37, 6, 24)}, "must be .batch, q_len, heads, head_dim"),
    ("odd", {"rotary_dim": 23}, "rotary_dim 23 must be even"),
    ("too wide", {"rotary_dim": 26}, "from 2 to head_dim, which is 24"),
    ("nothing turns", {"rotary_dim": 0}, "rotary_dim 0 must be even"),
    ("style", {"style": "neox"}, "unknown style 'neox'"),
    ("tables", {"cos": (MAX_LEN, 10)}, r"must both be .max_len, 12 or 24"),
    ("short tables", {"cos": (36, 12), "sin": (36, 12)}, "37 tokens need as many rows"),
    ("positions", {"positions": torch.zeros(2, 36, dtype=torch.int64)}, r"positions \(2, 36\)"),
    ("positions' type", {"positions": torch.zeros(2, 37)}, "int32 or int64"),
    ("types", {"k": torch.zeros(2, 37, 2, 24, dtype=torch.float64)}, "one floating-point type"),
    ("devices", {"cos": torch.zeros(MAX_LEN, 12, device="meta")}, "on one device"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], message: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(zip(("q", "k", "cos", "sin"), drawn("float32", device), strict=True))
    for name, value in change.items():
        if isinstance(value, tuple):
            value = torch.zeros(value, device=device)
        elif isinstance(value, torch.Tensor) and value.device.type != "meta":
            value = value.to(device)
        given[name] = value
    weights = {"q_weight": torch.ones(24, device=device), "k_weight": torch.ones(24, device=device)}
    for by_pytorch in (False, True):
        if by_pytorch:
            monkeypatch.setattr(rotary, "why_not_ours", lambda *_: "as asked")
        for call in (rope.rope, rope.rope_, rope.launch):
            with pytest.raises(BadInput, match=message):
                call(**given)
        with pytest.raises(BadInput, match=message):
            qk_norm_rope.qk_norm_rope(**given, **weights)


def test_whole_numbers_and_wrong_weights_are_refused(device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    with pytest.raises(BadInput, match="floating-point"):
        rope.rope(q.long(), k.long(), cos, sin)
    short = torch.ones(23, device=device)
    with pytest.raises(BadInput, match=r"must be \(24,\)"):
        qk_norm_rope.qk_norm_rope(q, k, short, short, cos, sin)


def test_in_place_needs_memory_of_its_own_and_no_gradient(device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    with pytest.raises(BadInput, match="expanded"):
        rope.rope_(q[:1].expand_as(q), k, cos, sin)
    with pytest.raises(BadInput, match="no gradient"):
        rope.rope_(q.requires_grad_(), k, cos, sin)


@pytest.mark.parametrize("moved", [torch.clone, lambda x: x.mT.contiguous().mT], ids=["in one piece", "turned"])
def test_what_was_kept_for_a_gradient_is_not_changed_in_silence(moved: Any, device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    kept = moved(q).requires_grad_().exp()  # its own result is what its gradient needs
    with torch.no_grad():
        rope.rope_(kept, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    with torch.inference_mode():
        q, k, cos, sin = drawn("float32", device)
        assert all(map(torch.equal, rope.launch(q, k, cos, sin), rope.rope_(q, k, cos, sin)))


def test_why_a_call_goes_to_pytorch(device: str) -> None:
    q, k, cos, sin = drawn("float16", device)
    token = PRETEND.set(Facts())
    try:
        assert rope.plan(q, k, cos, sin).provider == "sublight"
        assert rope.plan(q, k, cos.float(), sin.float()).provider == "sublight"
        assert "float32" in rope.plan(q, k, cos.double(), sin.double()).reason
        assert "gradient" in rope.plan(q, k, cos.clone().requires_grad_(), sin).reason
        assert "without rows" in rope.plan(q, k[:, :, :0], cos, sin).reason
    finally:
        PRETEND.reset(token)
    assert "float64" in rope.plan(*(x.double() for x in (q, k, cos, sin))).reason


@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
def test_a_result_that_nobody_uses_has_no_gradient(which: int, device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    weights = weights_for(q)
    for ours, theirs, given in (
        (rope.rope, rope.reference, (q, k)),
        (qk_norm_rope.qk_norm_rope, qk_norm_rope.reference, (q, k, *weights)),
    ):
        grads = torch.randn_like((q, k)[which])

        def found(call: Any, *given: torch.Tensor, grads: torch.Tensor = grads) -> list[torch.Tensor | None]:
            leaves = [x.detach().requires_grad_() for x in given]
            result = call(*leaves, *(x.to(leaves[0].dtype) for x in (cos, sin)))[which]
            return list(torch.autograd.grad(result, leaves, grads.to(result.dtype), allow_unused=True))

        mine, yours, truth = found(ours, *given), found(theirs, *given), found(theirs, *(x.double() for x in given))
        assert [x is None for x in mine] == [x is None for x in yours] == [i % 2 != which for i in range(len(given))]
        errors = [correct.error("", *x) for x in zip(mine, yours, truth, strict=True) if x[0] is not None]
        assert right(errors), errors


def test_tables_get_their_gradient_from_pytorch(device: str) -> None:
    q, k, cos, sin = drawn("float32", device)
    cos.requires_grad_()
    rope.rope(q, k, cos, sin)[0].sum().backward()
    assert cos.grad is not None
    assert cos.grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
@EACH_STYLE
def test_past_two_to_the_thirty_one_elements(style: rotary.Style) -> None:
    q = torch.randn(5, 131072, 32, 128, device="cuda", dtype=torch.bfloat16)
    k = q[:, :, :1].clone()
    angles = rotary.angles(q.shape[1], 128, "cuda")
    cos, sin = angles.cos(), angles.sin()
    last = torch.tensor([[131070, 131071]], device="cuda")
    few = rope.launch(q[-1:, -2:].clone(), k[-1:, -2:].clone(), cos, sin, last, style=style)
    assert torch.equal(rope.launch(q, k, cos, sin, style=style)[0][-1:, -2:], few[0])
    rope.rope_(q, k, cos, sin, style=style)
    assert torch.equal(q[-1:, -2:], few[0])


@pytest.mark.gpu
def test_the_weights_gradient_repeats_bit_for_bit() -> None:
    shape = {"batch": 2, "q_len": 3000, "heads": 28, "kv_heads": 4, "head_dim": 128}
    x = qk_norm_rope.inputs(shape, "bfloat16", "cuda", 0)
    first = qk_norm_rope.launch_backward(*x[:2], *x)
    for _ in range(5):
        assert all(map(torch.equal, first, qk_norm_rope.launch_backward(*x[:2], *x)))
