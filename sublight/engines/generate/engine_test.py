"""Greedy tokens are Hugging Face's, whatever the batching, the chunks, the pages; drawn ones are each request's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch

from sublight.engines.generate import config as configs
from sublight.engines.generate import weights
from sublight.engines.generate.engine import Engine, Request
from sublight.engines.generate.layers import Mode
from sublight.engines.generate.llama import Llama
from sublight.engines.generate.sampling import NONE, Draw, Sampling, choose, largest
from sublight.engines.generate.scheduler import Chunk, Text
from sublight.errors import BadInput
from sublight.fix.graph.fake import Fake

COMMON: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None},
    **{"pad_token_id": None},
}
LLAMA_3 = {
    **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e4},
    **{"original_max_position_embeddings": 32},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
TYPES = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, attention_bias=True)),
    "llama 3": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA_3, tie_word_embeddings=True)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**COMMON, head_dim=16, rope_parameters=YARN)
    ),
    "qwen2, windows": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3, windows": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**COMMON, head_dim=16, use_sliding_window=True, sliding_window=5, layer_types=TYPES)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON, sliding_window=9)),
}
PROMPTS = [
    [5, 17, 3, 9, 44, 2, 71, 8],
    [5, 17, 3, 9, 44, 2, 71, 8, 30, 31],
    [1],
    list(range(60, 83)),
    [5, 17, 3, 9, 44],
]
NEW = [12, 7, 15, 9, 11]


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A random model of theirs in a folder, and its own greedy tokens, one prompt at a time."""
    torch.manual_seed(11)
    model = MODELS[request.param]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)  # biases and norms count, too
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    out = []
    for prompt, new in zip(PROMPTS, NEW, strict=True):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, use_cache=False)
        out.append(tokens[0, len(prompt) :].tolist())
    return folder, out


def model_of(folder: Path, mode: Mode = "eager") -> Llama:
    config = configs.read(folder)
    return Llama(config, weights.load(config, folder, dtype=torch.float32, device="cpu"), mode=mode)


@pytest.mark.parametrize(
    "how",
    [
        {"pages": 40, "page": 4, "most_texts": 8, "most_tokens": 64, "ahead": True},  # all at once
        {"pages": 40, "page": 4, "most_texts": 1, "most_tokens": 64},  # one after another: beginnings are reused
        {"pages": 8, "page": 4, "most_texts": 8, "most_tokens": 64, "ahead": True},  # too few pages: some are preempted
        {"pages": 40, "page": 3, "most_texts": 3, "most_tokens": 5},  # prefill in chunks
        {"pages": 9, "page": 5, "most_texts": 5, "most_tokens": 3, "ahead": True},  # all of it
        {"pages": 40, "page": 4, "most_texts": 8, "most_tokens": 64, "graphs": Fake(), "ahead": True},  # buckets
    ],
    ids=["batched", "alone", "preempted", "chunked", "tight", "buckets"],
)
def test_greedy_tokens_are_hugging_faces(saved: tuple[Path, list[list[int]]], how: dict[str, Any]) -> None:
    folder, expected = saved
    engine = Engine(model_of(folder), **how)
    requests = [Request(prompt, new) for prompt, new in zip(PROMPTS, NEW, strict=True)]
    texts = [engine.add(request) for request in requests]
    while not engine.scheduler.is_idle:
        engine.step()
    assert [request.new for request in requests] == expected
    assert {request.finish for request in requests} == {"length"}
    assert engine.scheduler.pages.free == how["pages"]
    if how["most_texts"] == 1:
        assert sum(text.reused for text in texts) > 0
    if how["pages"] == 8:
        assert sum(text.preempted for text in texts) > 0


@pytest.mark.parametrize("saved", ["mistral", "qwen2, windows"], indirect=True)
def test_our_ops_give_the_same_tokens(saved: tuple[Path, list[list[int]]]) -> None:
    folder, expected = saved
    engine = Engine(model_of(folder, "ours"), pages=12, page=4, most_tokens=6)
    request = Request(PROMPTS[0], 3)
    assert [token for _, token in engine.run([request])] == expected[0][:3]


