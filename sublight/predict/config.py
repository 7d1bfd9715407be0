"""A config.json, or a name that stands for one, read into a Model; what it lacks is said in one line."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sublight.errors import BadInput, nearest
from sublight.predict.model import Block, Experts, Latent, Model, Stage

Config = Mapping[str, Any]


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def known_names() -> tuple[str, ...]:
    return tuple(name for name in _table() if name != "sources")


def load(words: str) -> Model:
    """The model of that name, or of that file or folder.

    >>> load("llama-3-8b").hidden, load("meta-llama/Meta-Llama-3.1-8B").layers
    (4096, 32)
    >>> load("lama-3-8b")
    Traceback (most recent call last):
    sublight.errors.BadInput: unknown model 'lama-3-8b': did you mean llama-3-8b, llama-3-70b, llama-3.2-3b? Any other one: give its config.json
    """  # noqa: E501
    path = Path(words)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInput(
                f"there is no config.json in {words}: give a model's folder, its config.json or a known name"
            )
    if path.is_file():
        return from_config(_read(path), name=_name_of(path), source=str(path))
    if path.suffix == ".json":
        raise BadInput(f"there is no file {words}: give a model's config.json or a known name")
    key = _spellings().get(_one_word(words))
    if key is None:
        near = nearest(words.lower(), list(known_names()))
        raise BadInput(f"unknown model {words!r}: did you mean {near}? Any other one: give its config.json")
    entry = _table()[key]
    return from_config(entry, name=key, source=str(_table()["sources"][entry["source"]]))


def _one_word(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@functools.cache
def _spellings() -> dict[str, str]:
    found = {}
    for key in known_names():
        entry = _table()[key]
        for spelling in (key, entry["name"], entry["name"].rpartition("/")[2], *entry.get("aliases", ())):
            found[_one_word(spelling)] = key
    return found


def _read(path: Path) -> Config:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}; it should be a model's config.json") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} is no config.json: it holds a {type(data).__name__}, not an object")
    return data


def _name_of(path: Path) -> str:
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem


def from_config(config: Config, *, name: str = "model", source: str = "given") -> Model:
    """The model that a config describes; some hold that of their text part inside."""
    if isinstance(config.get("text_config"), dict) and "model_type" in config["text_config"]:
        config = config["text_config"]
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise BadInput(f"the config of {name} lacks model_type: is it a model's config.json?")
    if kind not in READERS:
        raise BadInput(f"the config of {name} has model_type {kind!r}, which is not known: known are {known_types()}")
    if refusal := next((f"{key}: {why}" for key, why in _REFUSED.items() if config.get(key)), ""):
        raise BadInput(f"the config of {name} has {refusal}")
    model = READERS[kind](_Fields(config, name), source)
    if bad := next((field for field in ("hidden", "heads", "kv_heads", "head_dim") if _missing(model, field)), ""):
        raise BadInput(
            f"the config of {name} gives a {bad} of {getattr(model, bad)}: it must be a whole number above 0"
        )
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        raise BadInput(f"the config of {name} has {model.heads} heads for {model.kv_heads} of keys: they must divide")
    return model


_REFUSED = {  # layers that this census would count wrongly
    "index_topk": "sparse attention (index_topk), which is not counted yet",
    "linear_num_key_heads": "linear attention layers, which are not counted yet",
    "mamba_num_heads": "Mamba layers, which are not counted yet",
    "kv_shared_layers": "layers that share their cache, which are not counted yet",
}


def _missing(model: Model, field: str) -> bool:
    return model.family != "convolution" and getattr(model, field) < 1


def known_types() -> str:
    return ", ".join(sorted(READERS))


class _Fields:
    """A config's fields by Hugging Face's names; one that is needed and not there is the user's mistake."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name

    def number(self, *names: str) -> int:
        value = self.maybe(*names)
        if value is None:
            raise BadInput(f"the config of {self.name} lacks {' or '.join(names)}: add it to the file")
        return value

    def maybe(self, *names: str) -> int | None:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BadInput(f"the config of {self.name} has {name} = {value!r}: it must be a whole number")
            return value
        return None

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.config.get(name, default))


