"""Tiny models with our attention against their eager selves, by the rule: causal, GQA, soft caps, sinks, padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from sublight import correct
from sublight.backend.launch import watching
from sublight.errors import BadInput
from sublight.fix.attention.hugging_face import use_in_transformers

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SMALL, **SPECIAL)
    elif kind == "gemma2":  # a soft cap, and a window in every other layer
        config = transformers.Gemma2Config(
            **SMALL | {"num_hidden_layers": 2}, **SPECIAL, sliding_window=4, query_pre_attn_scalar=16
        )
    else:
        config = transformers.GptOssConfig(**SMALL, **SPECIAL, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if kind == "gpt_oss":
        model.set_experts_implementation("eager")  # the other one has no float64
    return model


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_a_model_is_as_right_as_its_eager_self(kind: str, device: str) -> None:
    name = use_in_transformers(provider="flash")
    eager = model_of(kind).to(device)
    ours, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    ours.set_attn_implementation(name)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0)).to(device)
    padded = torch.ones_like(ids)
    padded[1, 5:] = 0  # on the right: eager in float64 gives NaN for a query that sees nothing

    def logits(model: Any, mask: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=ids, attention_mask=mask).logits
        return out[mask.bool()]

    for mask, has_kernels in ((torch.ones_like(ids), True), (padded, False)):
        with watching() as steps, torch.no_grad():
            found = logits(ours, mask)
        assert any(step.name == "_flash_kernel" for step in steps) == has_kernels
        with torch.no_grad():
            error = correct.error("logits", found, logits(eager, mask), logits(wide, mask))
        assert error.ok, error


def test_generation_and_training_run_on_it(device: str) -> None:
    name = use_in_transformers(provider="flash")
    eager = model_of("llama").to(device)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(name)
    ids = torch.arange(3, 9, device=device)[None]
    how = {"max_new_tokens": 2, "do_sample": False}
    with watching() as steps:
        found = ours.generate(ids, **how)
    assert torch.equal(found, eager.generate(ids, **how)) and len(steps) == 2
    losses = []
    for model in (ours, eager):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss)
        assert model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()
    assert abs(float(losses[0] - losses[1])) < 1e-5


def test_an_unknown_provider_gets_one_line() -> None:
    with pytest.raises(BadInput, match="use naive"):
        use_in_transformers(provider="flsh")
