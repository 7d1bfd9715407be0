"""Graphs against eager, on a stand-in that captures and replays as CUDA does, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from sublight.errors import BadInput
from sublight.fix.graph import backend
from sublight.fix.graph.callable import Graph, graph
from sublight.fix.graph.fake import Fake
from sublight.fix.graph.trials import refused, warm


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    label: str = ""


def test_python_runs_once_and_the_rest_is_replayed() -> None:
    fake, runs = Fake(), []
    g = graph(lambda x: (runs.append(0), x * 2 + 1)[1], backend=fake)
    for i in range(10):
        x = torch.full((3,), float(i))
        assert torch.equal(g(x), x * 2 + 1)
    assert (len(runs), fake.captures, fake.replays) == (4, 1, 7)


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(shapes, st.sampled_from([1.0, -0.5, 3]), st.booleans()), min_size=1, max_size=4), st.data())
def test_bit_equal_to_eager_over_interleaved_calls(kinds: list[Any], data: st.DataObject) -> None:
    """Kept outputs stay, inputs may change after the call, whatever comes in between."""

    def fn(batch: dict[str, Any], scale: float, *, flip: bool) -> dict[str, Any]:
        x = batch["x"] * scale
        mean = x.mean(-1, keepdim=True)
        return {"y": (x - mean).flip(0) if flip else x - mean, "parts": [mean, (x > 0, scale)]}

    fake = Fake()
    g, kept = graph(fn, backend=fake), []
    order = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=6, max_size=20))
    for which in order:
        shape, scale, flip = kinds[which]
        x = torch.randn(shape)
        want = fn({"x": x.clone()}, scale, flip=flip)
        got = g({"x": x}, scale, flip=flip)
        kept.append((got, want))
        x.fill_(torch.nan)
    for got, want in kept:
        assert torch.equal(got["y"], want["y"])
        assert torch.equal(got["parts"][0], want["parts"][0])
        assert torch.equal(got["parts"][1][0], want["parts"][1][0])
        assert got["parts"][1][1] == want["parts"][1][1]
    assert len(g.report().eager) + len(g.report().graphs) == len({repr(kinds[i]) for i in order})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(4, 1).expand(4, 6),
        lambda: torch.randn(25)[1:].view(4, 6),
        lambda: torch.randn(8, 6)[::2],
        lambda: torch.randn(0, 6),
        lambda: torch.tensor(2.0),
    ],
)
def test_buffers_lie_as_the_arguments_do(make: Callable[[], torch.Tensor]) -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.stride(), x.data_ptr() % 16))
        return x * 2

    fake = Fake()
    g = graph(fn, backend=fake)
    for _ in range(7):
        x = make()
        assert torch.equal(g(x), x * 2)
        want = (x.stride(), x.data_ptr() % 16)
    assert fake.captures >= 1
    assert seen[-1] == want


def test_alignment_is_part_of_a_call() -> None:
    g, x = graph(lambda x: x * 2, backend=Fake()), torch.randn(17)
    g(x[:16])
    g(x[1:])
    assert len(g.report().eager) == 2


def test_memory_that_overlaps_otherwise_is_refused() -> None:
    assert "share memory" in refused(graph(lambda x: x * 2, backend=Fake()), torch.ones(8).unfold(0, 4, 1))


def test_containers_come_back_as_they_are() -> None:
    g = graph(lambda p, b: (Pair(p.other, b.x * b.scale), Batch(p.one, b.scale, b.label)), backend=Fake())
    for i in range(6):
        p, b = Pair(torch.randn(2), torch.randn(3)), Batch(torch.randn(3), 2.0, "a")
        pair, batch = g(p, b)
        assert (type(pair), type(batch), batch.label) == (Pair, Batch, "a"), i
        assert torch.equal(pair.one, p.other) and torch.equal(pair.other, b.x * 2) and torch.equal(batch.x, p.one)


@pytest.mark.parametrize("values", [(1, True), (0.0, -0.0), (1, 1.0), ("a", "b"), (None, 0)])
def test_values_that_differ_are_different_calls(values: tuple[Any, Any]) -> None:
    g = graph(lambda x, v: x, backend=Fake())
    for value in values:
        g(torch.ones(1), value)
    assert len(g.report().eager) == 2


def test_modes_are_part_of_a_call() -> None:
    g = graph(lambda x: x * 2, backend=Fake())
    g(torch.ones(2))
    with torch.no_grad():
        g(torch.ones(2))
    with torch.inference_mode():
        g(torch.ones(2))
    with torch.autocast("cpu", torch.bfloat16):
        g(torch.ones(2))
    assert len(g.report().eager) == 4


def test_an_argument_written_into_is_the_callers() -> None:
    def fn(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache.sum() + x, cache

    fake = Fake()
    g, caches = graph(fn, backend=fake), [torch.zeros(3), torch.zeros(3)]
    mirror = [c.clone() for c in caches]
    for i in range(12):
        which, x = i % 2, torch.randn(3)
        got, same = g(caches[which], x)
        want, _ = fn(mirror[which], x)
        assert same is caches[which]
        assert torch.equal(got, want) and torch.equal(caches[which], mirror[which])
    assert fake.captures == 2  # one an address


def test_an_argument_written_into_and_never_the_same_is_refused() -> None:
    g = graph(lambda x: x.add_(1), backend=Fake())
    keep = [torch.zeros(3) for _ in range(20)]
    with pytest.warns(UserWarning, match="written into"):
        for x in keep:
            g(x)
    assert all(torch.equal(x, torch.ones(3)) for x in keep)


def test_outputs_are_the_callers_or_the_graphs() -> None:
    weight = torch.randn(3)
    g = graph(lambda x: (x, weight, weight[1:], x * 2), backend=Fake())
    x = torch.randn(3)
    same, outside, view, _ = [g(x) for _ in range(6)][-1]
    assert same is x and outside is weight and view.data_ptr() == weight[1:].data_ptr()
    static = graph(lambda x: x * 2, backend=Fake(), static_outputs=True)
    warm(static, x)
    assert static(x).data_ptr() == static(x + 1).data_ptr()


def test_attributes_are_the_modules() -> None:
    model = torch.nn.Linear(3, 3)
    g = graph(model, backend=Fake())
    assert g.weight is model.weight and g.eval() is model and not g.training
    g.extra = 1
    assert model.extra == 1
    assert list(g.state_dict()) == ["weight", "bias"]


def test_as_a_decorator_and_on_methods() -> None:
    @graph(backend=Fake(), warmup=1)
    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice."""
        return x * 2

    class Scaler:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @graph(backend=Fake())
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    assert double.__doc__ == "Twice." and double.__name__ == "double"
    scalers = Scaler(2.0), Scaler(3.0)
    for _ in range(6):
        x = torch.randn(2)
        assert torch.equal(double(x), x * 2)
        for scaler in scalers:
            assert torch.equal(scaler.run(x), x * scaler.scale)
    scalers[0].scale = 5.0
    assert torch.equal(scalers[0].run(x), x * 5)


