"""A config.json, or a name that stands for one, read into a Model; what it lacks is said in one line."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from sublight.errors import BadInput, nearest
from sublight.predict.families import READERS
from sublight.predict.fields import Config, Fields
from sublight.predict.model import Model


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
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"cannot read {path}: {error}; it should be a model's config.json") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} is no config.json: it holds a {type(data).__name__}, not an object")
    return data


def _name_of(path: Path) -> str:
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem


def from_config(config: Config, *, name: str = "model", source: str = "given") -> Model:
    """The model that a config describes; some hold that of their text part inside."""
    quantization = config.get("quantization_config")
    is_part = isinstance(config.get("text_config"), dict) and "model_type" in config["text_config"]
    if is_part:
        config = config["text_config"]
    stored = _stored(quantization or config.get("quantization_config"))
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise BadInput(f"the config of {name} lacks model_type: is it a model's config.json?")
    if kind not in READERS:
        raise BadInput(f"the config of {name} has model_type {kind!r}, which is not known: known are {known_types()}")
    if config.get("head_dim") == 0:  # null means that the width is cut evenly
        raise BadInput(f"the config of {name} gives a head_dim of 0: it must be a whole number above 0")
    if refusal := next((f"{key}: {why}" for key, why in _REFUSED.items() if config.get(key)), ""):
        raise BadInput(f"the config of {name} has {refusal}")
    model = replace(READERS[kind](Fields(config, name), source), is_part=is_part, stored=stored)
    if bad := next((field for field in ("hidden", "heads", "kv_heads", "head_dim") if _missing(model, field)), ""):
        raise BadInput(
            f"the config of {name} gives a {bad} of {getattr(model, bad)}: it must be a whole number above 0"
        )
    if (
        model.heads
        and model.hidden % model.heads
        and model.head_dim == model.hidden // model.heads
        and not (model.latent or config.get("head_dim"))
    ):
        raise BadInput(f"the config of {name} has {model.heads} heads for a width of {model.hidden}: they must divide")
    for experts in (block.experts for block in model.blocks if block.experts):
        if not 0 < experts.chosen <= experts.count:
            raise BadInput(f"the config of {name} chooses {experts.chosen} of {experts.count} experts for a token")
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        raise BadInput(f"the config of {name} has {model.heads} heads for {model.kv_heads} of keys: they must divide")
    return model


def _stored(quantization: Any) -> str:
    """How a checkpoint's weights are quantized, in words; empty where they are not.

    >>> _stored({"quant_method": "awq", "bits": 4}), _stored({"quant_method": "fp8"}), _stored(None)
    ('awq of 4 bits', 'fp8', '')
    """
    if not isinstance(quantization, dict) or not quantization:
        return ""
    bits = quantization.get("bits") or (4 if quantization.get("load_in_4bit") else None)
    method = str(quantization.get("quant_method", "some way"))
    return f"{method} of {bits} bits" if isinstance(bits, int) else method


_REFUSED = {  # layers that this census would count wrongly
    "index_topk": "sparse attention (index_topk), which is not counted yet",
    "linear_num_key_heads": "linear attention layers, which are not counted yet",
    "mamba_num_heads": "Mamba layers, which are not counted yet",
    "use_bidirectional_attention": "attention to later tokens, which is not counted yet",
    "add_cross_attention": "cross-attention, which is not counted yet",
    "is_encoder_decoder": "an encoder and a decoder, which are not counted yet",
    "num_kv_shared_layers": "layers that share their cache, which are not counted yet",
}


def _missing(model: Model, field: str) -> bool:
    return model.family != "convolution" and getattr(model, field) < 1


def known_types() -> str:
    return ", ".join(sorted(READERS))