def drawn_out(model: Llama, *, ahead: bool, graphs: Any) -> tuple[list[list[int]], list[str], int]:
    """Texts that end by a token, by a stop word and by length, one cancelled on its way, one that comes late: their
    tokens, how they ended, and how many steps were launched before the last one's tokens were read."""
    engine = Engine(model, pages=40, page=4, most_texts=3, graphs=graphs, ahead=ahead)
    requests = [Request(prompt, 14) for prompt in PROMPTS]
    requests[1].ends = frozenset(range(0, 97, 4))
    requests[2].is_stopped = lambda new: new[-1] % 5 == 3
    texts = [engine.add(request) for request in requests[:4]]
    early = 0
    for number in range(200):
        if engine.scheduler.is_idle:
            break
        engine.step()
        early += engine._flight is not None
        if number == 4:
            engine.cancel(texts[0])
            engine.add(requests[4])
    assert engine.scheduler.is_idle and engine.scheduler.pages.free == 40
    return [request.new for request in requests[1:]], [request.finish for request in requests[1:]], early


def test_a_step_ahead_changes_no_token(tiny: Llama) -> None:
    plain, early = (drawn_out(tiny, ahead=ahead, graphs=Fake()) for ahead in (False, True))
    assert plain[:2] == early[:2] and "stop" in early[1] and "length" in early[1]
    assert plain[2] == 0 and early[2] > 5


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
def test_a_step_ahead_changes_no_token_on_a_gpu(graphs: bool) -> None:
    config = configs.of_json({**COMMON, "model_type": "llama", "hidden_size": 128, "intermediate_size": 256}, "here")
    model = Llama(config, weights.random(config, dtype=torch.bfloat16, device="cuda"))
    plain, early = (drawn_out(model, ahead=ahead, graphs=graphs) for ahead in (False, True))
    assert plain[:2] == early[:2] and plain[2] == 0 and early[2] > 5


@pytest.fixture(scope="module")
def tiny() -> Llama:
    data = {**COMMON, "model_type": "llama"}
    config = configs.of_json(data, "here")
    return Llama(config, weights.random(config, dtype=torch.float32, device="cpu"), mode="eager")


def test_what_is_drawn_is_the_requests_own(tiny: Llama) -> None:
    """The same tokens alone, in a batch, in chunks and with preemption; others with another seed."""

    def tokens(**how: Any) -> list[list[int]]:
        requests = [Request(p, 10, Sampling(temperature=1.5, top_p=0.9, seed=n)) for n, p in enumerate(PROMPTS)]
        list(Engine(tiny, **how).run(requests))
        return [request.new for request in requests]

    alone = tokens(pages=40, page=4, most_texts=1)
    assert alone == tokens(pages=40, page=4) == tokens(pages=9, page=4, most_tokens=7)
    assert alone[0] != tokens(pages=40, page=4, most_texts=1)[1]


def test_a_text_ends_where_it_is_told(tiny: Llama) -> None:
    plain = Request(PROMPTS[0], 12)
    list(Engine(tiny, pages=20).run([plain]))
    ended = Request(PROMPTS[0], 12, ends=frozenset({plain.new[3]}))
    stopped = Request(PROMPTS[0], 12, is_stopped=lambda new: len(new) == 5)
    list(Engine(tiny, pages=20).run([ended, stopped]))
    assert ended.new == plain.new[: plain.new.index(plain.new[3]) + 1] and ended.finish == "stop"
    assert stopped.new == plain.new[:5] and stopped.finish == "stop"


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=1.0), Sampling(logprobs=2)], ids=str)
def test_logits_that_are_no_numbers_end_their_text_alone(tiny: Llama, how: Sampling) -> None:
    """As where activations pass what fp16 holds: token 0 for ever, without a word."""
    broken = Llama(tiny.config, replace(tiny.weights, tokens=tiny.weights.tokens.clone()), mode="eager")
    broken.weights.tokens[1] = torch.nan  # of the third prompt alone
    bias = {1: -100.0} if how.is_drawn else {}
    requests = [Request(prompt, 3, replace(how, bias=bias)) for prompt in ([5, 17], [3], [4, 1, 9], [8])]
    engine = Engine(broken, pages=20, page=4)
    list(engine.run(requests))
    assert [request.finish for request in requests] == ["length", "length", "failed", "length"]
    assert [len(request.new) for request in requests] == [3, 3, 0, 3] and engine.scheduler.pages.free == 20


