"""Hugging Face's models under the three rules that reach into a forward: the same loss, logits, gradients, tokens."""

from __future__ import annotations

import copy
import inspect
import io
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from sublight import correct
from sublight.fix.patch.conftest import error_of_all
from sublight.fix.patch.model import is_patched, patch, unpatch
from sublight.fix.patch.rules import lm_head, residual_norm, rope

RULES = (lm_head.LM_HEAD, residual_norm.RESIDUAL_NORM, rope.ROPE)
LAYERS, VOCAB, BATCH, TOKENS, PADDED = 2, 53, 2, 7, 3
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32, "eos_token_id": None}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2LMHeadModel", GPT2 | DROPOUT),
    "Llama": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2ForCausalLM", SIZES),
    "Qwen3": ("Qwen3ForCausalLM", SIZES),
    "Mistral": ("MistralForCausalLM", SIZES),
    "Gemma": ("GemmaForCausalLM", SIZES),
    "Gemma2": ("Gemma2ForCausalLM", SIZES),
    "Cohere": ("CohereForCausalLM", SIZES),  # neighbours are turned, logits scaled, no norm after a sum
}
SWAPS = {"GPT2": 1 + LAYERS, "Cohere": 1 + LAYERS}  # else a head, and two in each layer


def built(family: str) -> Any:
    name, sizes = FAMILIES[family]
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # norms' weights too: at one or zero, a wrong one would not show
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def padded() -> dict[str, Any]:
    """Sequences of which one starts late."""
    ids = torch.randint(2, VOCAB, (BATCH, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, :PADDED] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "labels": ids.masked_fill(mask == 0, -100),
    }


def step(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def check(ours: tuple[Any, dict[str, Any]], plain: tuple[Any, dict[str, Any]], truth: tuple[Any, Any]) -> None:
    """The loss and the gradients of a step, by the rule."""
    results = [[output.loss, *gradients.values()] for output, gradients in (ours, plain, truth)]
    assert (error := error_of_all(*results)).ok, error


def in_double(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        # some ask for a softmax in fp32, where a mask of float64's least number is -inf: a row of those has no softmax
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))
        return step(copy.deepcopy(model).double(), batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_same_and_comes_back(family: str) -> None:
    model, batch = built(family), padded()
    names, parameters = list(model.state_dict()), list(inspect.signature(model.forward).parameters)
    plain, gradients = step(model, batch)
    truth = in_double(model, batch)
    found = patch(model, rules=RULES)
    assert found.swapped == SWAPS.get(family, 1 + 2 * LAYERS), found.rows
    ours, our_gradients = step(model, batch)
    check((ours, our_gradients), (plain, gradients), truth)
    assert ours.logits is None and type(ours) is type(plain)
    with torch.no_grad():
        error = correct.error("logits", model(**batch).logits, plain.logits.detach(), truth[0].logits.detach())
        assert error.ok, error
    assert list(model.state_dict()) == names and list(inspect.signature(model.forward).parameters) == parameters
    assert unpatch(model) == found.swapped and not any(is_patched(module) for module in model.modules())
    again, _ = step(model, batch)
    assert torch.equal(again.loss, plain.loss) and torch.equal(again.logits, plain.logits)


@pytest.mark.parametrize("family", ("GPT2", "Gemma2"))
def test_cache_checkpoints_copies_and_pickles(family: str) -> None:
    model, batch = built(family), padded()
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    tokens = model.eval().generate(**prompt, **options)
    plain, gradients = step(model.train(), batch)
    truth = in_double(model, batch)
    swapped = patch(model, rules=RULES).swapped
    assert torch.equal(model.eval().generate(**prompt, **options), tokens)
    copied = copy.deepcopy(model.train())
    assert sum(is_patched(module) for module in copied.modules()) == swapped
    check(step(copied, batch), (plain, gradients), truth)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any(is_patched(module) for module in loaded.modules())
    assert torch.equal(step(loaded, batch)[0].logits, plain.logits)
    model.gradient_checkpointing_enable()
    check(step(model, batch), (plain, gradients), truth)


def test_it_is_one_graph() -> None:
    model, batch = built("Llama"), padded()
    plain, truth = step(model, batch), in_double(model, batch)
    patch(model, rules=RULES)
    torch._dynamo.reset()
    check(step(torch.compile(model, backend="eager", fullgraph=True), batch), plain, truth)


def test_autocast_gives_the_same() -> None:
    model, batch = built("Llama"), padded()
    truth = in_double(model, batch)
    patch(model, rules=RULES)
    with torch.autocast("cpu", torch.bfloat16):
        ours = step(model, batch)
        unpatch(model)
        plain = step(model, batch)
    assert torch.equal(ours[0].loss, plain[0].loss)
    check(ours, plain, truth)


def test_the_output_holds_what_else_was_asked_for() -> None:
    model, batch = built("Llama"), padded()
    wishes = {"output_hidden_states": True, "use_cache": True}
    plain, truth = (each(**batch, **wishes) for each in (model, copy.deepcopy(model).double()))
    patch(model, rules=RULES)
    ours = model(**batch, **wishes)
    assert len(ours.hidden_states) == LAYERS + 1 and ours.logits is None
    assert (error := error_of_all(*(each.hidden_states for each in (ours, plain, truth)))).ok, error
    assert ours.past_key_values.get_seq_length() == TOKENS
    assert isinstance(model(**batch, return_dict=False), tuple)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_a_step_is_as_right_as_before(family: str) -> None:
    from sublight.fix.patch import verify

    model = built(family).cuda().bfloat16()
    batch = {name: value.cuda() for name, value in padded().items()}
    known = verify.baseline(model, batch)
    one_each = {"Gemma": 1 + LAYERS, "Gemma2": 1 + LAYERS}  # whose norms add 1 in float32: left to them in 16 bits
    assert patch(model, rules=RULES).swapped == (one_each | SWAPS).get(family, 1 + 2 * LAYERS)
    verdict = known.judge(verify.step(model, batch))
    assert verdict.is_right and verdict.missing == ("logits",), verdict.sentence