def test_nested_graphs_and_other_recorders_pass_through() -> None:
    inner = graph(lambda x: x * 2, backend=Fake())
    fake = Fake()
    outer = graph(lambda x: inner(x) + 1, backend=fake)
    for _ in range(6):
        x = torch.randn(3)
        assert torch.equal(outer(x), x * 2 + 1)
    assert fake.captures == 1 and inner.report().captures == 0
    compiled = torch.compile(lambda x: outer(x) * 4, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), (x * 2 + 1) * 4)
    from torch.utils.flop_counter import FlopCounterMode

    dot = graph(lambda x: x @ x, backend=Fake())
    square = torch.randn(4, 4)
    warm(dot, square)
    dot(square)
    with FlopCounterMode(display=False) as counter:
        dot(square)
    assert counter.get_total_flops() == 2 * 4**3


def test_the_least_recently_used_go_first() -> None:
    fake = Fake()
    g = graph(lambda x: x * 2, backend=fake, warmup=1, memory_budget=2 * 3 * 400)
    one, two, three, four = (torch.randn(n) for n in (100, 101, 102, 103))
    for x in (one, one, two, two, three, three):
        g(x)
    assert [row.call for row in g.report().graphs] == ["101 float32", "102 float32"]
    assert g.report().held_bytes <= g.report().budget_bytes
    g(one)
    for _ in range(3):
        assert torch.equal(g(four), four * 2)
    report = g.report()
    assert report.evictions >= 1 and report.held_bytes <= report.budget_bytes
    for x in (one, two, three, four, one, two):
        assert torch.equal(g(x), x * 2)
        assert g.report().held_bytes <= g.report().budget_bytes


