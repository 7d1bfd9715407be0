"""Hugging Face's `sdpa` attention is ours where a call is understood, and stays theirs in every other call."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from sublight import correct
from sublight.fix.patch.model import is_patched, patch, unpatch
from sublight.fix.patch.rules import RULES, sdpa
from sublight.ops.attention.attention import plan, reference

ONLY = (sdpa.HF_SDPA,)
TOKENS, WINDOW = 6, 3
SIZES: dict[str, Any] = {
    **{"vocab_size": 53, "hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attn_implementation": "sdpa"},
}
PLAIN, WINDOWED, BOTH = {"window": None}, {"window": WINDOW}, {"causal": False, "window": None}
ENCODER = {
    name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
FAMILIES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "Llama": ("ForCausalLM", SIZES, [PLAIN]),
    "Qwen2": ("ForCausalLM", SIZES, [PLAIN]),
    "Qwen3": ("ForCausalLM", SIZES, [PLAIN]),
    "Mistral": ("ForCausalLM", SIZES | {"sliding_window": WINDOW}, [WINDOWED]),
    "Gemma3Text": ("Model", SIZES | {"sliding_window": WINDOW, "layer_types": ["sliding_attention"]}, [WINDOWED]),
    "GPT2": ("Model", {"vocab_size": 53, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}, [PLAIN]),
    "Bert": ("Model", ENCODER | {"vocab_size": 53}, [BOTH]),
    "ViT": ("Model", ENCODER | {"image_size": 8, "patch_size": 4}, [BOTH]),
}


def built(family: str, **more: Any) -> Any:
    kind, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, family.removesuffix("Text") + kind if kind != "Model" else family + kind)
    return model(getattr(transformers, f"{family}Config")(**{**sizes, **more})).eval()


def batch_for(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    return {"input_ids": torch.randint(2, 53, (2, TOKENS))}


class Spy:
    """Our attention, with what it was called with; its result is marked, so that it cannot pass for theirs."""

    def __init__(self, by: float = 0.0) -> None:
        self.by, self.calls = by, []  # type: ignore[var-annotated]

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.calls.append(options)
        return reference(q, k, v, **options) + self.by


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    """As on a GPU where ours wins at every size."""
    made = Spy()
    monkeypatch.setattr(sdpa, "attention", made)
    monkeypatch.setattr(sdpa, "SHORTEST", 2)
    monkeypatch.setattr(sdpa, "is_won", lambda *args: True)
    yield made


def truth_of(model: Any, batch: dict[str, Any]) -> Any:
    exact = copy.deepcopy(model).double()
    return exact(**{name: x.double() if x.is_floating_point() else x for name, x in batch.items()})[0]


def same(ours: Any, theirs: Any, truth: Any) -> bool:
    return correct.error("result", *(x.detach() for x in (ours, theirs, truth))).ok


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_swapped_and_back_bit_for_bit(family: str, spy: Spy) -> None:
    model = built(family)
    batch = batch_for(model)
    with torch.no_grad():
        before, truth = model(**batch)[0], truth_of(model, batch)
        found = patch(model, rules=ONLY)
        after = model(**batch)[0]
        assert found.swapped == 1 and found.rows[0].rule == "sdpa"
        wanted = FAMILIES[family][2]
        assert [{name: call[name] for name in each} for call, each in zip(spy.calls, wanted, strict=True)] == wanted
        assert same(after, before, truth)
        spy.by = 1.0
        assert not same(model(**batch)[0], before, truth)  # the comparison can fail
        assert unpatch(model) == 1
        assert torch.equal(model(**batch)[0], before) and not any(map(is_patched, model.modules()))


def test_beside_rope_both_are_in_one_forward(spy: Spy) -> None:
    model = built("Llama")
    batch = batch_for(model)
    before, truth = model(**batch)[0], truth_of(model, batch)
    found = patch(model, rules=[rule for rule in RULES if rule.name in ("rope", "sdpa")])
    assert {row.rule: row.is_swapped for row in found.rows} == {"rope": True, "sdpa": True}
    assert same(model(**batch)[0], before, truth) and len(spy.calls) == 1
    assert unpatch(model) == 1 and torch.equal(model(**batch)[0], before)


@pytest.mark.usefixtures("always_wins")
def test_verify_counts_it(spy: Spy) -> None:
    model = built("Mistral")
    ids = batch_for(model)["input_ids"][:1, :4]
    batch = {"input_ids": ids, "labels": ids}
    spy.by = 0.3
    left = patch(model, verify=batch, rules=ONLY).rows[0]
    assert not left.is_swapped and left.reason.startswith("undone: ")


def test_a_batch_tells_whether_it_wins() -> None:
    model = built("Llama")
    (row,) = patch(model, batch_for(model), rules=ONLY).rows
    assert not row.is_swapped and "2048 or more" in row.reason


def test_the_plan_is_asked_with_what_the_forward_gives(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(sdpa, "plan", lambda *args, **options: asked.append((args, options)) or plan(*args, **options))
    model = built("Mistral")
    (row,) = patch(model, batch_for(model) | {"use_cache": True}, rules=ONLY).rows
    (q, k, _), options = asked[0]
    assert q.shape == (2, 2, TOKENS, 64) and k.shape == (2, 1, TOKENS, 64) and options["window"] == WINDOW
    assert not row.is_swapped and row.reason == plan(*asked[0][0], **options).reason
    assert not asked[0][0][0].requires_grad and len(spy.calls) == 0


@pytest.mark.parametrize(
    ("kind", "word"), [("eager", "weights"), ("flex_attention", "flex_attention"), ("paged|eager", "paged")]
)
def test_other_attentions_are_left_by_name(kind: str, word: str) -> None:
    model = built("Llama")
    model.config._attn_implementation = kind
    (row,) = patch(model, rules=ONLY).rows
    assert not row.is_swapped and word in row.reason


def test_a_padded_batch_and_a_cache_are_theirs(spy: Spy) -> None:
    model = built("Mistral")
    ids = batch_for(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask)[0], model.generate(ids, max_new_tokens=3, do_sample=False)
        patch(model, rules=ONLY)
        after = model(ids, attention_mask=mask)[0]
        assert not spy.calls and torch.equal(after, before[0])
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, before[1]) and len(spy.calls) == 1  # the prompt's


def test_copies_and_pickles(spy: Spy) -> None:
    model = built("Llama")
    batch = batch_for(model)
    patch(model, rules=ONLY)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    copied(**batch)
    assert len(spy.calls) == 1
    loaded(**batch)
    assert len(spy.calls) == 1 and not any(map(is_patched, loaded.modules()))


def test_a_model_without_memory_and_a_traced_one_have_theirs(spy: Spy) -> None:
    model = built("Llama").requires_grad_(False)
    patch(model, rules=ONLY)
    ids = batch_for(model)["input_ids"]
    torch.jit.trace(lambda x: model(x, use_cache=False)[0], (ids,), check_trace=False)
    assert model.to("meta")(ids.to("meta"))[0].is_meta and not spy.calls


def test_a_compiler_sees_theirs(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("Llama")
    patch(model, rules=ONLY)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model(**batch_for(model))
    assert not spy.calls


def _not_causal(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **named: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, attention_mask, scaling=named.get("softcap"), is_causal=False)


def _another_scale(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, scaling: Any = None, **named: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling or 0.5)


def _no_mask(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, scaling: Any = None, **named: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, None, scaling=scaling)


def _windowed(
    module: Any, q: Any, k: Any, v: Any, attention_mask: Any, sliding_window: Any = None, **named: Any
) -> Any:
    return sdpa_attention_forward(module, q * (2 if sliding_window else 1), k, v, attention_mask)


def _reads_more(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **named: Any) -> Any:
    return sdpa_attention_forward(module, q * named.get("lift", 1), k, v, attention_mask)


def _hands_on(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **named: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, attention_mask, **named)


def _gives_weights(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, scaling: Any = None, **named: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling)[0], q


def _raises(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **named: Any) -> Any:
    raise RuntimeError


WRONG = (_not_causal, _another_scale, _no_mask, _windowed, _reads_more, _hands_on, _gives_weights, _raises)


def test_another_sdpa_is_not_proven() -> None:
    assert sdpa.unproven(sdpa_attention_forward) == ""
    assert [wrong.__name__ for wrong in WRONG if not sdpa.unproven(wrong).startswith("values not proven")] == []


def test_the_table_is_what_the_rule_thinks() -> None:
    assert isinstance(ALL_ATTENTION_FUNCTIONS, AttentionInterface)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
