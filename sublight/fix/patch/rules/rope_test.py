"""Functions that turn q and k are known by what they do, and ours does the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight import correct
from sublight.fix.patch.model import apply, patch, undo
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import rope

BATCH, TOKENS, HEADS, KV_HEADS, WIDTH = 2, 5, 4, 2, 16


def rotate_half(x: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_neighbours(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def llama(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def cohere(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    dtype, q, k = q.dtype, q.float() if q.dtype == torch.float16 else q, k
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple((x * cos + rotate_neighbours(x) * sin).to(dtype) for x in (q, k))


def neox(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin, width = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]
    return tuple(
        torch.cat((x[..., :width] * cos + rotate_half(x[..., :width]) * sin, x[..., width:]), -1) for x in (q, k)
    )


def glm(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = (x.unsqueeze(unsqueeze_dim).chunk(2, -1)[0].repeat_interleave(2, -1) for x in (cos, sin))
    width = cos.shape[-1]
    return tuple(
        torch.cat((x[..., :width] * cos + rotate_neighbours(x[..., :width]) * sin, x[..., width:]), -1) for x in (q, k)
    )


def oss(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    halves = (x.chunk(2, -1) for x in (q, k))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves)


def backwards(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k, cos, -sin, unsqueeze_dim)


def only_q(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k, cos, sin, unsqueeze_dim)[0], k


def swapped(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k, sin, cos, unsqueeze_dim)


def permuted(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Neighbours turned and left as halves, as one family has it."""
    return llama(*(torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k)), cos, sin, unsqueeze_dim)


KNOWN = (
    (llama, "halves", "half", False, False, False),
    (cohere, "neighbours", "interleaved", False, True, False),
    (neox, "halves", "half", True, False, True),
    (glm, "halves", "interleaved", True, False, True),
    (oss, "once", "half", False, False, True),
)
WRONG = (backwards, only_q, swapped, permuted)


