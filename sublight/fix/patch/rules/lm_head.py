"""A language model's loss without its logits: hidden states, output embeddings and labels go to one op.

Only the head is tried out: the model's own forward runs with a stand-in for its body, which notes what it is called
with and gives random hidden states, and a small random head. What comes out tells how logits and loss are made, and
which arguments and results are only handed on. Where labels are given and gradients recorded, a swapped model then
gives its loss and `logits=None`; without labels, or under no_grad, all is as before, logits too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.private import has_any_global_hook
from sublight.fix.patch import outside, probe, rewrite
from sublight.fix.patch.body import FEATURES, Body, Named, hidden_states
from sublight.fix.patch.head_proof import IGNORED, ids_of, labels_of, unproven, weight_of
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.swap import is_patched
from sublight.fix.patch.twin import NotCopied, is_autocast, is_hooked, is_pytorchs, own, own_copy
from sublight.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy

RULE = "lm_head"
ITEMS = 7  # for the loss to be divided by
EXTRA = ("output_attentions", "output_hidden_states", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
TRUSTED = ("transformers",)  # whose own models are tried without their code being read
OTHER_LOSSES = ("aux_loss", "z_loss")  # fields by which a result says that more is added to its loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a forward does with hidden states and labels, and what it only hands on."""

    body: str  # the children's names
    output: str
    kind: Callable[..., Any]  # makes the result
    scale: float  # of the logits
    softcap: float
    divides: bool  # it takes the number of items that the loss is divided by
    in_order: tuple[str, ...]  # arguments that the body gets by position
    by_name: frozenset[str]
    results: Mapping[str, str]  # a field of the result: the body's that it is
    loss_functions: tuple[Any, Any]  # the user's, and what the model asks for: its kind's, unless there is one
    numbers: tuple[float, ...]  # settings about logits


class NotKnown(Exception):
    """Why a model is left."""


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    """A model with output embeddings whose forward takes labels."""
    kind: Any = type(module)
    if not hasattr(kind, "get_output_embeddings") or "labels" not in inspect.signature(kind.forward).parameters:
        return None
    try:
        head = understood(module)
        forward = rewrite.signed(loss_only(head), kind.forward)
    except (NotKnown, rewrite.NotUnderstood) as reason:
        return Left(rule=RULE, reason=str(reason))
    what = "loss without logits" + (f", which are scaled by {head.scale:g}" if head.scale != 1.0 else "")
    what += f", capped at {head.softcap:g}" if head.softcap else ""
    arguments = partial(_arguments, head)
    op = "linear_cross_entropy"
    return Swap(rule=RULE, op=op, forward=forward, arguments=arguments, reads_settings=False, trusts=TRUSTED, what=what)


def loss_only(head: Head) -> Callable[..., Any]:
    """forward(self, …) by our op, for a call that is as it was understood."""

    def forward(self: Any, **given: Any) -> Any:
        options = {name: value for name, value in given.items() if value is not None}
        labels, items = options.pop("labels", None), options.pop("num_items_in_batch", None)
        keep, return_dict = options.pop("logits_to_keep", 0), options.pop("return_dict", True)
        output = getattr(self, head.output)
        if (
            labels is None
            or not torch.is_grad_enabled()
            or not (isinstance(keep, int) and keep == 0)
            or not (return_dict is True and getattr(self.config, "return_dict", True))
            or any(name not in head.by_name and name not in head.in_order for name in options)
            or has_other_loss(self, head)
            or has_changed(self, head)
            or not is_plain(output)
            or not _is_summable(head, output.weight, items)
        ):
            return own(self, **given)
        found = getattr(self, head.body)(*[options.pop(name, None) for name in head.in_order], **options)
        loss = _loss(head, found.last_hidden_state, output.weight, labels, items)
        return head.kind(loss=loss, **{name: getattr(found, theirs, None) for name, theirs in head.results.items()})

    return forward


def has_other_loss(module: Any, head: Head) -> bool:
    """Whether somebody has set another loss function; a graph that is compiled is guarded by itself."""
    theirs, public = head.loss_functions
    if module.__dict__.get("_loss_function") is not theirs:
        return True
    return not torch.compiler.is_dynamo_compiling() and getattr(module, "loss_function", None) is not public