def _blocks(fields: _Fields, experts: Experts | None, dense_first: int = 0) -> tuple[Block, ...]:
    """Layers that are alike, together: they differ in their window and in whether they have experts."""
    layers = fields.number("num_hidden_layers")
    inner = fields.number("intermediate_size")
    groups: dict[Block, int] = {}
    only_dense = set(fields.config.get("mlp_only_layers") or ())
    step = fields.maybe("decoder_sparse_step", "moe_layer_freq") or 1
    for index in range(layers):
        has_experts = experts is not None and index >= dense_first and index not in only_dense
        has_experts = has_experts and (index + 1) % step == 0
        kept = experts if has_experts else None
        block = Block(count=0, inner=0 if kept else inner, experts=kept, window=_window(fields, index))
        groups[block] = groups.get(block, 0) + 1
    return tuple(
        Block(count=count, inner=block.inner, experts=block.experts, window=block.window)
        for block, count in groups.items()
    )


def _window(fields: _Fields, index: int) -> int | None:
    window = fields.maybe("sliding_window")
    if not window or not fields.flag("use_sliding_window", True):
        return None
    types, pattern = fields.config.get("layer_types"), fields.maybe("sliding_window_pattern")
    if isinstance(types, list) and index < len(types):
        return window if types[index] == "sliding_attention" else None
    return window if not pattern or (index + 1) % pattern else None