class Rotary(torch.nn.Module):
    def __init__(self, table: str = "halves", width: int = WIDTH) -> None:
        super().__init__()
        self.table = table
        self.register_buffer("inv_freq", 0.5 ** torch.arange(width // 2), persistent=False)

    def forward(self, x: Any, position_ids: Any) -> Any:
        angles = position_ids[..., None].float() * self.inv_freq
        if self.table != "once":
            angles = angles.repeat_interleave(2, -1) if self.table == "neighbours" else torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Linear(WIDTH, 2 * 2 * WIDTH)

    def forward(self, x: Any, position_embeddings: Any) -> Any:
        q, k = self.qk(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2).chunk(2, 1)
        cos, sin = position_embeddings
        q, k = llama(q, k, cos, sin)
        return q @ k.transpose(2, 3)


class Model(torch.nn.Module):
    def __init__(self, table: str = "halves") -> None:
        super().__init__()
        self.rotary, self.attention = Rotary(table), Attention()

    def forward(self, x: Any, positions: Any) -> Any:
        return self.attention(x, position_embeddings=self.rotary(x, positions))


def inputs(table: str, tables: int, width: int = WIDTH, heads_first: bool = True) -> list[Any]:
    """q, k, cos and sin; q and k as a projection leaves them."""
    q, k = (torch.randn(BATCH, TOKENS, heads, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
    positions = torch.randint(50, (tables, TOKENS))
    cos, sin = Rotary(table, width)(q, positions)
    return [q.transpose(1, 2), k.transpose(1, 2), cos, sin] if heads_first else [q, k, cos, sin]


@pytest.mark.parametrize(("function", "table", "style", "partial", "widens", "packs"), KNOWN)
def test_a_function_is_known_by_what_it_does(
    function: Any, table: Any, style: str, partial: bool, widens: bool, packs: bool
) -> None:
    turning = rope.Turning(style=style, table=table, partial=partial, widens=widens, packs=packs)
    assert rope.understood(function, table) == turning


@pytest.mark.parametrize("function", WRONG)
def test_one_that_does_something_else_is_not(function: Any) -> None:
    assert all(rope.understood(function, table) is None for table in ("halves", "neighbours", "once"))


@pytest.mark.parametrize(("function", "table", "style", "partial", "widens", "packs"), KNOWN)
@pytest.mark.parametrize("tables", (1, BATCH))
@pytest.mark.parametrize("dim", (1, 2))
def test_ours_gives_the_same(
    function: Any, table: Any, style: str, partial: bool, widens: bool, packs: bool, tables: int, dim: int
) -> None:
    turning = rope.understood(function, table)
    for width in (WIDTH, WIDTH // 2) if partial else (WIDTH,):
        q, k, cos, sin = inputs(table, tables, width, heads_first=dim == 1)
        for own in ((q, k), (q.contiguous(), k.contiguous())):  # of which the second is not one long sequence
            leaves = [x.detach().requires_grad_() for x in own]
            ours = rope.turned(turning, *leaves, cos, sin, dim)
            theirs = function(*leaves, cos, sin, unsqueeze_dim=dim)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other)
            grads = [torch.autograd.grad(sum(x.square().sum() for x in pair), leaves) for pair in (ours, theirs)]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("function", "table", "style", "partial", "widens", "packs"), KNOWN)
@pytest.mark.parametrize("tables", (1, BATCH))
@pytest.mark.parametrize("dim", (1, 2))
def test_what_comes_out_lies_as_it_did(
    function: Any, table: Any, style: str, partial: bool, widens: bool, packs: bool, tables: int, dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the library's op, whose results lie as q and k do; callers see that in `view`."""
    turn = rope.turned_by(rope.understood(function, table), function)
    monkeypatch.setattr(rope, "why_not_ours", lambda *_: "")
    q, k, cos, sin = inputs(table, tables, heads_first=dim == 1)
    wide = [torch.cat((x, x), -1)[..., :WIDTH] for x in (q, k)]  # rows with room between them, as in one projection
    for own in ((q, k), (q.contiguous(), k.contiguous()), wide):
        leaves = [x.detach().requires_grad_() for x in own]
        pairs = [call(*leaves, cos, sin, unsqueeze_dim=dim) for call in (turn, function)]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
        grads = [torch.autograd.grad(sum(x.square().sum() for x in pair), leaves) for pair in pairs]
        torch.testing.assert_close(*grads)


def test_calls_that_are_not_understood_go_to_the_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = rope.turned_by(rope.understood(llama, "halves"), lambda *args, **named: "own")
    monkeypatch.setattr(rope, "why_not_ours", lambda *_: "")
    ran = []
    monkeypatch.setattr(rope, "turned", lambda *args: ran.append(args) or args[1:3])
    q, k, cos, sin = inputs("halves", 1)
    assert turn(q, k, cos, sin)[0] is q and turn(q, k, cos, sin, unsqueeze_dim=1)[0] is q and len(ran) == 2
    for args, named in (
        ((q, k, cos, sin, 1), {}),
        ((q, k, cos, sin), {"unsqueeze_dim": 0}),
        ((q, k, cos, sin), {"position_ids": 1}),
        ((q, k, cos[0], sin[0]), {}),
        ((q, k, cos[..., :8], sin[..., :8]), {}),
        ((q, k, cos[:, :1], sin[:, :1]), {}),
        ((q.float(), k.float(), cos, sin), {}),
        ((q, k[..., :8], cos, sin), {}),
        ((q, k[:, :, :1], cos, sin), {}),
        ((q[0], k[0], cos, sin), {}),
    ):
        assert turn(*args, **named) == "own"


@pytest.mark.parametrize("forced", (False, True))
def test_an_attention_keeps_all_but_the_function(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, positions = Model(), torch.randn(BATCH, TOKENS, WIDTH), torch.arange(TOKENS)[None]
    padded = torch.stack((positions[0], (positions[0] - 2).clamp(min=0)))
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    swap = rope.find(model.attention, model)
    assert isinstance(swap, Swap) and swap.op == "rope"
    apply(model.attention, swap)
    if forced:  # the library's op, as on a GPU
        monkeypatch.setattr(rope, "why_not_ours", lambda *_: "")
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        for at in (positions, padded):
            error = correct.error("y", *(y.detach() for y in (call(x, at), plain(x, at), exact(x.double(), at))))
            assert error.ok, error
    undo(model.attention)
    assert torch.equal(model(x, padded), plain(x, padded))
    q, k, cos, sin = swap.arguments(model.attention, x, position_embeddings=model.rotary(x, positions))
    assert q.shape == k.shape == (BATCH, TOKENS, 1, WIDTH) and cos.shape == sin.shape == (TOKENS, WIDTH)


def test_without_tables_that_fit_it_is_left() -> None:
    attention = Attention()
    assert "shows how its tables" in rope.find(attention, attention).reason
    left = rope.find(attention, Model("neighbours"))
    assert isinstance(left, Left) and "neither of our two ways" in left.reason
    assert rope.find(torch.nn.Linear(2, 2), attention) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "table", "style", "partial", "widens", "packs"), KNOWN)
@pytest.mark.parametrize("tables", (1, BATCH))
def test_on_a_gpu_our_kernel_runs(
    function: Any, table: Any, style: str, partial: bool, widens: bool, packs: bool, tables: int
) -> None:
    turning = rope.understood(function, table)
    wide = [x.cuda().requires_grad_() for x in inputs(table, tables)]
    narrow = [x.detach().bfloat16().requires_grad_(i < 2) for i, x in enumerate(wide)]
    assert not rope.why_not_ours(*narrow)
    truth, theirs, ours = function(*wide), function(*narrow), rope.turned_by(turning, function)(*narrow)
    for one, other, true in zip(ours, theirs, truth, strict=True):
        assert correct.error("turned", one, other, true).ok and one.stride() == other.stride()


def test_a_function_that_refuses_wider_tables_is_understood_without() -> None:
    def strict(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        if q.dtype != cos.dtype:
            raise TypeError("one data type, please")
        return llama(q, k, cos, sin)

    turning = rope.understood(strict, "halves")
    assert turning is not None and turning.style == "half" and not turning.widens


def long_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Another one beyond some length."""
    return llama(q, k, cos * (0.5 if q.shape[-2] > 10**6 else 1.0), sin, unsqueeze_dim=unsqueeze_dim)


def long_rope_by_mask(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    far = torch.arange(cos.shape[-2]) > 10**6
    return llama(q, k, torch.where(far[:, None], 0.0, cos), sin, unsqueeze_dim=unsqueeze_dim)


def detached_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k.detach(), cos, sin, unsqueeze_dim=unsqueeze_dim)


def clamped_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return tuple(x.clamp(-1e6, 1e6) for x in llama(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim))


def parted_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    q, k = llama(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return q, k * (k.shape[-2] // 6000 + 1)


def cropped_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    q, k = llama(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return q[:, :, -8000:], k


def rope_in_training(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k, cos, sin if torch.is_grad_enabled() else -sin, unsqueeze_dim=unsqueeze_dim)


def half_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k, cos, sin.clamp(-1, 1) if q.dtype == torch.float16 else sin, unsqueeze_dim=unsqueeze_dim)


ALMOST = (long_rope, long_rope_by_mask, detached_rope, clamped_rope, parted_rope, cropped_rope, rope_in_training)


@pytest.mark.parametrize("function", ALMOST)
def test_one_that_is_only_almost_it_is_left(function: Any) -> None:
    turning = rope.understood(function, "halves")
    assert turning is not None, "by a look at its values it is one"
    dtypes, missing = rope.proven(function, turning, torch.float32)
    assert "not proven" in missing and torch.float32 not in dtypes
    dtypes, missing = rope.proven(llama, turning, torch.float32)
    assert missing == "" and len(dtypes) == 4


def refusing_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    assert q.dtype != torch.bfloat16
    return llama(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def turning_less_in_half(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return llama(q, k, cos, sin * 0 if q.dtype == torch.float16 else sin, unsqueeze_dim=unsqueeze_dim)


@pytest.mark.parametrize(
    ("function", "other"),
    [(half_rope, torch.float16), (turning_less_in_half, torch.float16), (refusing_rope, torch.bfloat16)],
)
def test_data_types_are_proven_one_by_one(function: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be patched in float32 and run in another."""
    turning = rope.understood(function, "halves")
    assert turning is not None
    dtypes, missing = rope.proven(function, turning, torch.float32)
    assert missing == "" and dtypes == {torch.float64, *rope.DTYPES} - {other}
    assert "not proven" in rope.proven(function, turning, other)[1]
    heard: list[Any] = []
    monkeypatch.setattr(rope, "why_not_ours", lambda *tensors: "")
    monkeypatch.setattr(rope, "turned", lambda turning, q, k, *rest: heard.append(q.dtype) or (q, k))
    turn = rope.turned_by(turning, lambda q, k, cos, sin: (q, k), dtypes=dtypes)
    for dtype in rope.DTYPES:
        turn(*(x.to(dtype) for x in rope._inputs("halves", rope.WIDTH)))
    assert heard == [dtype for dtype in rope.DTYPES if dtype != other]


class MetaRotary(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4, device="meta"), persistent=False)

    def forward(self, x: Any, positions: Any) -> Any:
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def test_rates_without_values_still_show_the_layout() -> None:
    module = MetaRotary()
    assert list(rope.tables_of(module)) == ["halves"] and module.inv_freq.is_meta
    module.held = (each for each in ())  # which cannot be copied
    assert list(rope.tables_of(module)) == []


def test_a_model_is_proven_where_no_gradients_are_taken() -> None:
    """A server patches inside of inference_mode, where nothing has a gradient."""
    with torch.inference_mode():
        swapped = [row.rule for row in patch(Model()).rows if row.is_swapped]
    assert "rope" in swapped
