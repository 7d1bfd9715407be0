"""Packed weights: tokens are those of Hugging Face's model with the same layers packed; folders of others are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch
from safetensors.torch import load_file, save_file

import sublight
from sublight.engines.generate import config as configs
from sublight.engines.generate.build import Build, build, dtype_of
from sublight.engines.generate.engine import Engine, Request
from sublight.engines.generate.llama import Dense
from sublight.errors import BadInput
from sublight.fix.quantize.checkpoints import AWQ_ORDER
from sublight.ops.matmul import low_bit_matmul
from sublight.ops.quantize.quantize import QUANTIZE_FP8, QUANTIZE_INT8

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_bias": True},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
PROMPT, NEW, GROUP = [5, 17, 3, 9], 6, 32


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels have tests of their own; interpreted they take minutes here."""
    monkeypatch.setattr("sublight.fix.quantize.linear.low_bit_matmul", low_bit_matmul.reference)
    for kind, op in (("int8", QUANTIZE_INT8), ("fp8", QUANTIZE_FP8)):
        monkeypatch.setattr(f"sublight.fix.quantize.coded.quantize_{kind}", op.reference)


@pytest.fixture
def theirs() -> Any:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return model


def tokens_of(model: Any) -> list[int]:
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, use_cache=False)
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def engine_of(folder: Path, **how: Any) -> Engine:
    return build(Build(folder=folder, device="cpu", **{"mode": "eager", **how}))


def ours(engine: Engine) -> list[int]:
    return [token for _, token in engine.run([Request(PROMPT, NEW)])]


@pytest.mark.parametrize("way", ("w4a16", "w8a16", "w8a8", "fp8", "w4a16+head"))
def test_packed_as_quantize_packs(theirs: Any, tmp_path: Path, way: str) -> None:
    theirs.save_pretrained(tmp_path)
    plain = tokens_of(theirs)
    engine = engine_of(tmp_path, weights=way.replace("w4a16", "int4").replace("w8a16", "int8"))
    sublight.quantize(theirs, way.removesuffix("+head"), **({"skip": ()} if "head" in way else {}))
    is_packed = not isinstance(theirs.lm_head, torch.nn.Linear)
    assert is_packed == (not isinstance(engine.model.weights.head, Dense)) == way.endswith("+head")
    assert ours(engine) == tokens_of(theirs)
    dense = engine_of(tmp_path)
    assert ours(dense) == plain
    assert engine.model.weights.read_bytes < dense.model.weights.read_bytes