def has_changed(module: Any, head: Head) -> bool:
    """Whether a scale or a soft cap is another than when the model was patched."""
    if torch.compiler.is_dynamo_compiling() or tuple(_numbers(module)) == head.numbers:
        return False
    warnings.warn(
        f"a setting of {type(module).__name__}'s logits has changed since sublight.patch, so its own forward runs: "
        "patch the model again",
        stacklevel=4,
    )
    return True


def _is_summable(head: Head, weight: torch.Tensor, items: Any) -> bool:
    """Whether the loss can be divided by `items`: the gradients of a sum may be too large for fp16."""
    return items is None or (head.divides and _dtype(weight) != torch.float16)


def _loss(
    head: Head, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None
) -> torch.Tensor:
    """In float32 or more, as the logits' loss is."""
    dtype = _dtype(weight)
    hidden = (hidden if head.scale == 1.0 else hidden * head.scale).to(dtype)
    following = F.pad(labels.to(hidden.device), (0, 1), value=IGNORED)[..., 1:]  # a token's label is the next one
    loss = linear_cross_entropy(
        hidden,
        weight.to(dtype),
        following,
        ignore_index=IGNORED,
        softcap=head.softcap,
        reduction="mean" if items is None else "sum",
        wide=True,
    )
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


def _dtype(weight: torch.Tensor) -> torch.dtype:
    """In which the logits would be made."""
    return torch.get_autocast_dtype(weight.device.type) if is_autocast(weight) else weight.dtype


def is_plain(output: Any) -> bool:
    return (
        type(output) is torch.nn.Linear
        and output.bias is None
        and type(output.weight) in (torch.nn.Parameter, torch.Tensor)  # whole, not shared out over GPUs
        and not is_hooked(output)
        and ("forward" not in vars(output) or is_patched(output))
        and not has_any_global_hook()
        and is_pytorchs(torch.nn.Linear, F.linear)
    )


def understood(module: Any) -> Head:
    """What this model's forward does; raises NotKnown."""
    read = outside.of_module(module, TRUSTED)
    if read.oddity:
        raise NotKnown(f"not tried: its forward {read.oddity}")
    output = module.get_output_embeddings()
    names = {child: name for name, child in module.named_children()}
    if output not in names:
        raise NotKnown("its output embeddings are no child of its own")
    others = [name for child, name in names.items() if child is not output]
    body = getattr(module, "base_model_prefix", "")
    if body not in others:
        if len(others) != 1:
            raise NotKnown("its body is not known: none of its children has the name that it gives")
        body = others[0]
    if not is_plain(output):
        raise NotKnown("its output embeddings are not a plain product")
    twin, stand_in = _twin(module, names[output], body, output.out_features)
    result, reason = _tried(twin, input_ids=ids_of(output.out_features), labels=labels_of(output.out_features))
    loss, logits = getattr(result, "loss", None), getattr(result, "logits", None)
    if not isinstance(loss, torch.Tensor) or not isinstance(logits, torch.Tensor):
        raise NotKnown(reason or "it gives no loss and logits")
    if any(hasattr(result, name) for name in OTHER_LOSSES):
        raise NotKnown("more than its logits' loss may be in its loss")
    fields = {name: value for name, value in vars(result).items() if value is not None}
    results = {name: value.name for name, value in fields.items() if isinstance(value, Named)}
    if set(fields) - set(results) - {"loss", "logits"}:
        raise NotKnown("its result holds more than its logits, loss and what its body gives")
    scale, softcap = _how(module, logits, loss)
    more, _ = _tried(
        twin, input_ids=ids_of(output.out_features), labels=labels_of(output.out_features), num_items_in_batch=ITEMS
    )
    divides = more is not None and probe.same(more.loss.double(), _total(logits).double() / ITEMS)
    in_order, by_name = _handed_on(module, *_twin(module, names[output], body, FEATURES))
    for training in (False, True) if read.in_code else (True,):
        vars(twin)["training"] = training
        if missing := unproven(twin, names[output], stand_in, {*in_order, *by_name}, scale, softcap):
            raise NotKnown(missing)
    return Head(
        body=body,
        output=names[output],
        kind=type(result),
        scale=scale,
        softcap=softcap,
        divides=divides,
        in_order=in_order,
        by_name=by_name,
        results=results,
        loss_functions=(vars(module).get("_loss_function"), getattr(module, "loss_function", None)),
        numbers=tuple(_numbers(module)),
    )


