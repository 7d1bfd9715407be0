"""A config.json that is broken is refused in a line; a key that it leaves out is what Hugging Face takes it for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sublight.engines.generate import config as configs
from sublight.engines.generate.rope import Llama3
from sublight.errors import BadInput

ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "rope_parameters": ROPE},
}
WINDOWS: dict[str, Any] = {"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers '2', which is not a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers '-1'"),
        ({"max_position_embeddings": 1e308}, "max_position_embeddings"),
        ({"num_attention_heads": 33}, "head_dim '0'"),
        ({"num_key_value_heads": 3}, "4 heads of 8 for 3 of keys"),
        ({"head_dim": 7}, "4 heads of 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps 'nan', which is not a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false', which is not true or false"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id"),
        ({"rope_parameters": [1]}, "rope_parameters '[1]', which is not an object"),
        ({"rope_parameters": {**ROPE, "factor": None}}, "has no factor"),
        ({"rope_parameters": {**ROPE, "high_freq_factor": 1}}, "low_freq_factor 1, which is not below"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta '-1'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "has no factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 32}}, "beta_fast 32, which is not"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}}, "rope_theta of at most 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters that differ"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "positions by 'full_attention'"),
        ({"rope_parameters": {**ROPE, "apply_yarn_scaling": False}}, "positions by 'apply_yarn_scaling'"),
        ({"rope_parameters": {"factor": 2.0}}, "factor of positions without a rope_type"),
        ({"rope_parameters": {"rope_type": "", "factor": 2.0}}, "rope_type ''"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than full_attention in all 2"),
        ({"layer_types": ["full_attention"]}, "layer_types other than full_attention in all 2"),
        (
            {"model_type": "mistral", "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2},
            "layer_types other than sliding_attention",
        ),
        ({**WINDOWS, "layer_types": ["full_attention"]}, "layer_types other than full_attention or sliding_attention"),
        ({**WINDOWS, "layer_types": ["full_attention", "chunked_attention"]}, "layer_types other than"),
        ({**WINDOWS, "layer_types": "sliding_attention"}, "layer_types other than"),
        ({**WINDOWS, "max_window_layers": -1}, "max_window_layers '-1', which is not a whole number from 0"),
        ({**WINDOWS, "sliding_window": 0, "max_window_layers": 0}, "sliding_window '0'"),
        ({**WINDOWS, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "layer_types other than"),
        ({**WINDOWS, "sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "layer_types other than"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, which `generate` does not compute"),
        ({"is_causal": False}, "is_causal False"),
        ({"residual_multiplier": 0.2}, "residual_multiplier 0.2"),
        ({"quantization_config": "awq"}, "quantization_config 'awq', which is not an object"),
    ],
)
def test_what_is_broken_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **changes}))
    with pytest.raises(BadInput) as error:
        configs.read(tmp_path)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("words", ["[1]", "null", '"llama"', "[" * 100_000])
def test_a_file_that_holds_no_object_is_refused(words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(words)
    with pytest.raises(BadInput, match="is no JSON"):
        configs.read(tmp_path)


@pytest.mark.parametrize("kind", configs.TYPES)
def test_keys_left_out_are_hugging_faces(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    data = {**SIZES, "model_type": kind, "num_attention_heads": 32, "hidden_size": 256}
    theirs, ours = transformers.AutoConfig.for_model(**data), configs.of_json(data, "here")
    found = (ours.longest, ours.kv_heads, ours.window(0), ours.ends, ours.eps)
    ends = () if theirs.eos_token_id is None else (theirs.eos_token_id,)
    window = theirs.sliding_window if kind == "mistral" else None
    expected = (theirs.max_position_embeddings, theirs.num_key_value_heads, window, ends, theirs.rms_norm_eps)
    assert found == expected
    original = theirs.rope_parameters["original_max_position_embeddings"]
    assert ours.scaling == Llama3(factor=2.0, low=1.0, high=4.0, original=original)
    assert ours.head_dim == (128 if kind == "qwen3" else 8)


KINDS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {**ROPE, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, not rounded": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                          "truncate": False},
    "yarn of deepseek": {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7,
                         "mscale_all_dim": 1.1, "original_max_position_embeddings": 64},
    "yarn, amplitude given": {"rope_type": "yarn", "factor": 0.5, "attention_factor": 1.25},
    "an old file's": {"type": "linear", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("rope", KINDS.values(), ids=list(KINDS))
def test_frequencies_are_hugging_faces(rope: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    key = "rope_parameters" if "rope_type" in rope else "rope_scaling"
    data = {**SIZES, "hidden_size": 128, "max_position_embeddings": 512, "rope_theta": 5e3, "rope_parameters": None}
    theirs = LlamaConfig(**{**data, key: dict(rope)})
    kind = theirs.rope_parameters["rope_type"]
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    ours = configs.of_json({**data, key: rope}, "here")
    assert ours.frequencies() == pytest.approx(frequencies.tolist(), rel=1e-5) and ours.theta == 5e3
    assert ours.amplitude == pytest.approx(amplitude)
    assert ours.frequencies() != pytest.approx([5e3 ** (-2 * pair / 32) for pair in range(16)], rel=1e-2)


def test_dynamic_turns_as_hugging_face_does_up_to_the_positions_where_texts_end() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    data = {**SIZES, "max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    ours, theirs = configs.of_json(data, "here"), LlamaConfig(**data)
    for length, is_alike in ((1, True), (ours.longest, True), (ours.longest + 1, False)):
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=length)
        assert (ours.frequencies() == pytest.approx(frequencies.tolist(), rel=1e-6)) == is_alike
        assert amplitude == ours.amplitude == 1


def test_both_forms_of_rope_may_agree() -> None:
    old = {"type": "linear", "factor": 2.0}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    found = configs.of_json({**SIZES, "rope_scaling": old, "rope_parameters": new}, "here")
    assert found == configs.of_json({**SIZES, "rope_parameters": new}, "here") and found.theta == 77


@pytest.mark.parametrize(("kind", "layer"), [("qwen3", "full_attention"), ("mistral", "sliding_attention")])
def test_layers_that_are_said_to_be_what_they_are(kind: str, layer: str) -> None:
    plain = {**SIZES, "model_type": kind, "num_key_value_heads": 4}
    said = {**plain, "layer_types": [layer] * 2, "attn_logit_softcapping": None, "logits_scaling": 1.0}
    assert configs.of_json(said, "here") == configs.of_json(plain, "here")


@pytest.mark.parametrize(
    "changes",
    [
        *({"max_window_layers": first} for first in (0, 1, 2, None)),
        {"max_window_layers": 0, "sliding_window": None},
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window": 7, "use_sliding_window": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_are_hugging_faces(kind: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    data = {name: x for name, x in {**SIZES, **WINDOWS, **changes}.items() if name == "sliding_window" or x is not None}
    theirs = transformers.AutoConfig.for_model(**{**data, "model_type": kind})
    expected = [theirs.sliding_window if each == "sliding_attention" else None for each in theirs.layer_types]
    ours = configs.of_json({**data, "model_type": kind}, "here")
    assert [ours.window(layer) for layer in range(2)] == expected


def test_yarn_lengthens_a_model_whose_positions_are_the_first_trainings() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for positions, longest in ((64, 256), (512, 512)):
        data = {**SIZES, "max_position_embeddings": positions, "rope_parameters": rope}
        assert configs.of_json(data, "here").longest == longest