def _decoder(
    fields: _Fields,
    source: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    norms: int = 2,
    experts: Experts | None = None,
    tied: bool = False,
    **more: Any,
) -> Model:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    return Model(
        name=fields.name,
        source=source,
        family="decoder",
        hidden=hidden,
        heads=heads,
        kv_heads=fields.maybe("num_key_value_heads") or heads,
        head_dim=fields.maybe("head_dim") or (hidden // heads if heads else 0),
        vocab=fields.number("vocab_size"),
        blocks=_blocks(fields, experts, fields.maybe("first_k_dense_replace") or 0),
        tied=fields.flag("tie_word_embeddings", tied),
        norms=norms,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        longest=fields.maybe("max_position_embeddings"),
        **more,
    )


def _llama(fields: _Fields, source: str) -> Model:
    bias = fields.flag("attention_bias")
    return _decoder(fields, source, qkv_bias=bias, out_bias=bias)


def _qwen2(fields: _Fields, source: str) -> Model:
    return _decoder(fields, source, qkv_bias=True)


def _qwen3(fields: _Fields, source: str) -> Model:
    return _decoder(fields, source, qk_norm=True, qkv_bias=fields.flag("attention_bias"))


def _qwen3_moe(fields: _Fields, source: str) -> Model:
    experts = Experts(
        count=fields.number("num_experts"),
        chosen=fields.number("num_experts_per_tok"),
        inner=fields.number("moe_intermediate_size"),
    )
    return _decoder(fields, source, qk_norm=True, experts=experts)


def _mixtral(fields: _Fields, source: str) -> Model:
    experts = Experts(
        count=fields.number("num_local_experts"),
        chosen=fields.number("num_experts_per_tok"),
        inner=fields.number("intermediate_size"),
    )
    return _decoder(fields, source, experts=experts)


def _gpt_oss(fields: _Fields, source: str) -> Model:
    experts = Experts(
        count=fields.number("num_local_experts"),
        chosen=fields.number("num_experts_per_tok", "experts_per_token"),
        inner=fields.number("intermediate_size"),
        bias=True,
    )
    return _decoder(fields, source, experts=experts, qkv_bias=True, out_bias=True, sinks=True)


def _gemma(fields: _Fields, source: str) -> Model:
    return _decoder(fields, source, tied=True)


def _gemma2(fields: _Fields, source: str) -> Model:
    return _decoder(fields, source, tied=True, norms=4)


def _deepseek(fields: _Fields, source: str) -> Model:
    inner = fields.number("moe_intermediate_size")
    experts = Experts(
        count=fields.number("n_routed_experts"),
        chosen=fields.number("num_experts_per_tok"),
        inner=inner,
        shared_inner=inner * (fields.maybe("n_shared_experts") or 0),
        score_bias=fields.config.get("topk_method") == "noaux_tc" or fields.config["model_type"] != "deepseek_v2",
    )
    latent = Latent(
        q_rank=fields.maybe("q_lora_rank"),
        kv_rank=fields.number("kv_lora_rank"),
        nope_dim=fields.number("qk_nope_head_dim"),
        rope_dim=fields.number("qk_rope_head_dim"),
        value_dim=fields.number("v_head_dim"),
    )
    return _decoder(fields, source, experts=experts, latent=latent)


def _gpt2(fields: _Fields, source: str) -> Model:
    hidden, heads = fields.number("n_embd", "hidden_size"), fields.number("n_head", "num_attention_heads")
    inner = fields.maybe("n_inner") or 4 * hidden
    positions = fields.number("n_positions", "max_position_embeddings")
    return Model(
        name=fields.name,
        source=source,
        family="decoder",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        vocab=fields.number("vocab_size"),
        blocks=(Block(count=fields.number("n_layer", "num_hidden_layers"), inner=inner),),
        tied=fields.flag("tie_word_embeddings", True),
        gated=False,
        rms=False,
        rotary=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions=positions,
        longest=positions,
    )


def _encoder(fields: _Fields, source: str, **more: Any) -> Model:
    """BERT and ViT: LayerNorm, biases everywhere, every token sees every other."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    block = Block(count=fields.number("num_hidden_layers"), inner=fields.number("intermediate_size"))
    return Model(
        name=fields.name,
        source=source,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        blocks=(block,),
        gated=False,
        rms=False,
        rotary=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **more,
    )


def _bert(fields: _Fields, source: str) -> Model:
    positions = fields.number("max_position_embeddings")
    return _encoder(
        fields,
        source,
        family="encoder",
        vocab=fields.number("vocab_size"),
        positions=positions,
        segments=fields.number("type_vocab_size"),
        pooler=True,
        longest=positions,
    )


def _vit(fields: _Fields, source: str) -> Model:
    patches = (fields.number("image_size") // fields.number("patch_size")) ** 2
    return _encoder(
        fields,
        source,
        family="vision",
        patch=fields.number("patch_size"),
        channels=fields.maybe("num_channels") or 3,
        tokens=patches + 1,  # the class token
        positions=patches + 1,
        labels=len(fields.config.get("id2label") or ()) or fields.maybe("num_labels") or 1000,
    )


def _dit(fields: _Fields, source: str) -> Model:
    """Norms without parameters; six vectors a layer made of the time step and the class modulate them."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    return Model(
        name=fields.name,
        source=source,
        family="diffusion",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        blocks=(Block(count=fields.number("num_hidden_layers"), inner=4 * hidden),),
        gated=False,
        rms=False,
        norms=0,
        rotary=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        patch=fields.number("patch_size"),
        channels=fields.number("in_channels"),
        tokens=(fields.number("image_size") // fields.number("patch_size")) ** 2,
        labels=fields.maybe("num_labels") or 1000,
        modulation=True,
    )


def _resnet(fields: _Fields, source: str) -> Model:
    depths, widths = fields.config.get("depths"), fields.config.get("widths")
    if not isinstance(depths, list) or not isinstance(widths, list) or len(depths) != len(widths):
        raise BadInput(f"the config of {fields.name} lacks depths and widths, lists of one length")
    image = fields.number("image_size")
    stages, channels, size = [], widths[0], image // 4
    for index, (count, width) in enumerate(zip(depths, widths, strict=True)):
        stride = 1 if index == 0 else 2
        stages.append(
            Stage(count=count, width=width, in_channels=channels, out_channels=4 * width, in_size=size, stride=stride)
        )
        channels, size = 4 * width, size // stride
    labels = fields.maybe("num_labels") or 1000
    return Model(
        name=fields.name, source=source, family="convolution", stages=tuple(stages), image=image, labels=labels
    )


READERS: dict[str, Callable[[_Fields, str], Model]] = {
    "llama": _llama,
    "mistral": _llama,
    "phi3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "dit": _dit,
    "resnet": _resnet,
}