def _twin(module: Any, output: str, body: str, classes: int) -> tuple[Any, Body]:
    """The model with a stand-in for its body and a small head; nothing of its own is changed."""
    twin, stand_in = object.__new__(type(module)), Body()
    try:
        vars(twin).update({name: own_copy(value) for name, value in vars(module).items()})
    except NotCopied as why:
        raise NotKnown(f"not tried: {why}") from why
    small = torch.nn.Linear(FEATURES, classes, bias=False, device="meta", dtype=torch.float64)
    small._parameters["weight"] = torch.nn.Parameter(weight_of(classes), requires_grad=False)
    vars(twin)["_modules"] = {**module._modules, body: stand_in, output: small}
    vars(twin)["training"] = True
    return twin, stand_in


def _tried(twin: Any, **given: Any) -> tuple[Any, str]:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return type(twin).forward(twin, **given), ""
    except Exception as error:  # whatever a stranger's forward may raise
        return None, f"its forward does more with its body than read its hidden states ({type(error).__name__})"


def _how(module: Any, logits: torch.Tensor, loss: torch.Tensor) -> tuple[float, float]:
    """(scale, soft cap) of the logits, from whatever numbers the model and its config name after them."""
    hidden, weight = hidden_states(), weight_of(logits.shape[-1])
    if hidden.shape[:2] != logits.shape[:2]:
        raise NotKnown("its logits are not one for every hidden state")
    product = hidden @ weight.T
    values = list(_numbers(module))
    for scale, cap in ((s, c) for c in (0.0, *values) for s in (1.0, *values, *(1 / value for value in values))):
        scaled = product * scale
        if probe.same(cap * torch.tanh(scaled / cap) if cap else scaled, logits.double()):
            break
    else:
        raise NotKnown("its logits are more than a product, scaled and capped")
    count = (labels_of(weight.shape[0])[:, 1:] != IGNORED).sum()
    if not probe.same(loss.double(), _total(logits).double() / count):
        raise NotKnown("its loss is not the cross-entropy of each next token")
    return scale, cap


def _total(logits: torch.Tensor) -> torch.Tensor:
    """The loss of every next token, added up."""
    labels = labels_of(logits.shape[-1])[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels, ignore_index=IGNORED, reduction="sum")


def _numbers(module: Any) -> Iterator[float]:
    """Settings about logits, by their names: a scale, a divisor, a soft cap."""
    config = getattr(module, "config", None)
    settings = {**(vars(config) if config is not None else {}), **vars(module)}
    for name, value in settings.items():
        if any(part in name for part in ("logit", "softcap", "lm_head")) and type(value) in (int, float) and value:
            yield float(value)


def _handed_on(module: Any, twin: Any, body: Body) -> tuple[tuple[str, ...], frozenset[str]]:
    """Of the forward's arguments, those that the body gets as they are: by position, and by name."""
    parameters = inspect.signature(type(module).forward).parameters
    plain = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD][1:]
    order: dict[int, str] = {}
    by_name = set()
    for name in dict.fromkeys((*plain, *EXTRA)):
        if name in ("labels", "logits_to_keep", "return_dict"):
            continue
        result, _ = _tried(twin, **{name: Named(name)})
        args, kwargs = body.called if result is not None else ((), {})
        order |= {place: name for place, value in enumerate(args) if value == Named(name)}
        if kwargs.get(name) == Named(name):
            by_name.add(name)
    in_order = tuple(order.get(place, "") for place in range(len(body.called[0])))
    if "" in in_order or "input_ids" not in {*in_order, *by_name}:
        raise NotKnown("its body is called with something of its own making")
    _tried(twin, input_ids=Named("input_ids"))
    settings = getattr(module, "config", None)
    for name, value in body.called[1].items():
        if value not in (None, Named(name)) and value != getattr(settings, name, name == "return_dict"):
            raise NotKnown(f"its body is called with a {name} of its own")
    return in_order, frozenset(by_name)


def _arguments(head: Head, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim() > 1]
    rows = tensors[0].shape[:2] if tensors else (1, 1)  # of token ids, or of what they are embedded to
    weight = getattr(module, head.output).weight
    hidden = weight.new_empty((*rows, weight.shape[1]), dtype=_dtype(weight))
    return hidden, weight.to(hidden.dtype), torch.zeros(rows, dtype=torch.int64, device=weight.device)


LM_HEAD = Rule(name=RULE, find=find)
