"""Weights from a folder of safetensors, one or several files, or random ones, for benchmarks; packed as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sublight.engines.generate.config import Config
from sublight.engines.generate.llama import Block, Dense, Product, Weights
from sublight.errors import BadInput
from sublight.fix.quantize.model import pack_weight

INDEX = "model.safetensors.index.json"
Get = Callable[[str, tuple[int, ...]], torch.Tensor]


def load(config: Config, folder: Path, *, dtype: torch.dtype, device: str, how: str = "") -> Weights:
    """All of them, or one line that says what is missing; `how` packs the products (w4a16, fp8 …), not the head."""
    files = _open(folder)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        for file in files:
            if name in file.keys():  # noqa: SIM118, safetensors' files are no dictionaries
                found = file.get_tensor(name)
                if tuple(found.shape) != shape:
                    raise BadInput(f"{folder}: {name} is {tuple(found.shape)}, which config.json says is {shape}")
                return found.to(device, dtype)  # type: ignore[no-any-return]
        raise BadInput(f"{folder} has no weight {name}: fetch the model again, all of it")

    return _build(config, get, how)


def random(config: Config, *, dtype: torch.dtype, device: str, seed: int = 0, how: str = "") -> Weights:
    """Of the model's sizes; made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) * 0.02

    return _build(config, get, how)


def _open(folder: Path) -> list[Any]:
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
        return [safe_open(folder / name, framework="pt") for name in names]
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"cannot read {folder}: {' '.join(str(error).split())[:120]}; fetch the model again") from None


def _build(config: Config, get: Get, how: str) -> Weights:
    dim, inner = config.dim, config.inner
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]

    def block(number: int) -> Block:
        def of(name: str, *shape: int) -> torch.Tensor:
            return get(f"model.layers.{number}.{name}", shape)

        def product(names: dict[str, int], inputs: int, has_bias: bool) -> Product:
            weight = torch.cat([of(f"{name}_proj.weight", size, inputs) for name, size in names.items()])
            bias = torch.cat([of(f"{name}_proj.bias", size) for name, size in names.items()]) if has_bias else None
            return pack_weight(weight, bias, how) if how else Dense(weight, bias)

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