def nibbles(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """(rows, 8 * words) as (rows, words): the value at `order[i]` goes to place i."""
    parts = values.view(values.shape[0], -1, 8)[..., list(order)].to(torch.int64)
    words = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_folder(model: Any, folder: Path, method: str, skip: str = "") -> None:
    """The folder as AWQ or GPTQ would write it; the model's weights become what it says."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    plain = tuple(range(8))
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or name == skip:
            continue
        out, inputs = module.weight.shape
        groups = inputs // GROUP
        values = torch.randint(0, 16, (inputs, out), generator=generator)
        zeros = torch.randint(1, 16, (groups, out), generator=generator)
        scales = (torch.rand(groups, out, generator=generator) * 0.05 + 0.01).half()
        whole = (values - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
        module.weight.data = whole.T.contiguous()
        del tensors[f"{name}.weight"]
        if method == "awq":
            packed = {"qweight": nibbles(values, AWQ_ORDER), "qzeros": nibbles(zeros, AWQ_ORDER)}
        else:
            packed = {"qweight": nibbles(values.T.contiguous(), plain).T, "qzeros": nibbles(zeros - 1, plain)}
            packed["g_idx"] = (torch.arange(inputs) // GROUP).to(torch.int32)
        tensors |= {f"{name}.{part}": x.contiguous() for part, x in {**packed, "scales": scales}.items()}
    save_file(tensors, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize("method", ("awq", "gptq"))
def test_folders_that_others_packed(theirs: Any, tmp_path: Path, method: str) -> None:
    pack_folder(theirs, tmp_path, method)
    assert ours(engine_of(tmp_path)) == tokens_of(theirs)
    assert dtype_of(Build(folder=tmp_path, device="cuda"), configs.read(tmp_path)) == "float16"
    with pytest.raises(BadInput, match="is packed already"):
        engine_of(tmp_path, weights="w4a16")


def test_a_folder_packed_in_part_is_refused(theirs: Any, tmp_path: Path) -> None:
    pack_folder(theirs, tmp_path, "awq", skip="model.layers.0.self_attn.k_proj")
    with pytest.raises(BadInput, match=r"only some of them"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("how", "words"),
    [({"quant_method": "awq", "bits": 3}, "awq with 3 bits"), ({"quant_method": "bitsandbytes"}, "by bitsandbytes"),
     ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'")],
)  # fmt: skip
def test_other_packings_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        configs.of_json({**SIZES, "model_type": "llama", "quantization_config": how}, "here")


@pytest.mark.parametrize(
    ("how", "words"),
    [({"weights": "w3"}, "unknown way"), ({"dtype": "int3"}, "unknown dtype"), ({"mode": "fast"}, "unknown mode"),
     ({"longest": 65}, "more than the model's 64"), ({"batch": 0}, "--batch 0")],
)  # fmt: skip
def test_builds_that_cannot_be(theirs: Any, tmp_path: Path, how: dict[str, Any], words: str) -> None:
    theirs.config.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=words):
        engine_of(tmp_path, **how)


@pytest.mark.parametrize("kind", ["int8", "int64", "bool"])
def test_whole_numbers_are_no_weights(theirs: Any, tmp_path: Path, kind: str) -> None:
    theirs.save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(getattr(torch, kind))}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=rf"{name} is of torch.{kind}"):
        engine_of(tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_refused(theirs: Any, tmp_path: Path, value: str) -> None:
    theirs.save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 2] = float(value)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=f"{name} has numbers that are none in torch.float32"):
        engine_of(tmp_path)


def changed(model: Any, folder: Path, **more: torch.Tensor) -> Path:
    """The model's folder with other weights, or more of them."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name.replace("__", "."): x for name, x in more.items()}, folder / "model.safetensors")
    return folder


def test_a_weight_that_the_config_does_not_know_is_no_small_matter(theirs: Any, tmp_path: Path) -> None:
    """transformers leaves it out, with a warning; a layer that was trained with it computes something else without."""
    bias = {"model__layers__0__mlp__up_proj__bias": torch.ones(128)}
    with pytest.raises(BadInput, match=r"has model.layers.0.mlp.up_proj.bias, which this model has not by its config"):
        engine_of(changed(theirs, tmp_path, **bias))
    harmless = {"model__layers__0__mlp__up_proj__bias": torch.zeros(128), "model__layers__7__x": torch.ones(1)}
    harmless["model__layers__0__self_attn__rotary_emb__inv_freq"] = torch.ones(4)
    assert ours(engine_of(changed(theirs, tmp_path, **harmless))) == tokens_of(theirs)


def test_a_head_of_its_own_is_used_whatever_the_config_says(theirs: Any, tmp_path: Path) -> None:
    plain = tokens_of(theirs)
    folder = changed(theirs, tmp_path)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "tie_word_embeddings": True}))
    assert ours(engine_of(folder)) == plain == tokens_of(transformers.LlamaForCausalLM.from_pretrained(folder))
    tied = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    folder = changed(theirs, tmp_path / "same", lm_head__weight=tied.clone())
    (folder / "config.json").write_text(json.dumps({**data, "tie_word_embeddings": True}))
    made = engine_of(folder).model.weights
    assert isinstance(made.head, Dense) and made.head.weight is made.tokens  # held once
    assert ours(engine_of(folder)) == tokens_of(transformers.LlamaForCausalLM.from_pretrained(folder)) != plain


def test_files_beside_the_models_own_are_not_read_and_no_weight_comes_twice(theirs: Any, tmp_path: Path) -> None:
    folder = changed(theirs, tmp_path)
    save_file({"model.norm.weight": torch.zeros(128)}, folder / "other.safetensors")
    assert ours(engine_of(folder)) == tokens_of(theirs)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(BadInput, match=r"model.norm.weight in two of its files"):
        engine_of(folder)