def test_a_graph_larger_than_the_budget_is_refused() -> None:
    assert "memory_budget" in refused(graph(lambda x: x * 2, backend=Fake(), memory_budget=100), torch.randn(100))


def test_a_cache_that_is_gone_lets_its_graph_go() -> None:
    class Cache:
        def __init__(self) -> None:
            self.x = torch.zeros(3)

    def fn(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.x += x
        return cache.x * 2

    g = graph(fn, backend=Fake())
    for _ in range(3):
        cache = Cache()
        for i in range(6):
            assert torch.equal(g(torch.ones(3), cache), torch.full((3,), 2.0 * (i + 1)))
        assert torch.equal(cache.x, torch.full((3,), 6.0))
        gc.collect()
    assert len(g.report().graphs) == 1
    cache.x = torch.zeros(3)  # another tensor in its place
    for i in range(4):
        assert torch.equal(g(torch.ones(3), cache), torch.full((3,), 2.0 * (i + 1)))


def test_several_threads() -> None:
    g = graph(lambda x: (x * 2).sum(-1), backend=Fake())
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(30):
            x = torch.randn(2 + i % 3, 4, generator=generator)
            if not torch.equal(g(x), (x * 2).sum(-1)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(g.report().graphs) == 3


def test_a_thread_that_has_not_multiplied_yet_captures() -> None:
    model = torch.nn.Linear(4, 4)
    g, x, seen = graph(model, backend=Fake()), torch.randn(2, 4), []

    def work() -> None:
        with torch.no_grad():
            seen.append(torch.equal(g(x), model(x)))

    for _ in range(5):  # each a thread of its own: one of them captures what others have warmed up
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [True] * 5 and g.report().captures == 1


def test_a_thread_gets_its_cublas_handle_on_the_stream_that_it_captures_on(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[str] = []
    made: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def stream(side: str) -> Iterator[None]:
        streams.append(side)
        yield
        streams.pop()

    monkeypatch.setattr(backend, "_side_stream", "side stream of {}".format)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: made.append((threading.get_ident(), streams[-1])))
    backend.Cuda().prepare(torch.device("cuda", 1))
    assert made == [(threading.get_ident(), "side stream of 1")] and not streams


def test_without_a_gpu_calls_pass_through() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    g = graph(lambda x: x * x.sum().item())
    assert torch.equal(g(torch.ones(2)), torch.full((2,), 2.0))
    assert "no GPU" in str(g.report()) and g.report().to_json()["graphs"] == []


def test_copies_and_pickles() -> None:
    g = graph(torch.nn.Linear(2, 2), backend=Fake(), warmup=2)
    other = copy.deepcopy(g)
    assert isinstance(other, Graph) and other.weight is not g.weight
    assert torch.equal(pickle.loads(pickle.dumps(g)).weight, g.weight)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup": 0}, "at least once"),
        ({"memory_budget": "many"}, "not a quantity"),
        ({"buckets": {"dims": 1}}, "buckets"),
        ({"buckets": [0]}, "buckets"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        graph(abs, **options)
    with pytest.raises(BadInput, match="function or a module"):
        graph(3)


def test_the_report_tells_what_it_costs_and_when_it_pays() -> None:
    g = graph(lambda x: x * 2, backend=Fake())
    for _ in range(8):
        g(torch.ones(100))
    (row,) = g.report().graphs
    assert (row.replays, row.pool_bytes, row.static_bytes) == (5, 400, 400)
    assert row.eager_s and row.graph_s and row.verdict.split(":")[0] in ("launch-bound", "device-bound")
    g.clear()
    assert g.report().held_bytes == 0 and g.report().graphs == ()
    assert torch.equal(g(torch.ones(100)), torch.full((100,), 2.0))
