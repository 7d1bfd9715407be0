"""Weights from a folder of safetensors, one or several files, or random ones, for benchmarks; packed as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sublight.engines.generate.config import Config
from sublight.engines.generate.llama import Block, Dense, Product, Weights
from sublight.errors import BadInput
from sublight.fix.quantize.checkpoints import from_awq, from_gptq
from sublight.fix.quantize.linear import PackedLinear
from sublight.fix.quantize.model import pack_weight

INDEX = "model.safetensors.index.json"
Get = Callable[[str, tuple[int, ...]], torch.Tensor]
GetPacked = Callable[[str, tuple[int, int]], PackedLinear | None]


def load(config: Config, folder: Path, *, dtype: torch.dtype, device: str, how: str = "") -> Weights:
    """All of them, or one line that says what is missing; `how` packs the products (w4a16, fp8 …), not the head."""
    if how and config.packing:
        raise BadInput(f"{folder} is packed already ({config.packing}): leave --weights out")
    where = {name: file for file in _open(folder, device) for name in file.keys()}  # noqa: SIM118, no dictionaries

    def read(name: str) -> torch.Tensor:
        if name not in where:
            raise BadInput(f"{folder} has no weight {name}: fetch the model again, all of it")
        return where[name].get_tensor(name)  # type: ignore[no-any-return]

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        x = read(name)
        if tuple(x.shape) != shape:
            raise BadInput(f"{folder}: {name} is {tuple(x.shape)}, which config.json says is {shape}")
        return x.to(device, dtype)

    def packed(layer: str, shape: tuple[int, int]) -> PackedLinear | None:
        if not config.packing or f"{layer}.qweight" not in where:
            return None
        parts = ("qweight", "qzeros", "scales", *(["g_idx"] if f"{layer}.g_idx" in where else []))
        tensors = {part: read(f"{layer}.{part}") for part in parts}
        tensors["scales"] = tensors["scales"].to(dtype)
        try:
            if config.packing == "awq":
                made = from_awq(tensors)
            else:
                made = from_gptq(tensors, zeros_less_one=config.packing == "gptq")
        except BadInput as error:
            raise BadInput(f"{folder}, {layer}: {error}") from None
        if (made.out_features, made.in_features) != shape:
            sizes = f"{made.out_features}x{made.in_features}"
            raise BadInput(f"{folder}: {layer} is packed from {sizes}, which config.json says is {shape[0]}x{shape[1]}")
        return made

    return _build(config, get, how, packed)


def random(config: Config, *, dtype: torch.dtype, device: str, seed: int = 0, how: str = "") -> Weights:
    """Of the model's sizes; made on the device."""
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
    dim, inner = config.dim, config.inner
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
            return pack_weight(weight, bias, how, rounds=rounds) if how else Dense(weight, bias)

        return Block(
            norm_1=of("input_layernorm.weight", dim),
            qkv=product({f"self_attn.{name}": size for name, size in rows.items()}, dim, config.qkv_bias),
            out=product({"self_attn.o": dim}, rows["q"], config.out_bias),
            norm_2=of("post_attention_layernorm.weight", dim),
            gate_up=product({"mlp.gate": inner, "mlp.up": inner}, dim, config.mlp_bias),
            down=product({"mlp.down": dim}, inner, config.mlp_bias),
        )

    tokens = get("model.embed_tokens.weight", (config.vocab, dim))
    head = tokens if config.tied else get("lm_head.weight", (config.vocab, dim))
    blocks = tuple(block(number) for number in range(config.layers))
    return Weights(tokens=tokens, blocks=blocks, norm=get("model.norm.weight", (dim,)), head=Dense(head))


def _side_by_side(parts: Sequence[PackedLinear | None], bias: torch.Tensor | None, what: str) -> PackedLinear:
    """Products of the same input as one: their rows lie below each other."""
    layers = [part for part in parts if part is not None]
    if len(layers) < len(parts) or len({layer.scales.shape[1] for layer in layers}) > 1:
        raise BadInput(f"{what} are packed in different ways, or only some of them: pack them alike")
    packed, scales, zeros = (torch.cat([getattr(x, name) for x in layers]) for name in ("packed", "scales", "zeros"))
    held = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    return PackedLinear(packed, scales, zeros, held, bits=layers[0].bits, in_features=layers[0].in_features)
