"""Weights from a folder of safetensors, one or several files, or random ones, for benchmarks; packed as they come."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sublight.engines.generate.config import Config
from sublight.engines.generate.llama import Block, Dense, Product, Weights
from sublight.errors import BadInput
from sublight.fix.quantize.checkpoints import from_awq, from_fp8, from_gptq
from sublight.fix.quantize.linear import PackedLinear
from sublight.fix.quantize.model import pack_weight

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Get = Callable[[str, tuple[int, ...]], torch.Tensor]
GetPacked = Callable[[str, tuple[int, int]], PackedLinear | None]

TOKENS = "model.embed_tokens.weight"
OF_ACTIVATIONS = (  # by which others round them to fp8, as the cache; here they stay as they are
    *("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"),
)
HEAD = "+head"  # behind a way: it packs the head, too


def load(config: Config, folder: Path, *, dtype: torch.dtype, device: str, how: str = "") -> Weights:
    """All of them, or one line that says what is missing; `how` packs the products (w4a16, fp8 …), the head with them
    where it ends in `+head`."""
    packing = config.packing
    if how and packing.is_four_bits:
        raise BadInput(f"{folder} is packed already ({packing.method}): leave --weights out")
    where: dict[str, Any] = {}
    for file in _open(folder, device):
        for name in file.keys():  # noqa: SIM118, no dictionary
            if name in where:
                raise BadInput(f"{folder} has {name} in two of its files: leave those of one model there")
            where[name] = file
    seen = set()

    def read(name: str) -> torch.Tensor:
        if name not in where:
            raise BadInput(f"{folder} has no weight {name}: fetch the model again, all of it")
        seen.add(name)
        return where[name].get_tensor(name)  # type: ignore[no-any-return]

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        x = read(name)
        if tuple(x.shape) != shape:
            raise BadInput(f"{folder}: {name} is {tuple(x.shape)}, which config.json says is {shape}")
        if packing.method == "fp8" and x.dtype == torch.float8_e4m3fn:
            x = whole(x, read(f"{name}_scale_inv" if f"{name}_scale_inv" in where else f"{name}_scale"), name)
        if not x.is_floating_point() or x.itemsize == 1:  # packed in a way that config.json does not tell
            raise BadInput(f"{folder}: {name} is of {x.dtype}, which is no weight as it is: fetch the model unpacked")
        x = x.to(device, dtype)
        if not all(map(math.isfinite, (float(edge) for edge in x.aminmax()))):  # their argmax would be token 0
            raise BadInput(f"{folder}: {name} has numbers that are none in {dtype}: fetch the model again, or try bf16")
        return x

    def whole(codes: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
        try:
            return from_fp8(codes.to(device), scales.to(device), packing.block)
        except BadInput as error:
            raise BadInput(f"{folder}, {name}: {error}") from None

    def packed(layer: str, shape: tuple[int, int]) -> PackedLinear | None:
        if not packing.is_four_bits or f"{layer}.qweight" not in where:
            return None
        parts = ("qweight", "qzeros", "scales", *(["g_idx"] if f"{layer}.g_idx" in where else []))
        tensors = {part: read(f"{layer}.{part}") for part in parts}
        tensors["scales"] = tensors["scales"].to(dtype)
        try:
            if packing.method == "awq":
                made = from_awq(tensors)
            else:
                made = from_gptq(tensors, zeros_less_one=packing.method == "gptq")
        except BadInput as error:
            raise BadInput(f"{folder}, {layer}: {error}") from None
        if (made.out_features, made.in_features) != shape:
            sizes = f"{made.out_features}x{made.in_features}"
            raise BadInput(f"{folder}: {layer} is packed from {sizes}, which config.json says is {shape[0]}x{shape[1]}")
        return made

    if config.tied and "lm_head.weight" in where and not torch.equal(read("lm_head.weight"), read(TOKENS)):
        config = replace(config, tied=False)  # the weights know better than the config.json: so transformers has it
    made = _build(config, get, how, packed)
    for name in sorted(where.keys() - seen):
        if packing.method == "fp8" and name.rsplit(".", 1)[-1] in OF_ACTIVATIONS:
            continue
        if _changes_a_layer(name, config.layers) and read(name).float().any():
            raise BadInput(f"{folder} has {name}, which this model has not by its config.json: fetch the model again")
    return made


def _changes_a_layer(name: str, layers: int) -> bool:
    """Whether a layer that has this weight, too, would compute something else.

    >>> _changes_a_layer("model.layers.1.mlp.up_proj.bias", 2), _changes_a_layer("model.layers.2.mlp.up_proj.bias", 2)
    (True, False)
    """
    of_layer = re.match(r"model\.layers\.(\d+)\.", name)
    return of_layer is not None and int(of_layer[1]) < layers and not name.endswith("rotary_emb.inv_freq")


def random(config: Config, *, dtype: torch.dtype, device: str, seed: int = 0, how: str = "") -> Weights:
    """Random weights of the model's sizes, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) * 0.02

    return _build(config, get, how, rounds=0)  # nothing is gained by fitting zeros to noise


