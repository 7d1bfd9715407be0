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
    assert found.stored == words and bool(data.notes_of(found, 16)) == bool(words)
    assert data.notes_of(found, 4) == ["Its layers' weights have 4 bits; what lies before and behind them stays in 16."]
    inside = {"model_type": "whole", "text_config": {**LLAMA, "quantization_config": quantization}}
    assert config.from_config(inside).stored == words


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
    plain, biased = ({**LLAMA, "model_type": kind, "head_dim": 16, "attention_bias": bias} for bias in (False, given))
    counts = [model.parameters(config.from_config(each)) for each in (plain, biased)]
    assert counts[1] - counts[0] == 2 * biases


def test_experts_as_transformers_5_writes_them() -> None:
    moe = {**LLAMA, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert config.from_config({**moe, "num_local_experts": 8}) == config.from_config({**moe, "num_experts": 8})


def test_experts_in_some_layers_of_a_deepseek_are_refused() -> None:
    fields = dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16)
    fields |= {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert config.from_config({**LLAMA, **fields, "moe_layer_freq": 1}).layers == 2
    with pytest.raises(BadInput, match="moe_layer_freq above 1"):
        config.from_config({**LLAMA, **fields, "moe_layer_freq": 2})


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
    ("kind", "windows"),
    [
        ("mistral", {16: 4}),
        ("phi3", {16: 4}),
        ("gemma2", {16: 2, None: 2}),  # the published config.json of Gemma 2 leaves out layer_types
        ("gpt_oss", {16: 2, None: 2}),
        ("gemma3_text", {16: 4}),  # of six, one sees all
        ("llama", {None: 4}),  # whose class reads no window
        ("gemma", {None: 4}),
    ],
)
def test_a_window_without_layer_types_is_the_class_s(kind: str, windows: dict[int | None, int]) -> None:
    fields = {**LLAMA, "model_type": kind, "num_hidden_layers": 4, "sliding_window": 16}
    found = config.from_config({**fields, "num_local_experts": 4, "num_experts_per_tok": 2})
    assert {block.window: block.count for block in found.blocks} == windows


def test_a_head_s_width_that_the_config_leaves_out_is_the_class_s() -> None:
    widths = {kind: config.from_config({**LLAMA, "model_type": kind}).head_dim for kind in ("llama", "gemma", "qwen3")}
    assert widths == {"llama": 16, "gemma": 256, "qwen3": 128}


RESNET = {"model_type": "resnet", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "embedding_size": 64}


def test_a_resnet_as_hugging_face_writes_it() -> None:
    found = config.from_config({**RESNET, "layer_type": "bottleneck", "num_labels": 1000})
    known = config.load("resnet-50")
    assert (found.stages, found.image) == (known.stages, known.image)
    assert model.parameters(found) == model.parameters(known) and "224 x 224" in data.notes_of(found, 16)[0]


def test_an_image_that_strides_do_not_divide_is_rounded_up() -> None:
    """As a convolution with padding does: 225 pixels become 113, 57, 29, 15 and 8."""
    stages = config.from_config({**RESNET, "image_size": 225}).stages
    assert [stage.in_size for stage in stages] == [57, 57, 29, 15]
    assert stages[3].stride == 2 and model.stage_convolutions(stages[3])[-1][1]["size"] == 8


def test_gemma_3_as_its_class_has_it() -> None:
    """362,752 parameters, counted on transformers' Gemma3ForCausalLM."""
    sizes = {**LLAMA, "model_type": "gemma3_text", "head_dim": 32, "num_hidden_layers": 7, "sliding_window": 16}
    found = config.from_config({"model_type": "gemma3", "text_config": sizes})
    assert model.parameters(found) == 362_752 and found.tied and found.qk_norm and found.norms == 4
    assert {block.window: block.count for block in found.blocks} == {16: 6, None: 1}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"layer_type": "basic"}, "layer_type = 'basic', which is not counted yet"),
        ({"downsample_in_first_stage": True}, "downsample_in_first_stage = True"),
        ({"hidden_sizes": [256]}, "lists of one length"),
        ({"depths": [3, 0, 6, 3]}, "no layer can be empty"),
        ({"depths": [3, "4", 6, 3]}, "must be a list of whole numbers"),
        ({"image_size": 16}, "too small for 4 stages"),
        ({"hidden_sizes": [255, 512, 1024, 2048]}, "4 does not divide 255"),
        ({"num_channels": 0}, "num_channels = 0: it must be a whole number above 0"),
        ({"id2label": 3}, "id2label = 3: it must be an object"),
    ],
)
def test_a_resnet_that_is_not_counted_is_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        config.from_config({**RESNET, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': it must be a whole number"),
        ({"num_hidden_layers": True}, "must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: it must be a whole number above 0"),
        ({"num_key_value_heads": 3}, "they must divide"),
        ({"model_type": None}, "lacks model_type"),
        ({"model_type": "mamba"}, "model_type 'mamba', which is not known"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"num_hidden_layers": 10**30}, "must be a whole number below"),
        ({"num_hidden_layers": 20_000}, "at most 10000"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of 'chunked_attention'"),
        ({"model_type": "mistral", "num_key_value_heads": ...}, "lacks num_key_value_heads"),
    ],
)
def test_a_bad_config_is_one_line(change: dict[str, Any], words: str) -> None:
    fields = {name: value for name, value in {**LLAMA, **change}.items() if value is not ...}
    with pytest.raises(BadInput) as caught:
        config.from_config(fields, name="mine")
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
PLAIN |= {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"num_local_experts": 0}, "num_local_experts = 0: it must be a whole number above 0"),
        ({"num_experts_per_tok": 5}, "chooses 5 of 4 experts"),
        ({"vocab_size": 0}, "vocab_size = 0: it must be a whole number above 0"),
        ({"num_experts_per_tok": 9}, "chooses 9 of 4 experts"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: it must be a whole number above 0"),
        ({"num_attention_heads": 3}, "3 heads for a width of 64: they must divide"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings = 'maybe': it must be true or false"),
        ({"mlp_only_layers": 3}, "mlp_only_layers = 3: it must be a list"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention': it must be a list"),
        ({"layer_types": ["sliding_attention"] * 2}, "and lacks sliding_window"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0: it must be a whole number above 0"),
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changed: dict[str, Any], line: str) -> None:
    assert config.from_config(PLAIN).layers == 2
    with pytest.raises(BadInput, match=line):
        config.from_config({**PLAIN, **changed})


@pytest.mark.parametrize(("stem", "weights"), [(64, 311_943), (16, 305_175)])
def test_a_resnet_whose_first_stage_keeps_its_width_adds_the_input_itself(stem: int, weights: int) -> None:
    """Counted on transformers' class: no convolution lies in a shortcut that neither widens nor shrinks."""
    sizes = {"embedding_size": stem, "hidden_sizes": [64, 128, 256], "depths": [1, 3, 3], "num_labels": 7}
    assert model.parameters(config.from_config({"model_type": "resnet", **sizes})) == weights


@pytest.mark.parametrize(("patch", "line"), [(0, "patch_size = 0"), (64, "patches of 64 in an image of 32: none fits")])
@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_patches_that_no_image_has(kind: str, patch: int, line: str) -> None:
    sizes = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "in_channels": 4}
    sizes |= {"intermediate_size": 128, "image_size": 32}
    assert config.from_config({**sizes, "patch_size": 16}).tokens == {"vit": 5, "dit": 4}[kind]
    with pytest.raises(BadInput, match=line):
        config.from_config({**sizes, "patch_size": patch})
