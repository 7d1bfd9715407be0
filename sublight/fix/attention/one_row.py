"""One new token of one text through Hugging Face's decoder layers, in six launches a layer, each begun early.

A step of one row reads every weight once and does little with it: launches between the reads are what it loses. Here a
layer is q, k and v as one product with the norm inside (`row_linear`), rope with the write to the cache, attention, and
three products more with the residuals, the second norm and SwiGLU inside. Inside of a CUDA graph on a Hopper GPU each
begins before the last one ends. Weights that are read together are laid together meanwhile: the layers' own parameters
are views of one tensor, so names, values and memory stay, and afterwards they are laid apart again. What was captured
by hand before (`torch.cuda.graph`) has their old addresses.

It is for layers that are just what transformers made of a Llama, Mistral or Qwen2, or what `sublight.patch` and
`sublight.quantize` made of those; every other layer, and every call of more than one row, runs its own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sublight.fix.patch.swap import is_patched
from sublight.fix.quantize.linear import PackedLinear
from sublight.fix.quantize.row import streamed, why_not_streamed
from sublight.ops.attention.paged_attention import paged_attention
from sublight.ops.attention.rope_kv_write import rope_kv_write
from sublight.ops.matmul.matmul import matmul

FAMILIES = ("llama", "mistral", "qwen2")
NORMS, ATTENTIONS = ("input_layernorm", "post_attention_layernorm"), ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Joined:
    """Several layers' weights as one, until they are laid apart again."""

    def __init__(self, layers: list[Any]) -> None:
        """The layers' tensors become views: what was theirs alone is free again."""
        self.weight: Any = None
        self.places: list[tuple[Any, str, int]] = []  # a layer, the name of its tensor, and where that lies
        self.bias = self._join(layers, "bias")
        if isinstance(layers[0], PackedLinear):
            packed, scales, zeros = (self._join(layers, name) for name in ("packed", "scales", "zeros"))
            how = {"bits": layers[0].bits, "in_features": layers[0].in_features}
            self.packed = PackedLinear(packed, scales, zeros, self.bias, **how)
        else:
            self.weight = self._join(layers, "weight")

    def _join(self, layers: list[Any], name: str) -> Any:
        """The layers' tensors one above the other, each a view of the whole from now on."""
        parts = [getattr(layer, name) for layer in layers]
        if parts[0] is None:
            return None
        with torch.inference_mode(parts[0].is_inference()), torch.no_grad():  # else the parts would refuse it
            whole = torch.cat([part.detach() for part in parts])
            at = 0
            for layer, part in zip(layers, parts, strict=True):
                part.data = whole[at : at + len(part)]
                self.places.append((layer, name, part.data_ptr()))
                at += len(part)
        return whole

    @property
    def product(self) -> Any:
        return self if self.weight is not None else self.packed

    @property
    def holds(self) -> bool:
        """Whether the layers' tensors still lie here: somebody may have moved or replaced them."""
        return all(getattr(layer, name).data_ptr() == place for layer, name, place in self.places)

    def apart(self) -> None:
        """Each part has memory of its own again, with the values that it has now."""
        for layer, name, place in self.places:
            part = getattr(layer, name)
            if part.data_ptr() == place:
                with torch.inference_mode(part.is_inference()), torch.no_grad():
                    part.data = part.detach().clone()


def why_not(model: Any) -> str:
    """Why this model's layers run their own code for one row, too; empty where they do not."""
    layers = getattr(model.get_decoder(), "layers", ())
    if not layers:
        return "no decoder layers were found"
    tensors = [x for layer in layers for x in (*layer.parameters(), *layer.buffers())]
    if len({x.untyped_storage().data_ptr() for x in tensors}) < len(tensors) or len(set(layers)) < len(layers):
        return "layers share weights"
    if any(x.nbytes != x.untyped_storage().nbytes() for x in tensors):
        return "weights are parts of other tensors"
    for layer in layers:
        if reason := _why_not(layer):
            return reason
    return ""


def _why_not(layer: Any) -> str:
    kind = type(layer)
    family = next((name for name in FAMILIES if kind.__module__ == f"transformers.models.{name}.modeling_{name}"), "")
    if not family or not kind.__name__.endswith("DecoderLayer"):
        return f"{kind.__name__} is not a layer of transformers' {', '.join(FAMILIES)}"
    if type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"the activation is {type(layer.mlp.act_fn).__name__}, not SiLU"
    parts = [layer, layer.self_attn, layer.mlp, *(getattr(layer, name) for name in NORMS)]
    linears = [*(getattr(layer.self_attn, name) for name in ATTENTIONS), *(getattr(layer.mlp, name) for name in MLP)]
    if len(set(linears)) < len(linears):
        return "layers share weights"
    if any(type(module).__module__ != kind.__module__ for module in parts):
        return "a part of a layer is of another class"
    if len({type(each) for each in linears}) > 1 or type(linears[0]) not in (torch.nn.Linear, PackedLinear):
        return f"products are by {type(linears[0]).__name__}, or by several kinds"
    if len({each.bits for each in linears if isinstance(each, PackedLinear)}) > 1:
        return "packed with several numbers of bits"
    for module in (*parts, *linears, layer.mlp.act_fn):
        if _is_changed(module):
            return f"{type(module).__name__} has hooks, or a forward of its own"
    if layer.training:
        return "the model trains: call its eval()"
    if any(len({each.bias is None for each in group}) > 1 for group in (linears[:3], linears[4:6])):
        return "some products have a bias, and others none"
    hidden = layer.input_layernorm.weight
    floats = {x.dtype for x in (*layer.parameters(), *layer.buffers()) if x.is_floating_point()}
    if len(floats) > 1:
        return "its weights are of several data types"
    return next((reason for each in linears if (reason := why_not_streamed(each, _row_like(each, hidden)))), "")


