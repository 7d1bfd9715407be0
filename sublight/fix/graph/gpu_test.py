"""Graphs on a GPU: bit-equal to eager, whatever comes in between."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from sublight.fix.graph.callable import Graph, graph
from sublight.ops.adamw.optimizer import AdamW

pytestmark = pytest.mark.gpu


def mlp() -> torch.nn.Module:
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)]
    return torch.nn.Sequential(*layers).cuda().requires_grad_(False)


def test_bit_equal_over_random_shapes_and_interleaved_calls() -> None:
    model, kept = mlp(), []
    g = graph(model)
    rng = torch.Generator().manual_seed(0)
    for _ in range(120):
        n = int(torch.randint(1, 9, (), generator=rng))
        x = torch.randn(n, 64, device="cuda")
        want = model(x)
        kept.append((g(x), want))
        x.fill_(torch.nan)
    assert all(torch.equal(got, want) for got, want in kept)
    report = g.report()
    assert len(report.graphs) == 8 and report.eager == ()
    assert sum(row.replays for row in report.graphs) == 120 - 8 * 3
    assert all(row.eager_s and row.graph_s and row.bytes > 0 for row in report.graphs), str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strides_alignment_modes_and_types(dtype: torch.dtype) -> None:
    w = torch.randn(48, 40, device="cuda", dtype=dtype)
    makes = [
        lambda: torch.randn(48, 16, device="cuda", dtype=dtype).t(),
        lambda: torch.randn(1, 48, device="cuda", dtype=dtype).expand(16, 48),
        lambda: torch.randn(16 * 48 + 1, device="cuda", dtype=dtype)[1:].view(16, 48),
        lambda: torch.randn(32, 48, device="cuda", dtype=dtype)[::2],
    ]

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ w, x.float().sum(-1)

    g = graph(fn)
    for i in range(48):
        x = makes[i % 4]()
        with torch.inference_mode() if i // 4 % 2 else torch.no_grad():
            got, want = g(x), fn(x)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), i
    assert len(g.report().graphs) == 8


def test_autocast() -> None:
    model = mlp()
    g = graph(model)
    for _ in range(7):
        x = torch.randn(5, 64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(g(x), model(x))
        assert torch.equal(g(x), model(x))
    assert len(g.report().graphs) == 2


def test_decode_with_a_static_cache() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 101}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).eval()

    def decode(step: Any, cache: Any) -> torch.Tensor:
        ids = torch.arange(7, device="cuda")[None]
        position, logits = 7, []
        with torch.inference_mode():
            out = model(ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(7, device="cuda"))
            for _ in range(12):
                token = out.logits[:, -1:].argmax(-1)
                at = torch.tensor([position], device="cuda")
                out = step(token, past_key_values=cache, use_cache=True, cache_position=at, position_ids=at[None])
                logits.append(out.logits)
                position += 1
        return torch.cat(logits, 1)

    def new_cache() -> Any:
        try:
            return transformers.StaticCache(config=config, max_cache_len=32)
        except TypeError:  # earlier versions ask for more
            return transformers.StaticCache(config, 1, max_cache_len=32, device="cuda", dtype=torch.bfloat16)

    want = decode(model, new_cache())
    g, cache = graph(model), new_cache()
    assert torch.equal(decode(g, cache), want)
    with torch.inference_mode():
        cache.reset()
    assert torch.equal(decode(g, cache), want)
    assert g.report().captures == 1 and g.report().graphs[0].replays == 24 - 3, str(g.report())


@pytest.mark.parametrize("none", [True, False])
def test_a_training_step_with_our_adamw(none: bool) -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Dropout(0.3), torch.nn.Linear(128, 1)).cuda()
    models = [first, copy.deepcopy(first)]
    optimizers = [AdamW(m.parameters(), lr=1e-2, max_norm=0.5) for m in models]

    def make(model: torch.nn.Module, optimizer: AdamW) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=none)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    steps = [make(m, o) for m, o in zip(models, optimizers, strict=True)]
    g = graph(steps[0])
    for i in range(20):
        x = torch.randn(16 if i % 2 else 5, 64, device="cuda")
        torch.cuda.manual_seed(i)
        got = g(x)
        torch.cuda.manual_seed(i)
        want = steps[1](x)
        assert torch.equal(got, want), i
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad), i
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
    assert len(g.report().graphs) == 2 and g.report().eager == (), str(g.report())


def test_a_learning_rate_on_the_gpu_may_change() -> None:
    pair = [torch.nn.Parameter(torch.ones(33, device="cuda")) for _ in range(2)]
    rates = [torch.tensor(0.1, device="cuda") for _ in pair]
    optimizers = [torch.optim.AdamW([p], lr=lr, capturable=True) for p, lr in zip(pair, rates, strict=True)]

    def make(i: int) -> Any:
        p, optimizer = pair[i], optimizers[i]

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()

        return step

    g, eager = graph(make(0)), make(1)
    for _ in range(9):
        x = torch.randn(33, device="cuda")
        g(x)
        eager(x)
        assert torch.equal(*pair)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"].mul_(0.9)
    assert g.report().captures == 1


def test_dropout_draws_new_numbers_from_every_generator() -> None:
    mine = torch.Generator("cuda").manual_seed(3)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.dropout(x, 0.5), torch.empty_like(x).normal_(generator=mine)

    def run(call: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.cuda.manual_seed(5)
        mine.manual_seed(7)
        return [call(torch.ones(100, device="cuda")) for _ in range(9)]

    g = graph(fn)
    want, got = run(fn), run(g)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert not torch.equal(got[-1][0], got[-2][0])
    assert g.report().captures == 1
    again = run(g)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(got, again, strict=True))


COUNTER = torch.zeros(3)


def items(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def masked(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def to_host(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).cpu()


def from_host(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(3).cuda()


def made_on_host(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0], device="cuda")


def put_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x.clone().index_put_((x > 0,), x[:1].expand(2))


def waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x * 2


def counts(x: torch.Tensor) -> torch.Tensor:
    COUNTER.add_(1)
    return x * 2


def draws(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(())


WRONG = [
    (items, "read back"),
    (masked, "hangs on values"),
    (to_host, "copied to the CPU"),
    (from_host, "copied from the CPU"),
    (made_on_host, "host"),
    (put_by_mask, "host waits|capture failed"),
    (waits, "capture failed"),
    (counts, "CPU tensor is changed"),
    (draws, "drawn on the CPU"),
]


@pytest.mark.parametrize(("fn", "reason"), WRONG, ids=[fn.__name__ for fn, _ in WRONG])
def test_what_cannot_be_captured_says_why_and_where(fn: Any, reason: str) -> None:
    g, x = graph(fn), torch.tensor([1.0, -1.0, 3.0], device="cuda")
    with pytest.warns(UserWarning, match=reason):
        for _ in range(8):
            got = g(x)
    (row,) = g.report().eager
    assert f"gpu_test.py:{fn.__code__.co_firstlineno + 1}" in row.line, row
    if fn is not draws:
        assert torch.equal(got, fn(x))
    good = graph(lambda x: torch.nn.functional.dropout(x * 2, 0.5))  # captures and draws still work
    for _ in range(6):
        good(x)
    assert good.report().captures == 1
    assert torch.isfinite(torch.randn(8, device="cuda")).all()


def test_a_step_of_an_optimizer_that_counts_on_the_cpu_is_refused_with_the_cure() -> None:
    p = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([p], foreach=False)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (p * x).sum().backward()
        optimizer.step()

    g = graph(step)
    with pytest.warns(UserWarning, match="sublight.AdamW"):
        for _ in range(4):
            g(torch.ones(3, device="cuda"))


def test_eviction_gives_memory_back() -> None:
    g = graph(lambda x: (x * 2).sin() + 1, warmup=1, memory_budget="128 MiB")
    for n in (2, 3, 4, 5, 6, 2, 3):
        x = torch.randn(n, 1 << 20, device="cuda")
        for _ in range(3):
            assert torch.equal(g(x), (x * 2).sin() + 1)
        report = g.report()
        assert report.held_bytes <= report.budget_bytes, str(report)
    assert g.report().evictions > 0
    g.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert g.report().held_bytes == 0


def test_replays_on_several_streams_wait_for_each_other() -> None:
    w = torch.randn(512, 512, device="cuda")

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ w)
        return x

    g, streams = graph(fn), [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(512, 512, device="cuda") for _ in range(24)]
    wants = [fn(x) for x in xs]
    torch.cuda.synchronize()
    outs = []
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 3]):
            outs.append(g(x))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got, want in zip(outs, wants, strict=True))
    assert g.report().captures == 1


def test_several_threads() -> None:
    model = mlp()
    g: Graph = graph(model)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.cuda.stream(stream):
                for i in range(30):
                    x = torch.randn(1 + i % 3, 64, device="cuda", generator=generator)
                    if not torch.equal(g(x), model(x)):
                        wrong.append((seed, i))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(g.report().graphs) == 3


def test_inside_another_capture_and_another_graph_it_passes_through() -> None:
    inner = graph(lambda x: x * 2)
    outer = graph(lambda x: inner(x) + 1)
    x = torch.randn(5, device="cuda")
    for _ in range(6):
        assert torch.equal(outer(x), x * 2 + 1)
    assert outer.report().captures == 1 and inner.report().captures == 0
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        y = inner(x)
    theirs.replay()
    assert torch.equal(y, x * 2)


def test_moved_parameters_are_captured_again() -> None:
    model = mlp()
    g, x = graph(model), torch.randn(3, 64, device="cuda")
    for _ in range(5):
        g(x)
    model.half().float()
    for _ in range(4):
        assert torch.equal(g(x), model(x))
    assert g.report().captures == 2 and len(g.report().graphs) == 1


def test_buckets() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(-1)

    g = graph(fn, buckets=True)
    for n in [1, 2, 3, 4, 5, 6, 7, 8] * 6:
        x = torch.randn(n, 50, device="cuda")
        assert torch.equal(g(x), fn(x))
    assert len(g.report().graphs) == 4


def test_a_launch_bound_call_pays_and_a_device_bound_one_does_not() -> None:
    small, large = torch.randn(64, device="cuda"), torch.randn(8192, 8192, device="cuda")

    def decode(x: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            x = x + 1
        return x

    one, other = graph(decode), graph(lambda x: x @ x @ x)
    for _ in range(12):
        one(small)
        other(large)
    assert one.report().graphs[0].pays and "launch-bound" in str(one.report())
    assert not other.report().graphs[0].pays and "device-bound" in str(other.report()), str(other.report())