def _open(folder: Path, device: str) -> list[Any]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise BadInput("weights need safetensors: pip install 'sublight[engines]'") from None
    try:
        if (folder / INDEX).exists():
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        elif (folder / WHOLE).exists():  # others beside it, as an adapter's, are not this model's
            names = [WHOLE]
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise BadInput(f"{folder} has no *.safetensors: give a model's folder")
        return [safe_open(folder / name, framework="pt", device=device) for name in names]
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"cannot read {folder}: {' '.join(str(error).split())[:120]}; fetch the model again") from None


def _build(
    config: Config, get: Get, how: str, packed: GetPacked = lambda layer, shape: None, rounds: int = 20
) -> Weights:
    dim, inner, way = config.dim, config.inner, how.removesuffix(HEAD)
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]

    def block(number: int) -> Block:
        def of(name: str, *shape: int) -> torch.Tensor:
            return get(f"model.layers.{number}.{name}", shape)

        def product(names: dict[str, int], inputs: int, has_bias: bool) -> Product:
            bias = torch.cat([of(f"{name}_proj.bias", size) for name, size in names.items()]) if has_bias else None
            parts = [packed(f"model.layers.{number}.{name}_proj", (size, inputs)) for name, size in names.items()]
            if any(parts):
                return _side_by_side(parts, bias, f"layer {number}'s {', '.join(names)}")
            weight = torch.cat([of(f"{name}_proj.weight", size, inputs) for name, size in names.items()])
            return pack_weight(weight, bias, way, rounds=rounds) if way else Dense(weight, bias)

        def norm(name: str) -> torch.Tensor:
            return of(f"self_attn.{name}_norm.weight", config.head_dim)

        return Block(
            norm_1=of("input_layernorm.weight", dim),
            qkv=product({f"self_attn.{name}": size for name, size in rows.items()}, dim, config.qkv_bias),
            out=product({"self_attn.o": dim}, rows["q"], config.out_bias),
            norm_2=of("post_attention_layernorm.weight", dim),
            gate_up=product({"mlp.gate": inner, "mlp.up": inner}, dim, config.mlp_bias),
            down=product({"mlp.down": dim}, inner, config.mlp_bias),
            head_norms=(norm("q"), norm("k")) if config.qk_norm else None,
        )

    tokens = get(TOKENS, (config.vocab, dim))
    head = tokens if config.tied else get("lm_head.weight", (config.vocab, dim))
    blocks = tuple(block(number) for number in range(config.layers))
    made = pack_weight(head, None, way, rounds=rounds) if how.endswith(HEAD) else Dense(head)
    return Weights(tokens=tokens, blocks=blocks, norm=get("model.norm.weight", (dim,)), head=made)


def _side_by_side(parts: Sequence[PackedLinear | None], bias: torch.Tensor | None, what: str) -> PackedLinear:
    """Products of the same input as one: their rows lie below each other."""
    layers = [part for part in parts if part is not None]
    if len(layers) < len(parts) or len({layer.scales.shape[1] for layer in layers}) > 1:
        raise BadInput(f"{what} are packed in different ways, or only some of them: pack them alike")
    packed, scales, zeros = (torch.cat([getattr(x, name) for x in layers]) for name in ("packed", "scales", "zeros"))
    held = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    return PackedLinear(packed, scales, zeros, held, bits=layers[0].bits, in_features=layers[0].in_features)
