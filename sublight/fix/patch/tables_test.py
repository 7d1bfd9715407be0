"""Tables that a forward has made others of: our kernels read half of each, so those are the module's own to turn."""

from __future__ import annotations

import ast
import copy
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch import tables as tables_
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


class OnGpu(torch.Tensor):
    is_cuda = True


class Stream:
    """As a GPU that has done nothing of what it was given, until `is_done`."""

    def __init__(self) -> None:
        self.is_done, self.records = False, 0

    def record_event(self) -> Any:
        self.records += 1
        return types.SimpleNamespace(query=lambda: self.is_done)


def tables(tokens: int) -> list[Any]:
    return [torch.ones(1, tokens, WIDTH).as_subclass(OnGpu) for _ in range(2)]


def odd_tables(tokens: int) -> list[Any]:
    return [torch.arange(float(WIDTH)).expand(1, tokens, WIDTH).as_subclass(OnGpu) for _ in range(2)]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_a_host_waits_for_a_gpu_in_the_first_calls_and_reads_later_answers_when_they_have_come(stream: Stream) -> None:
    looks, held = Looks("halves"), []
    for _ in range(3 * LOOKS):
        held.append(tables(TOKENS))
        assert looks.are_as_expected(*held[-1]) and looks.are_as_expected(*held[-1])
    assert stream.records == 2 * LOOKS
    odd = odd_tables(TOKENS)
    assert looks.are_as_expected(*odd) and looks.are_as_expected(*held[0])  # nothing is known yet
    stream.is_done = True
    with pytest.raises(RuntimeError, match="run it again"):
        looks.are_as_expected(*held[1])
    assert not looks.are_as_expected(*held[1]) and copy.deepcopy(looks).are_as_expected(*held[0])
    assert not Looks("halves").are_as_expected(*odd)


def test_tables_on_a_cpu_are_all_looked_at() -> None:
    looks = Looks("halves")
    for _ in range(3 * LOOKS):
        assert looks.are_as_expected(torch.ones(1, TOKENS, WIDTH), torch.zeros(1, TOKENS, WIDTH))
    odd = torch.arange(float(WIDTH)).expand(1, TOKENS, WIDTH)
    assert not looks.are_as_expected(odd, odd)


def test_what_another_thread_found_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks("halves")

    def meanwhile(x: Any, table: Any) -> Any:
        looks.is_odd = True
        return torch.ones((), dtype=torch.bool)

    monkeypatch.setattr(tables_, "is_laid_out", meanwhile)
    assert not looks.are_as_expected(torch.ones(1, TOKENS, WIDTH), torch.ones(1, TOKENS, WIDTH)) and looks.is_odd


def test_tables_that_are_written_to_are_looked_at_again() -> None:
    looks, cos, sin = Looks("halves"), torch.ones(1, TOKENS, WIDTH), torch.zeros(1, TOKENS, WIDTH)
    assert looks.are_as_expected(cos, sin)
    cos.copy_(torch.arange(float(WIDTH)).expand(1, TOKENS, WIDTH))
    assert not looks.are_as_expected(cos, sin)
    with torch.inference_mode():
        assert Looks("neighbours").are_as_expected(torch.ones(1, TOKENS, WIDTH), torch.ones(1, TOKENS, WIDTH))


def test_a_capture_takes_ours_for_sizes_that_were_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, capturing = Looks("halves"), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert looks.are_as_expected(*tables(TOKENS))
    capturing = True
    monkeypatch.setattr(tables_, "is_laid_out", lambda *_: pytest.fail("a look inside of a capture waits"))
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
