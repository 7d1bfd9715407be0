"""What a config.json says of a Llama, Qwen2 or Mistral; what this engine would compute otherwise is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sublight.errors import BadInput

TYPES = ("llama", "mistral", "qwen2")
Packing = Literal["", "awq", "gptq", "gptq_v2"]  # gptq keeps zeros less one


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one model, and how it turns positions into angles."""

    layers: int
    dim: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    longest: int  # positions that it was made for
    eps: float
    theta: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    window: int | None = None
    scaling: tuple[float, float, float, float] | None = None  # Llama 3's: factor, low and high, original positions
    ends: tuple[int, ...] = ()  # tokens that end a text
    packing: Packing = ""  # how the folder's products are packed, four bits a weight; "": they are not

    def frequencies(self) -> list[float]:
        """Radians a position, for each pair of a head."""
        plain = [self.theta ** (-2 * pair / self.head_dim) for pair in range(self.head_dim // 2)]
        if self.scaling is None:
            return plain
        factor, low, high, original = self.scaling
        scaled = []
        for frequency in plain:
            turns = original * frequency / (2 * math.pi)  # over the positions that it was first trained on
            part = min(1.0, max(0.0, (turns - low) / (high - low)))
            scaled.append((1 - part) * frequency / factor + part * frequency)
        return scaled


def read(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; give a model's folder") from None
    except ValueError:
        raise BadInput(f"{path} is no JSON: fetch the model again") from None
    return replace(config := of_json(data, str(path)), ends=tuple(dict.fromkeys((*config.ends, *_more_ends(folder)))))


def _more_ends(folder: Path) -> list[int]:
    """Tokens that end a text by generation_config.json: a chat model has one for the end of a turn there."""
    try:
        ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return [each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int)]


def of_json(data: Mapping[str, Any], source: str) -> Config:
    kind = data.get("model_type")
    if kind not in TYPES:
        raise BadInput(f"{source} is of a {kind or 'nameless model'}: `generate` takes {', '.join(TYPES)}")
    if data.get("hidden_act", "silu") != "silu":
        raise BadInput(f"{source} has hidden_act {data['hidden_act']!r}: `generate` knows silu")
    missing = [name for name in ("num_hidden_layers", "hidden_size", "num_attention_heads") if name not in data]
    if missing:
        raise BadInput(f"{source} has no {missing[0]}: fetch the model again")
    dim, heads = data["hidden_size"], data["num_attention_heads"]
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    if kind == "qwen2" and data.get("use_sliding_window"):
        raise BadInput(f"{source} has use_sliding_window in some layers alone, which `generate` has not yet")
    ends = data.get("eos_token_id")
    return Config(
        layers=data["num_hidden_layers"],
        dim=dim,
        inner=data["intermediate_size"],
        heads=heads,
        kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or dim // heads,
        vocab=data["vocab_size"],
        longest=data.get("max_position_embeddings", 2048),
        eps=data.get("rms_norm_eps", 1e-6),
        theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0),
        qkv_bias=kind == "qwen2" or bool(data.get("attention_bias")),
        out_bias=kind == "llama" and bool(data.get("attention_bias")),
        mlp_bias=bool(data.get("mlp_bias")),
        tied=bool(data.get("tie_word_embeddings", False)),
        window=data.get("sliding_window") if kind == "mistral" else None,
        scaling=_scaling(rope, source),
        packing=_packing(data.get("quantization_config") or {}, source),
        ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def _scaling(rope: Mapping[str, Any], source: str) -> tuple[float, float, float, float] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise BadInput(f"{source} has rope_type {kind!r}: `generate` knows default and llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (float(rope[name]) for name in names)
    return factor, low, high, original


def _packing(how: Mapping[str, Any], source: str) -> Packing:
    """AWQ's and GPTQ's, of four bits; others would be read as noise."""
    if not how:
        return ""
    method, bits = how.get("quant_method"), how.get("bits", how.get("w_bit"))
    if method not in ("awq", "gptq") or bits != 4:
        raise BadInput(f"{source} is packed by {method} with {bits} bits: `generate` knows awq and gptq with 4")
    if method == "awq" and str(how.get("version", "gemm")).lower() != "gemm":
        raise BadInput(f"{source} is awq in version {how['version']!r}: `generate` knows gemm")
    return "gptq_v2" if how.get("checkpoint_format") == "gptq_v2" else method
