"""What a config.json says of a Llama, Qwen2, Qwen3 or Mistral; what this engine would compute otherwise is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sublight.engines.generate import packing
from sublight.engines.generate import rope as ropes
from sublight.engines.generate.fields import Fields
from sublight.engines.generate.packing import UNPACKED, Packing
from sublight.engines.generate.rope import Scaling, Yarn
from sublight.errors import BadInput

QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}  # where use_sliding_window is true
USUAL: dict[str, dict[str, Any]] = {  # what Hugging Face takes where a config.json leaves a key out
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, **QWEN_WINDOW},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, **QWEN_WINDOW},
}
TYPES = tuple(USUAL)
OF_ROPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # old files have them outside
PLAIN: dict[str, Any] = {  # what other models compute between, and the value by which it changes nothing
    **{"attn_logit_softcapping": 0, "final_logit_softcapping": 0, "logits_scaling": 1, "logit_scale": 1},
    **{"residual_multiplier": 1, "embedding_multiplier": 1, "is_causal": True, "num_experts": 0},
    **{"num_local_experts": 0, "use_qk_norm": False, "no_rope_layers": [], "hidden_activation": "silu"},
    "attention_multiplier": None,
}
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types


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
    qk_norm: bool = False  # each head of q and k has a norm before it is turned
    windows: tuple[int | None, ...] = ()  # keys that each layer sees; (): all of them, in every layer
    scaling: Scaling | None = None
    ends: tuple[int, ...] = ()  # tokens that end a text
    packing: Packing = UNPACKED  # of the folder's weights

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def frequencies(self) -> list[float]:
        """Radians a position, for each pair of a head."""
        plain = [self.theta ** (-2 * pair / self.head_dim) for pair in range(self.head_dim // 2)]
        return plain if self.scaling is None else self.scaling.scaled(plain, self.theta)

    @property
    def amplitude(self) -> float:
        """Of the cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.amplitude


def read(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; give a model's folder") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is no JSON: fetch the model again") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} is no JSON object: fetch the model again")
    return replace(config := of_json(data, str(path)), ends=tuple(dict.fromkeys((*config.ends, *_more_ends(folder)))))


def _more_ends(folder: Path) -> list[int]:
    """Tokens that end a text by generation_config.json: a chat model has one for the end of a turn there."""
    try:
        ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    return [each for each in (ends if isinstance(ends, list) else [ends]) if type(each) is int]


def of_json(data: Mapping[str, Any], source: str) -> Config:
    kind = data.get("model_type")
    if kind not in TYPES:
        raise BadInput(f"{source} is of a {kind or 'nameless model'}: `generate` takes {', '.join(TYPES)}")
    if data.get("hidden_act", "silu") != "silu":
        raise BadInput(f"{source} has hidden_act {data['hidden_act']!r}: `generate` knows silu")
    fields = Fields({**USUAL[kind], **data}, source)
    dim, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    head_dim = fields.whole("head_dim", dim // heads)
    if heads % kv_heads or head_dim % 2:
        raise BadInput(f"{source} has {heads} heads of {head_dim} for {kv_heads} of keys: no multiple, or an odd size")
    layers = fields.whole("num_hidden_layers")
    _only_plain(fields)
    outer = {name: data[name] for name in OF_ROPE if name in data}
    inner = ropes.joined(fields.inner("rope_scaling"), fields.inner("rope_parameters"), source)
    rope = Fields({**outer, **inner}, source)
    longest = fields.whole("max_position_embeddings")
    scaling = ropes.read(rope, longest)
    if isinstance(scaling, Yarn):  # people add it to a config.json whose positions are the first training's
        longest = max(longest, int(scaling.factor * scaling.original))
    has_flags = kind in ("llama", "qwen3")  # the others' biases are what they are, whatever a config.json says
    return Config(
        layers=layers,
        dim=dim,
        inner=fields.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=fields.whole("vocab_size"),
        longest=longest,
        eps=fields.number("rms_norm_eps", 1e-6),
        theta=rope.number("rope_theta", 10000.0),
        qkv_bias=kind == "qwen2" or (has_flags and fields.flag("attention_bias")),
        out_bias=has_flags and fields.flag("attention_bias"),
        mlp_bias=kind == "llama" and fields.flag("mlp_bias"),
        tied=fields.flag("tie_word_embeddings"),
        qk_norm=kind == "qwen3",
        windows=_windows(fields, kind, layers),
        scaling=scaling,
        packing=packing.read(fields.inner("quantization_config"), source),
        ends=fields.tokens("eos_token_id"),
    )


def _only_plain(fields: Fields) -> None:
    """Refuse what another model's layers would compute, whatever this file calls itself."""
    for name, nothing in PLAIN.items():
        if (value := fields.data.get(name)) is not None and value != nothing:
            raise BadInput(f"{fields.source} has {name} {str(value)[:40]}, which `generate` does not compute")


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    """By layer, as transformers has it: Mistral's in all of them, Qwen's from `max_window_layers` on, or by
    `layer_types`; Llama has none."""
    is_by_layer = kind in ("qwen2", "qwen3") and fields.flag("use_sliding_window")
    has_window = (kind == "mistral" or is_by_layer) and fields.data["sliding_window"] is not None
    first = layers if not has_window else fields.whole("max_window_layers", least=0) if is_by_layer else 0
    usual = [SLIDING if layer >= first else FULL for layer in range(layers)]
    types = usual if fields.data.get("layer_types") is None else fields.data["layer_types"]
    is_known = isinstance(types, list) and len(types) == layers and all(each in (FULL, SLIDING) for each in types)
    if not is_known or not ((has_window and is_by_layer) or types == usual):
        may_be = f"{FULL} or {SLIDING}" if has_window and is_by_layer else usual[0]
        raise BadInput(f"{fields.source} has layer_types other than {may_be} in all {layers} layers")
    if SLIDING not in types:
        return ()
    window = fields.whole("sliding_window")
    return tuple(window if each == SLIDING else None for each in types)
