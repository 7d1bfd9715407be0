"""Hugging Face's GPT-2 in and out: config.json and safetensors. Their weights lie as (in, out), ours as (out, in)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sublight.engines.train.gpt2 import EPS, Gpt2
from sublight.engines.train.shape import Shape
from sublight.errors import BadInput
from sublight.results import write_file, write_json

WEIGHTS = "model.safetensors"
_ENDS = {"tokens": "wte.weight", "positions": "wpe.weight", "norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}
_BLOCK = {
    **{"norm_1": "ln_1", "norm_2": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj"},
    **{"up": "mlp.c_fc", "down": "mlp.c_proj"},
}
_PRODUCTS = ("qkv", "out", "up", "down")
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # masks that old files carry


def _theirs(name: str) -> tuple[str, bool]:
    """Hugging Face's name for a parameter of ours, and whether it is transposed.

    >>> _theirs("blocks.3.qkv.weight"), _theirs("tokens")
    (('transformer.h.3.attn.c_attn.weight', True), ('transformer.wte.weight', False))
    """
    if name in _ENDS:
        return f"transformer.{_ENDS[name]}", False
    _, number, part, kind = name.split(".")
    return f"transformer.h.{number}.{_BLOCK[part]}.{kind}", kind == "weight" and part in _PRODUCTS


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise BadInput("Hugging Face's weights need safetensors: pip install 'sublight[engines]'") from None
    return safetensors.torch


def read_shape(folder: Path) -> Shape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; give a folder with config.json and {WEIGHTS}") from None
    except ValueError:
        raise BadInput(f"{path} is no JSON: save the model again") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is no JSON object: save the model again")
    return shape_of(config, str(path))


def shape_of(config: Mapping[str, Any], source: str) -> Shape:
    if config.get("model_type") != "gpt2":
        raise BadInput(f"{source} is of a {config.get('model_type', 'nameless model')}: `train` takes gpt2")
    inner, dim = config.get("n_inner"), config.get("n_embd", 768)
    unlike = {
        "activation_function": config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": inner is not None and (type(dim) is not int or inner != 4 * dim),
        "scale_attn_weights": config.get("scale_attn_weights", True) is not True,
        "scale_attn_by_inverse_layer_idx": bool(config.get("scale_attn_by_inverse_layer_idx")),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", EPS) != EPS,
        "tie_word_embeddings": config.get("tie_word_embeddings", True) is False,
    }
    if bad := [name for name, is_unlike in unlike.items() if is_unlike]:
        raise BadInput(f"{source} has {bad[0]} = {config.get(bad[0])!r}, which this GPT-2 has not: use a plain gpt2")
    usual = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    sizes = {name: config.get(name, value) for name, value in usual.items()}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value < 2**31:
            raise BadInput(f"{source} has {name} = {str(value)[:40]!r}, which is no size: save the model again")
    return Shape(
        layers=sizes["n_layer"],
        dim=sizes["n_embd"],
        heads=sizes["n_head"],
        context=sizes["n_positions"],
        vocab=sizes["vocab_size"],
    )


@torch.no_grad()
def load(model: Gpt2, folder: Path) -> None:
    """All of the weights, or none and one line why."""
    path = folder / WEIGHTS
    try:
        found = _safetensors().load_file(path)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"cannot read {path}: {' '.join(str(error).split())[:120]}; save the model again") from None
    found = {name if name.startswith("transformer.") else f"transformer.{name}": x for name, x in found.items()}
    found = {name: x for name, x in found.items() if not name.endswith((*_BUFFERS, "lm_head.weight"))}
    ours = {_theirs(name): parameter for name, parameter in model.named_parameters()}
    names = {name for name, _ in ours}
    if odd := sorted(names ^ set(found)):
        what = "lacks" if odd[0] in names else "has, beyond a GPT-2's,"
        raise BadInput(f"{path} {what} {odd[0]}: it does not fit its config.json")
    for (name, is_transposed), parameter in ours.items():
        weight = found[name].T if is_transposed else found[name]
        if weight.shape != parameter.shape:
            raise BadInput(f"{path}: {name} is {tuple(found[name].shape)}, which does not fit its config.json")
        parameter.copy_(weight)


def save(model: Gpt2, folder: Path) -> None:
    """Save the model as `GPT2LMHeadModel.from_pretrained` reads it."""
    shape, safetensors = model.shape, _safetensors()
    weights = {}
    for name, parameter in model.named_parameters():
        theirs, is_transposed = _theirs(name)
        x = parameter.detach().float().cpu()
        weights[theirs] = (x.T if is_transposed else x).contiguous()
    config = {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"},
        **{"n_layer": shape.layers, "n_embd": shape.dim, "n_head": shape.heads, "n_positions": shape.context},
        **{"vocab_size": shape.vocab, "layer_norm_epsilon": EPS, "tie_word_embeddings": True},
        **{"attn_pdrop": model.dropout, "embd_pdrop": model.dropout, "resid_pdrop": model.dropout},
        **{"bos_token_id": None, "eos_token_id": None, "dtype": "float32"},
    }
    write_file(safetensors.save(weights, metadata={"format": "pt"}), folder / WEIGHTS)
    write_json(config, folder / "config.json")
