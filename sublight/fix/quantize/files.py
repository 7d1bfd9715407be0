"""A model with packed or sparse layers in a safetensors file, and back into a model of the same kind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from sublight.errors import BadInput
from sublight.fix.layers import put, weight_of
from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.linear import PackedLinear
from sublight.fix.sparsify.linear import SparseLinear
from sublight.ops.sparse.sparsify_24 import sparsify_24, unpack_24

Changed = PackedLinear | CodedLinear | SparseLinear
SPARSE = ("packed_24", "meta_24")  # a sparse weight in the file: half of its values, and where they were
KEY = "sublight.packed"  # in the file's metadata: what was packed, and how
VERSION = 3  # of the packing: 1 and 2 had their values, words or scales in another order


def save(model: torch.nn.Module, file: str | Path) -> None:
    """All parameters and buffers, each tensor once, with a note of which layers are packed."""
    from safetensors.torch import save_file

    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"save_quantized takes a torch.nn.Module, not {type(model).__name__}")
    layers = {
        name: {**_facts(module), "has_bias": module.bias is not None}
        for name, module in model.named_modules()
        if isinstance(module, Changed)
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            parts = sparsify_24(module.dense.contiguous())
            tensors |= {f"{name}.{part}": x for part, x in zip(SPARSE, parts, strict=True)}
    sparse = {f"{name}.weight" for name, how in layers.items() if how.get("kind") == "2:4"}
    names: dict[tuple[Any, ...], str] = {}
    shared: dict[str, str] = {}
    storages: set[int] = set()
    for name, x in model.state_dict().items():
        if name in sparse:
            continue
        first = names.setdefault((x.data_ptr() or id(x), x.dtype, x.shape, x.stride()), name)
        if first != name:
            shared[name] = first
            continue
        at = x.untyped_storage().data_ptr()
        tensors[name] = x.clone(memory_format=torch.contiguous_format) if at in storages else x.contiguous()
        storages.add(at)
    note = {"version": VERSION, "layers": layers, "shared": shared}
    half = Path(file).with_name(f".{Path(file).name}.{os.getpid()}")
    try:
        save_file(tensors, str(half), metadata={KEY: json.dumps(note), "format": "pt"})
        half.replace(file)
    except Exception as error:  # safetensors has its own error class, which moves between its versions
        half.unlink(missing_ok=True)
        raise BadInput(f"{file} cannot be written: {error}") from None


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
    if not isinstance(note, dict):
        raise BadInput(f"{file} was not written by sublight's save_quantized")
    if note.get("version") != VERSION:
        raise BadInput(f"{file} was packed by another version of sublight: pack the model again, and save it")
    state: dict[str, Any] = tensors | {name: tensors[first] for name, first in note["shared"].items()}
    sparse = [name for name, how in note["layers"].items() if how.get("kind") == "2:4"]
    for name in sparse:
        packed, meta = (state.pop(f"{name}.{part}") for part in SPARSE)
        state[f"{name}.weight"] = unpack_24(packed, meta, note["layers"][name]["in_features"])
    layers = _layers(model, state, note["layers"], file)
    named = dict(model.named_modules())
    packed = {id(named[name]): layer for name, layer in layers.items()}
    places = {name: packed[id(m)] for name, m in model.named_modules(remove_duplicate=False) if id(m) in packed}
    parts = {f"{name}.{part}": x for name, layer in places.items() for part, x in layer.state_dict().items()}
    gone = tuple(f"{name}." for name in places)
    wanted = {name: x for name, x in model.state_dict().items() if not name.startswith(gone)} | parts
    for name in sorted(wanted.keys() ^ state.keys()):
        raise BadInput(f"{file} does not fit this model: {name} is only in one of them")
    for name, x in wanted.items():
        if state[name].shape != x.shape:
            shapes = f"{tuple(state[name].shape)} there, {tuple(x.shape)} in this model"
            raise BadInput(f"{file} does not fit this model: {name} is {shapes}")
    for name, layer in layers.items():  # from here on nothing fails: a model is packed as a whole, or left as it was
        put(model, named[name], layer)
    held = {f"{name}.weight" for name in sparse}  # compressed by now, on a GPU
    model.load_state_dict({name: x for name, x in state.items() if name not in held}, strict=False)
    return len(layers)


def _facts(module: Changed) -> dict[str, Any]:
    """What a layer is, beside its tensors."""
    if isinstance(module, SparseLinear):
        return {"kind": "2:4", "in_features": module.in_features}
    if isinstance(module, CodedLinear):
        return {"kind": module.kind}
    return {"bits": module.bits, "in_features": module.in_features}


def _layers(
    model: torch.nn.Module, state: dict[str, Any], wanted: dict[str, Any], file: str | Path
) -> dict[str, Changed]:
    """The packed layers by name, each where the layer lies that it stands for."""
    named, layers = dict(model.named_modules()), dict[str, Changed]()
    for name, how in wanted.items():
        if name not in named:
            raise BadInput(f"{file} has a layer {name}, which this model has not")
        weight = weight_of(named[name])
        if weight is None:
            raise BadInput(f"{file} packs {name}, which is a {type(named[name]).__name__} here and no linear layer")
        bias: Any = getattr(named[name], "bias", None) if how["has_bias"] else None
        layer = _layer(name, how, state, bias)
        shape = layer.out_features, layer.in_features
        if weight.shape != shape:
            raise BadInput(f"{file} packs {name} as {shape}, and it is {tuple(weight.shape)} in this model")
        layers[name] = layer.to(weight.device).train(named[name].training)
    return layers


def _layer(name: str, how: dict[str, Any], state: dict[str, Any], bias: Any) -> Changed:
    if how.get("kind") == "2:4":
        return SparseLinear(state[f"{name}.weight"], bias)
    if "kind" in how:
        return CodedLinear(state[f"{name}.codes"], state[f"{name}.scales"], bias, kind=how["kind"])
    packed, scales, zeros = (state[f"{name}.{part}"] for part in ("packed", "scales", "zeros"))
    return PackedLinear(packed, scales, zeros, bias, bits=how["bits"], in_features=how["in_features"])