def test_a_drawn_text_ends_where_its_logits_become_no_numbers(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = Engine(tiny, pages=20), []

    def later(logits: torch.Tensor, *rest: Any) -> Any:
        calls.append(1)
        return choose(logits * (torch.inf if len(calls) == 3 else 1), *rest)

    monkeypatch.setattr("sublight.engines.generate.engine.choose", later)
    request = Request([5, 17], 9, Sampling(temperature=1.0))
    assert [token for _, token in engine.run([request])][2:] == [NONE]
    assert (request.finish, len(request.new)) == ("failed", 2)


def test_a_cancelled_text_gives_its_pages_back(tiny: Llama) -> None:
    engine = Engine(tiny, pages=20, page=4)
    text = engine.add(Request(PROMPTS[3], 20))
    other = Request(PROMPTS[0], 5)
    engine.add(other)
    engine.step()
    engine.cancel(text)
    while not engine.scheduler.is_idle:
        engine.step()
    assert engine.scheduler.pages.free == 20 and len(other.new) == 5


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [([1, 2], 0, "give 1 or more"), ([1] * 100, 40, "more than the model's 128"), ([97], 1, "outside of 0 to 96"),
     ([], 3, "without tokens"), ([1] * 60, 30, "do not fit into a cache of 80")],
)  # fmt: skip
def test_requests_that_cannot_be(tiny: Llama, prompt: list[int], new: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Engine(tiny, pages=5).add(Request(prompt, new))


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.69}, {0}),
        ({"min_p": 0.2}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_what_is_cut_off_is_never_drawn(how: dict[str, Any], kept: set[int]) -> None:
    chances = torch.tensor([0.7, 0.18, 0.08, 0.04])
    draws = [Draw(Sampling(temperature=1.0, seed=seed, **how), [], 4, chances.device) for seed in range(1000)]
    logits = chances.log().expand(1000, 4)
    drawn = Counter(choose(logits, logits.argmax(-1), draws)[0])
    assert set(drawn) == kept
    whole = sum(chances[token].item() for token in kept)
    for token in kept:
        chance = chances[token].item() / whole
        assert abs(drawn[token] - 1000 * chance) <= 5 * (1000 * chance * (1 - chance)) ** 0.5  # 5 sigma


@pytest.mark.parametrize("vocab", (97, 512, 1024))
def test_the_largest_is_the_first_of_equals(vocab: int) -> None:
    logits = torch.randint(0, 40, (9, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    logits[0], logits[1, 5] = 1.0, torch.nan
    assert largest(logits).tolist() == logits.argmax(-1).tolist()


def adjusted(how: Sampling, prompt: list[int], logits: list[float], steps: int) -> list[int]:
    draw, row = Draw(how, prompt, len(logits), torch.device("cpu")), torch.tensor([logits])
    return [choose(row, row.argmax(-1), [draw])[0][0] for _ in range(steps)]


def test_penalties_and_bias_are_as_defined() -> None:
    logits = [2.0, 1.9, 1.5, -1.0]
    assert adjusted(Sampling(frequency=0.2), [], logits, 4) == [0, 1, 0, 1]  # 1.8 < 1.9; 1.7 < 1.8; 1.6 < 1.7
    assert adjusted(Sampling(presence=0.2), [], logits, 3) == [0, 1, 0]  # once, however often
    assert adjusted(Sampling(repetition=2.0), [0], logits, 3) == [1, 2, 0]  # the prompt counts, too
    assert adjusted(Sampling(bias={3: 10.0}), [], logits, 2) == [3, 3]
    with pytest.raises(BadInput, match="logit_bias has token 4"):
        adjusted(Sampling(bias={4: 1.0}), [], logits, 1)


def test_a_temperature_next_to_nothing_takes_the_likeliest() -> None:
    assert adjusted(Sampling(temperature=1e-30), [], [5.0, 6.0, 1.0], 2) == [1, 1]
    assert adjusted(Sampling(temperature=1e-5), [], [5.0, 6.0, 1.0], 2) == [1, 1]


def test_logprobs_are_the_models_own(tiny: Llama) -> None:
    """Whatever the temperature, beside requests without."""
    request = Request(PROMPTS[0], 3, Sampling(temperature=2.0, top_k=1, logprobs=2))
    list(
        Engine(tiny, pages=40).run([Request(PROMPTS[1], 3), request, Request(PROMPTS[2], 3, Sampling(temperature=1.0))])
    )
    engine = Engine(tiny, pages=40)
    text = engine.add(Request(PROMPTS[0], 1))
    (chunk,) = engine.scheduler.next_step()
    every = torch.log_softmax(engine._prefill(chunk)[0], -1)
    assert text.tokens == PROMPTS[0] and len(request.logprobs) == 3
    values, places = every.topk(2)
    assert [token for token, _ in request.logprobs[0].best] == places.tolist()
    torch.testing.assert_close(torch.tensor([value for _, value in request.logprobs[0].best]), values)
    assert request.new[0] == places[0] and request.logprobs[0].chosen == request.logprobs[0].best[0][1]


@pytest.mark.parametrize(
    "how",
    [{"pages": 40}, {"pages": 40, "most_tokens": 3}, {"pages": 40, "most_tokens": 1}, {"pages": 8, "most_tokens": 7}],
    ids=["whole", "chunks", "tokens", "preempted"],
)
def test_logprobs_of_a_prompt_are_the_models_own(saved: tuple[Path, list[list[int]]], how: dict[str, Any]) -> None:
    """Of each token behind the first, though others have computed the same beginning before."""
    folder, expected = saved
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = [
        Request(prompt, new, Sampling(logprobs=place % 3), with_prompt=place % 2 == 0)
        for place, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True))
    ]
    engine = Engine(model_of(folder), page=4, most_texts=5, **how)
    texts = [engine.add(request) for request in requests]
    while not engine.scheduler.is_idle:
        engine.step()
    assert [request.new for request in requests] == expected
    assert sum(text.preempted for text in texts) > 0 or how["pages"] == 40
    for place, request in enumerate(requests):
        if not request.with_prompt:
            assert not request.prompt_logprobs
            continue
        with torch.no_grad():
            every = torch.log_softmax(model(torch.tensor([request.prompt])).logits[0], -1)
        assert len(request.prompt_logprobs) == len(request.prompt) - 1
        for row, token, found in zip(every, request.prompt[1:], request.prompt_logprobs, strict=False):
            assert found.chosen == pytest.approx(row[token].item(), abs=1e-4)
            assert [token for token, _ in found.best] == row.topk(place % 3).indices.tolist()


def test_a_batch_that_cannot_be_captured_is_launched(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Request(PROMPTS[0], 5)
    list(Engine(tiny, pages=40).run([plain]))
    monkeypatch.setattr(Fake, "capture", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    engine, request = Engine(tiny, pages=40, graphs=Fake()), Request(PROMPTS[0], 5)
    with pytest.warns(RuntimeWarning, match="no CUDA graph for a batch of 1: out of memory") as seen:
        list(engine.run([request]))
    assert request.new == plain.new and len(seen) == 1 and engine.decoder.graph_count == 0


def test_a_text_that_began_anew_has_its_new_pages(tiny: Llama) -> None:
    """After preemption: as many pages in the same row, and others."""
    decoder = Engine(tiny, pages=40, page=4).decoder
    text = Text([1] * 6, 20, pages=[3, 4], cached=5, begun=1)
    decoder._write([Chunk(text, 5, 1)], 1, 2, None)
    text.pages, text.begun = [7, 9], 2
    decoder._write([Chunk(text, 5, 1)], 1, 2, None)
    assert decoder._table_there[:2].tolist() == [7, 9]
    assert decoder._numbers_there[:, 0].tolist() == [0, 5, 9 * 4 + 1, 6, 1, 0]  # its token is the first of ID
