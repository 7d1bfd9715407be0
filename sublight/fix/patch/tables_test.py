"""Tables that a forward has made others of: our kernels read half of each, so those are the module's own to turn."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch.model import patch
from sublight.fix.patch.rules import rope
from sublight.fix.patch.rules.rope import ROPE
from sublight.fix.patch.tables import LOOKS, Looks, is_handed_on

HEADS, WIDTH, TOKENS = 4, 8, 5


def apply_rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


def half_turned(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(0.1, 1.0, WIDTH // 2), persistent=False)

    def forward(self, x: Any, positions: Any) -> Any:
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    def forward(self, q: Any, k: Any, tables: Any) -> Any:
        cos, sin = tables
        return apply_rotary(q, k, cos, sin)


class TwoAxes(nn.Module):
    """Columns of an image in the second half."""

    def forward(self, q: Any, k: Any, tables: Any) -> Any:
        cos, sin = (torch.cat((x[..., : WIDTH // 2], x[..., : WIDTH // 2].flip(-1)), -1) for x in tables)
        return apply_rotary(q, k, cos, sin)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.rotary, self.layers = Rotary(), nn.ModuleList(layers)
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: Any) -> Any:
        q = k = x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            q, k = layer(q, k, tables)
        return q


class Ours:
    """As on a GPU: it reads the first half of each table alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, turning: Any, q: Any, k: Any, cos: Any, sin: Any, dim: int) -> Any:
        self.calls += 1
        return apply_rotary(q, k, *(torch.cat([x[..., : WIDTH // 2]] * 2, -1) for x in (cos, sin)))


def test_tables_made_by_a_forward_are_turned_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, TOKENS, HEADS * WIDTH)
    for layers, calls in (([Attention(), Attention()], 2), ([TwoAxes()], 0), ([Attention(), TwoAxes()], 1)):
        model, ours = Model(*layers), Ours()
        plain = copy.deepcopy(model)
        assert patch(model, rules=(ROPE,)).swapped == len(layers)
        with monkeypatch.context() as as_on_a_gpu:
            as_on_a_gpu.setattr(rope, "why_not_ours", lambda *tensors: "")
            as_on_a_gpu.setattr(rope, "turned", ours)
            for _ in range(2):
                torch.testing.assert_close(model(x), plain(x))
        assert ours.calls == 2 * calls


def test_the_host_waits_in_the_first_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    theirs = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: looked.append(one) or theirs(one, other))
    looks, held = Looks("halves"), []
    for _ in range(3 * LOOKS):
        held.append([torch.ones(1, TOKENS, WIDTH), torch.zeros(1, TOKENS, WIDTH)])
        assert looks.are_as_expected(*held[-1]) and looks.are_as_expected(*held[-1])
    assert len(looked) == 2 * LOOKS
    odd = torch.arange(float(WIDTH)).expand(1, 9 * TOKENS, WIDTH)  # of another size
    assert not looks.are_as_expected(odd, odd) and not looks.are_as_expected(*held[0])
    assert copy.deepcopy(looks).are_as_expected(*held[0])


def test_a_capture_takes_ours_for_sizes_that_were_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    def tables(tokens: int) -> list[Any]:
        return [torch.ones(1, tokens, WIDTH).as_subclass(OnGpu) for _ in range(2)]

    looks, capturing = Looks("halves"), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert looks.are_as_expected(*tables(TOKENS))
    capturing = True
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("a look inside of a capture waits for the device"))
    assert looks.are_as_expected(*tables(TOKENS)) and not looks.are_as_expected(*tables(9 * TOKENS))


FORWARDS = {
    "def f(self, q, k, cos, sin): return turn(q, k, cos, sin)": True,
    "def f(self, q, k, both):\n c, s = both\n return turn(q, k, c, sin=s)": True,
    "def f(self, q, k):\n cos, sin = self.rotary(q, k)\n return turn(q, k, cos, sin)": True,
    "def f(self, q, k, cos, sin): return turn(q, k, cos * 2, sin)": False,
    "def f(self, q, k, cos, sin):\n cos *= 2\n return turn(q, k, cos, sin)": False,
    "def f(self, q, k, cos, sin):\n cos = torch.cat((cos, cos), -1)\n return turn(q, k, cos, sin)": False,
    "def f(self, q, k, both):\n cos, sin = (x * 2 for x in both)\n return turn(q, k, cos, sin)": False,
    "def f(self, q, k, both):\n for cos, sin in both:\n  q, k = turn(q, k, cos, sin)\n return q": False,
}


@pytest.mark.parametrize("source", FORWARDS)
def test_a_compiler_trusts_tables_that_come_as_they_were(source: str) -> None:
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef) and is_handed_on(tree, "turn") == FORWARDS[source]
