"""Weights from a folder of safetensors, one or several files; or random ones, for benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sublight.engines.generate.config import Config
from sublight.engines.generate.llama import Block, Weights
from sublight.errors import BadInput

INDEX = "model.safetensors.index.json"
Get = Callable[[str, tuple[int, ...]], torch.Tensor]


def load(config: Config, folder: Path, *, dtype: torch.dtype, device: str) -> Weights:
    """All of them, or one line that says what is missing."""
    files = _open(folder)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        for file in files:
            if name in file.keys():  # noqa: SIM118, safetensors' files are no dictionaries
                found = file.get_tensor(name)
                if tuple(found.shape) != shape:
                    raise BadInput(f"{folder}: {name} is {tuple(found.shape)}, which config.json says is {shape}")
                return found.to(device, dtype)  # type: ignore[no-any-return]
        raise BadInput(f"{folder} has no weight {name}: fetch the model again, all of it")

    return _build(config, get)


def random(config: Config, *, dtype: torch.dtype, device: str, seed: int = 0) -> Weights:
    """Of the model's sizes; made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) * 0.02

    return _build(config, get)


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


def _build(config: Config, get: Get) -> Weights:
    dim, inner = config.dim, config.inner
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]

    def block(number: int) -> Block:
        def of(name: str, *shape: int) -> torch.Tensor:
            return get(f"model.layers.{number}.{name}", shape)

        return Block(
            norm_1=of("input_layernorm.weight", dim),
            qkv=torch.cat([of(f"self_attn.{name}_proj.weight", size, dim) for name, size in rows.items()]),
            qkv_bias=torch.cat([of(f"self_attn.{name}_proj.bias", size) for name, size in rows.items()])
            if config.qkv_bias
            else None,
            out=of("self_attn.o_proj.weight", dim, rows["q"]),
            out_bias=of("self_attn.o_proj.bias", dim) if config.out_bias else None,
            norm_2=of("post_attention_layernorm.weight", dim),
            gate_up=torch.cat([of(f"mlp.{name}_proj.weight", inner, dim) for name in ("gate", "up")]),
            gate_up_bias=torch.cat([of(f"mlp.{name}_proj.bias", inner) for name in ("gate", "up")])
            if config.mlp_bias
            else None,
            down=of("mlp.down_proj.weight", dim, inner),
            down_bias=of("mlp.down_proj.bias", dim) if config.mlp_bias else None,
        )

    tokens = get("model.embed_tokens.weight", (config.vocab, dim))
    head = tokens if config.tied else get("lm_head.weight", (config.vocab, dim))
    blocks = tuple(block(number) for number in range(config.layers))
    return Weights(tokens=tokens, blocks=blocks, norm=get("model.norm.weight", (dim,)), head=head)
