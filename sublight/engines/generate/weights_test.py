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


E4M3 = torch.float8_e4m3fn


def group(strategy: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' words for one group of layers."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {"targets": ["Linear"], "weights": weights, "input_activations": {"strategy": "token", "dynamic": True}}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": named, **more}


FP8: dict[str, tuple[str, tuple[int, int] | None, dict[str, Any]]] = {  # name of the scales, what shares one, config
    "blocks": ("weight_scale_inv", (128, 128), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "cut blocks": ("weight_scale_inv", (48, 80), {"quant_method": "fp8", "weight_block_size": [48, 80]}),
    "tensor": ("weight_scale", None, {"quant_method": "fp8", "activation_scheme": "static"}),
    "tensor, as transformers has it": ("weight_scale_inv", None, {"quant_method": "fp8", "weight_block_size": None}),
    "compressed, tensor": ("weight_scale", None, compressed(group("tensor"), ignore=["lm_head"])),
    "compressed, channel": ("weight_scale", (1, 2**20), compressed(group("channel"), sparsity_config={})),
    "compressed, block": ("weight_scale", (48, 80), compressed(group("block", block_structure=[48, 80]))),
}


def fp8_folder(model: Any, folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The folder as its format is defined, and its tensors; the model's weights become what it says."""
    scale, block, how = FP8[kind]
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        rows, cols = module.weight.shape
        high, wide = (min(size, most) for size, most in zip((rows, cols), block or (rows, cols), strict=True))
        scales = torch.empty(-(-rows // high), -(-cols // wide))
        codes = torch.empty(rows, cols, dtype=E4M3)
        for row, col in ((r, c) for r in range(len(scales)) for c in range(scales.shape[1])):
            at = slice(row * high, (row + 1) * high), slice(col * wide, (col + 1) * wide)
            scales[row, col] = module.weight.data[at].abs().max() / 448
            codes[at] = (module.weight.data[at] / scales[row, col]).to(E4M3)
            module.weight.data[at] = codes[at].float() * scales[row, col]
        tensors |= {f"{name}.weight": codes, f"{name}.{scale}": scales if block else scales.reshape(1)}
        if kind.startswith("tensor"):
            tensors[f"{name}.{'activation' if 'transformers' in kind else 'input'}_scale"] = torch.tensor(0.7)
    save_file(tensors, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "quantization_config": how}))
    return tensors


@pytest.mark.parametrize("kind", FP8)
def test_folders_in_fp8(theirs: Any, tmp_path: Path, kind: str) -> None:
    fp8_folder(theirs, tmp_path, kind)
    engine = engine_of(tmp_path)
    assert ours(engine) == tokens_of(theirs)
    down = engine.model.weights.blocks[0].down
    assert isinstance(down, Dense) and torch.equal(down.weight, theirs.model.layers[0].mlp.down_proj.weight)
    assert dtype_of(Build(folder=tmp_path, device="cuda"), configs.read(tmp_path)) == "bfloat16"


def test_fp8_by_row_is_packed_again_as_it_was(theirs: Any, tmp_path: Path) -> None:
    tensors = fp8_folder(theirs, tmp_path, "compressed, channel")
    down = engine_of(tmp_path, weights="fp8", dtype="bf16").model.weights.blocks[0].down
    codes = tensors["model.layers.0.mlp.down_proj.weight"].float()
    assert torch.equal(down.codes.float(), codes), "a scale is the row's largest over 448, there and here"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_scale": None}, "has no weight model.layers.0.mlp.up_proj.weight_scale"),
        ({"weight_scale": torch.ones(127, 1)}, r"up_proj.weight: scales \(127, 1\) are not those of rows of a weight"),
        ({"weight_scale": torch.full((128, 1), torch.inf)}, "has numbers that are none"),
        ({"weight": torch.ones(128, 128).to(torch.float8_e5m2)}, "is of torch.float8_e5m2"),
        ({"weight": torch.ones(128, 128)}, "has model.layers.0.mlp.up_proj.weight_scale, which this model has not"),
        ({"weight_zero_point": torch.ones(128, 1)}, "has model.layers.0.mlp.up_proj.weight_zero_point"),
    ],
)
def test_fp8_folders_that_do_not_fit(theirs: Any, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    tensors = fp8_folder(theirs, tmp_path, "compressed, channel")
    tensors |= {f"model.layers.0.mlp.up_proj.{name}": x for name, x in change.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=words):
        engine_of(tmp_path)


def test_fp8_that_config_json_does_not_tell_is_refused(theirs: Any, tmp_path: Path) -> None:
    fp8_folder(theirs, tmp_path, "tensor")
    theirs.config.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"is of torch.float8_e4m3fn, which is no weight as it is"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("how", "words"),
    [({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
     ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of '\[128\]'"),
     ({"quant_method": "fp8", "weight_block_size": 128}, "blocks of '128'"),
     ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "without config_groups"),
     (compressed(group("channel"), format="pack-quantized"), "compressed-tensors as pack-quantized"),
     (compressed({**group("channel"), "format": "int-quantized"}), "compressed-tensors as int-quantized"),
     (compressed(group("group", group_size=32)), "'strategy': 'group'"),
     (compressed(group("channel", type="int")), "'type': 'int'"),
     (compressed(group("tensor", symmetric=False)), "'symmetric': False"),
     (compressed(group("block")), "blocks of '0'"),
     (compressed(group("block", block_structure=[1, 2]), group("block", block_structure=[2, 2])), "several sizes"),
     (compressed(group("tensor"), sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
     (compressed(group("tensor"), transform_config={"config_groups": {"u": {}}}), "transform_config"),
     ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"), ({"quant_method": "bitsandbytes"}, "by bitsandbytes"),
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
