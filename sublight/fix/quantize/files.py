"""A model with packed layers in a safetensors file, and back into a model of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sublight.errors import BadInput
from sublight.fix.layers import put
from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.linear import PackedLinear

KEY = "sublight.packed"  # in the file's metadata: what was packed, and how


def save(model: torch.nn.Module, file: str | Path) -> None:
    """All parameters and buffers, each tensor once, with a note of which layers are packed."""
    from safetensors.torch import save_file

    layers = {
        name: {**_facts(module), "has_bias": module.bias is not None}
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear | CodedLinear)
    }
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, x in model.state_dict().items():
        first = names.setdefault(x.data_ptr() if x.numel() else id(x), name)
        if first != name and tensors[first].shape == x.shape:
            shared[name] = first
        else:
            tensors[name] = x.contiguous()
    note = {"version": 1, "layers": layers, "shared": shared}
    save_file(tensors, str(file), metadata={KEY: json.dumps(note), "format": "pt"})


def load(model: torch.nn.Module, file: str | Path) -> int:
    """Into a model as it was before it was packed; how many layers are packed now."""
    from safetensors import safe_open

    if not Path(file).is_file():
        raise BadInput(f"{file} is not a file")
    try:
        with safe_open(str(file), framework="pt") as opened:
            note = json.loads((opened.metadata() or {}).get(KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except Exception as error:  # safetensors has its own error class, which moves between its versions
        raise BadInput(f"{file} is no safetensors file: {error}") from None
    if not isinstance(note, dict) or note.get("version") != 1:
        raise BadInput(f"{file} was not written by sublight's save_quantized")
    state: dict[str, Any] = tensors | {name: tensors[first] for name, first in note["shared"].items()}
    named = dict(model.named_modules())
    for name, how in note["layers"].items():
        if name not in named:
            raise BadInput(f"{file} has a layer {name}, which this model has not")
        before = named[name]
        bias: Any = getattr(before, "bias", None) if how["has_bias"] else None
        device = next(iter(before.parameters())).device
        put(model, name, _layer(name, how, state, bias).to(device))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise BadInput(f"{file} does not fit this model: {(missing or unexpected)[0]} is only in one of them")
    return len(note["layers"])


def _facts(module: PackedLinear | CodedLinear) -> dict[str, Any]:
    """What a layer is, beside its tensors."""
    if isinstance(module, CodedLinear):
        return {"kind": module.kind}
    return {"bits": module.bits, "in_features": module.in_features}


def _layer(name: str, how: dict[str, Any], state: dict[str, Any], bias: Any) -> PackedLinear | CodedLinear:
    if "kind" in how:
        return CodedLinear(state[f"{name}.codes"], state[f"{name}.scales"], bias, kind=how["kind"])
    packed, scales, zeros = (state[f"{name}.{part}"] for part in ("packed", "scales", "zeros"))
    return PackedLinear(packed, scales, zeros, bias, bits=how["bits"], in_features=how["in_features"])