def _is_changed(module: Any) -> bool:
    """Whether its class's forward is not all that runs, or it is not its class's; `sublight.patch` changes nothing."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    every = torch.nn.modules.module
    if any(getattr(module, name, None) or getattr(every, f"_global{name}", None) for name in hooks):
        return True
    if "forward" in vars(module) and not is_patched(module) and not isinstance(vars(module)["forward"], Row):
        return True
    defined = getattr(type(module).forward, "__module__", "")
    return not defined.startswith(("torch.", "transformers.", "sublight."))


def _row_like(linear: Any, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(1, linear.in_features)


class Row:
    """A layer's forward inside of `paged_cache`: a step's one row goes by here, all else by the layer's own."""

    def __init__(self, layer: Any, cache: Any) -> None:
        self.layer, self.own, self.cache = layer, layer.forward, cache
        attention, mlp = layer.self_attn, layer.mlp
        self.joined = (
            Joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            Joined([mlp.gate_proj, mlp.up_proj]),
        )
        self.qkv, self.gate_up = (each.product for each in self.joined)
        self.first = torch.zeros(1, dtype=torch.int64, device=layer.input_layernorm.weight.device)

    def _is_changed(self) -> bool:
        """Whether somebody has changed the layer since: moved it, loaded into it, wrapped a part of it."""
        layer = self.layer
        attention, mlp = layer.self_attn, layer.mlp
        given = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
        owners = [owner for each in self.joined for owner, name, _ in each.places if name in ("weight", "packed")]
        is_same = all(owner is now for owner, now in zip(owners, given, strict=True))
        return not is_same or not all(each.holds for each in self.joined) or bool(_why_not(layer))

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, position_embeddings: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        layer, cache = self.layer, self.cache
        is_step = past_key_values is cache and cache.seen and hidden_states.shape[:2] == (1, 1)
        is_step = is_step and not args and position_embeddings[0].shape[-1] == layer.self_attn.head_dim
        is_plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled(hidden_states.device.type)
        is_plain = is_plain and hidden_states.dtype == layer.input_layernorm.weight.dtype
        if not is_step or not is_plain or self._is_changed():
            given = {"past_key_values": past_key_values, "position_embeddings": position_embeddings, **more}
            return self.own(hidden_states, *args, **given)
        attention, store, head_dim = layer.self_attn, cache.store, layer.self_attn.head_dim
        x = hidden_states.view(1, -1)
        by = partial(streamed, eps=layer.input_layernorm.variance_epsilon)
        qkv = by(x, self.qkv, layer.input_layernorm.weight).view(1, -1, head_dim)
        k_cache, v_cache = store.caches[attention.layer_idx]
        cos, sin = (each[0, :, : head_dim // 2] for each in position_embeddings)  # one row; its halves are alike
        q = rope_kv_write(qkv, cos, sin, self.first, k_cache, v_cache, store.slots, dependent=True)[0]
        how: dict[str, Any] = {"scale": attention.scaling, "window": _window(attention), "dependent": True}
        y = paged_attention(q, k_cache, v_cache, store.table, store.lengths, **how)
        x = by(y.view(1, -1), attention.o_proj, None, x)
        by = partial(streamed, eps=layer.post_attention_layernorm.variance_epsilon)
        y = by(x, self.gate_up, layer.post_attention_layernorm.weight, gated=True)
        return by(y, layer.mlp.down_proj, None, x).view(1, 1, -1)


def _window(attention: Any) -> int | None:
    """As the attention's own forward hands it on."""
    if "mistral" in type(attention).__module__:
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)


@contextlib.contextmanager
def rows(model: Any, cache: Any) -> Iterator[None]:
    """The model's layers, and its head, take one row by here; `why_not` has been asked."""
    changed: list[tuple[Any, Any]] = []

    def change(module: Any, forward: Any) -> None:
        changed.append((module, vars(module).get("forward")))
        module.forward = forward

    try:
        for layer in model.get_decoder().layers:
            change(layer, Row(layer, cache))
        head = model.get_output_embeddings()
        if type(head) is torch.nn.Linear and not _is_changed(head):
            change(head, partial(_head, head, head.forward))
        yield
    finally:
        for module, before in changed:
            if isinstance(module.forward, Row):
                for each in module.forward.joined:
                    each.apart()
            if before is None:
                del module.forward
            else:
                module.forward = before


def _head(head: Any, own: Any, x: torch.Tensor) -> torch.Tensor:
    if x.numel() != x.shape[-1] or torch.is_grad_enabled():
        return own(x)  # type: ignore[no-any-return]
    return matmul(x.view(1, -1), head.weight.T, head.bias).view(*x.shape[:-1], -1)
