"""Hugging Face's `generate()` over our pages gives its own tokens: padded, windowed, with graphs of each scope."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from sublight.errors import BadInput
from sublight.fix.attention.paged_cache import SCOPES, Scope, paged_cache
from sublight.fix.graph.fake import Fake

pytestmark = pytest.mark.usefixtures("one_thread")
COMMON: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None},
    **{"pad_token_id": 0},
}
NEW = 6  # three that warm a graph up, one that captures it, two replays


@pytest.fixture(scope="module")
def model() -> Any:
    """With a window, so that what a new token sees is more than a length; in fp64, which PyTorch's ops compute."""
    torch.manual_seed(5)
    made = transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON, sliding_window=9)).eval().double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return made


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Any]:
    return [model.generate(**prompt(seed)) for seed in (1, 2)]


def prompt(seed: int) -> dict[str, Any]:
    ids = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :10] = 0, 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}


@pytest.mark.parametrize("scope", SCOPES)
def test_tokens_are_hugging_faces(model: Any, expected: list[Any], scope: Scope) -> None:
    before = model.config._attn_implementation
    with paged_cache(model, batch=3, tokens=11 + NEW, page=4, scope=scope, backend=Fake()) as cache:
        first = model.generate(**prompt(1), past_key_values=cache)
        cache.reset()
        second = model.generate(**prompt(2), past_key_values=cache)  # the graph that the first one made holds
        report = cache.report()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
    assert (report is None) == (scope == "none")
    assert report is None or "1 captured" in str(report)
    assert model.config._attn_implementation == before


@pytest.mark.gpu
def test_a_gpu_gives_the_same_tokens() -> None:
    torch.manual_seed(5)
    sizes = COMMON | {"hidden_size": 128, "intermediate_size": 256}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval().cuda()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    given = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in prompt(1).items()}
    given["max_new_tokens"] = 24
    expected = made.generate(**given)
    for scope in SCOPES:
        with paged_cache(made, batch=3, tokens=35, scope=scope) as cache:
            assert torch.equal(made.generate(**given, past_key_values=cache), expected), scope
            assert scope == "none" or cache.report().captures == 1


def test_what_it_is_not_for_is_refused(model: Any) -> None:
    with pytest.raises(BadInput, match="unknown scope 'all'"), paged_cache(model, batch=1, tokens=9, scope="all"):  # type: ignore[arg-type]
        pass
    with pytest.raises(BadInput, match="0 texts"), paged_cache(model, batch=0, tokens=9):
        pass
    given = prompt(1)
    with paged_cache(model, batch=3, tokens=14, scope="none") as cache:
        with pytest.raises(BadInput, match="3 texts of 15 tokens do not fit a cache for 3 texts of 14 tokens"):
            model.generate(**given, past_key_values=cache)
        with pytest.raises(BadInput, match="lost its pages"):
            model(given["input_ids"][:, :1])  # without the cache
        cache.seen = 11
        with pytest.raises(BadInput, match="call its reset"):
            model(given["input_ids"][:, :2], past_key_values=cache)
    with paged_cache(model, batch=3, tokens=30, scope="none") as cache:
        given["attention_mask"] = given["attention_mask"].flip(1)
        with pytest.raises(BadInput, match="pad on the left"):
            model.generate(**given, past_key_values=cache)
