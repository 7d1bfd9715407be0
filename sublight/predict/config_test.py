"""A config is read as its class reads it, and one that cannot be is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.predict import config, model
from sublight.report.predict import data

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def test_a_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = config.load(str(tmp_path)), config.load(str(tmp_path / "config.json"))
    assert by_folder == config.load(str(tmp_path / "config.json"))
    assert model.parameters(by_file) == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 2 * 256 * 64 + 64


def test_the_text_part_of_a_larger_model_is_read() -> None:
    whole = {"model_type": "llava", "text_config": LLAMA}
    found = config.from_config(whole)
    assert found.hidden == 64 and "text part alone" in data.notes_of(found, 16)[0]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [({"quant_method": "gptq", "bits": 4}, "gptq of 4 bits"), ({"quant_method": "mxfp4"}, "mxfp4"), (None, "")],
)
def test_weights_that_are_published_in_fewer_bits_are_named(quantization: Any, words: str) -> None:
    found = config.from_config({**LLAMA, "quantization_config": quantization})
    assert found.stored == words and bool(data.notes_of(found, 16)) == bool(words) and not data.notes_of(found, 4)


def test_models_that_fit_as_published_say_so() -> None:
    stored = {name: config.load(name).stored for name in config.known_names()}
    assert {name: words for name, words in stored.items() if words} == {
        "deepseek-v3": "fp8", "kimi-k2": "fp8", "gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "biases"),
    [("llama", True, 64 + 64 + 64), ("mistral", True, 0), ("qwen3", True, 64 + 64 + 64), ("gemma", True, 64 + 64 + 64)],
)
def test_biases_as_the_class_has_them(kind: str, given: bool, biases: int) -> None:
    """Of a layer: queries, keys and values (of 64, 32 and 32), and the output."""
    plain, biased = ({**LLAMA, "model_type": kind, "attention_bias": bias} for bias in (False, given))
    counts = [model.parameters(config.from_config(each)) for each in (plain, biased)]
    assert counts[1] - counts[0] == 2 * biases


def test_experts_as_transformers_5_writes_them() -> None:
    moe = {**LLAMA, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert config.from_config({**moe, "num_local_experts": 8}) == config.from_config({**moe, "num_experts": 8})


def test_dense_first_layers_and_experts_differ() -> None:
    found = config.load("deepseek-v3")
    assert [(block.count, block.experts is None) for block in found.blocks] == [(3, True), (58, False)]


def test_sparse_steps_and_dense_layers() -> None:
    moe = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe |= {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    blocks = config.from_config(moe).blocks
    assert {(block.count, block.experts is None) for block in blocks} == {(4, True), (2, False)}


def test_layer_types_say_which_layers_have_a_window() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    found = config.from_config({**LLAMA, "num_hidden_layers": 3, "sliding_window": 16, "layer_types": types})
    assert [(block.count, block.window) for block in found.blocks] == [(2, 16), (1, None)]
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
    assert config.from_config(qwen).blocks[0].window is None  # unless it says so
    used = config.from_config({**qwen, "use_sliding_window": True})
    assert [(block.count, block.window) for block in used.blocks] == [(1, None), (1, 16)]
    unused = config.from_config({**LLAMA, "sliding_window": 16, "use_sliding_window": False})
    assert unused.blocks[0].window is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': it must be a whole number"),
        ({"num_hidden_layers": True}, "must be a whole number"),
        ({"num_attention_heads": 0}, "gives a heads of 0"),
        ({"num_key_value_heads": 3}, "they must divide"),
        ({"model_type": None}, "lacks model_type"),
        ({"model_type": "mamba"}, "model_type 'mamba', which is not known"),
        ({"index_topk": 2048}, "sparse attention"),
    ],
)
def test_a_bad_config_is_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        config.from_config({**LLAMA, **change}, name="mine")
    assert words in str(caught.value) and "mine" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_file_that_is_no_config(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(BadInput, match="config"):
        config.load(str(path))


@pytest.mark.parametrize(
    ("words", "near"),
    [("lama-3-8b", "llama-3-8b"), ("gpt3", "gpt2"), ("nowhere.json", "no file"), ("", "no config")],
)
def test_an_unknown_model_names_the_nearest(words: str, near: str) -> None:
    with pytest.raises(BadInput, match=near):
        config.load(words)


def test_names_as_people_write_them() -> None:
    assert config.load("Llama-3-8B").name == config.load("meta-llama/Meta-Llama-3.1-8B").name == "llama-3-8b"
    assert config.load("deepseek-r1").name == "deepseek-v3"


PLAIN = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
PLAIN |= {"vocab_size": 100, "num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, "chooses 0 of 0 experts"),
        ({"num_experts_per_tok": 9}, "chooses 9 of 4 experts"),
        ({"num_hidden_layers": 0}, "has no layers"),
        ({"num_attention_heads": 3}, "3 heads for a width of 64: they must divide"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings = 'maybe': it must be true or false"),
        ({"mlp_only_layers": 3}, "mlp_only_layers = 3: it must be a list"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changed: dict[str, Any], line: str) -> None:
    assert config.from_config(PLAIN).layers == 2
    with pytest.raises(BadInput, match=line):
        config.from_config({**PLAIN, **changed})
