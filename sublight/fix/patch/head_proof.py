"""The proofs that a language model's loss is the cross entropy of each next token, and that of nothing else.

The model runs with a stand-in for its body. Structure with every argument that it hands on; values and the gradient at
scales far apart; and on tensors without values, at many tokens and in each data type, the same ops with the same
numbers: a loss times `1 + tokens // 4096`, or halved in bf16, shows nowhere else.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import error
from sublight.fix.patch import probe
from sublight.fix.patch.body import BATCH, FEATURES, TOKENS, Body, hidden_states
from sublight.fix.patch.proof import DTYPES, quiet
from sublight.fix.patch.trace import trace
from sublight.fix.patch.twin import random

IGNORED = -100
SPREAD = 3.0  # of the logits, so that a soft cap shows
SCALES = (1e-2, 1.0, 1e2)  # of the hidden states
MANY = (1 << 18) + 7  # tokens, where no values are held
BUDGET = {
    **{"call body": 1, "mm": 1, "bmm": 1, "mul": 1, "div": 2, "tanh": 1, "constant_pad_nd": 1},
    **{"_log_softmax": 1, "nll_loss_forward": 1},
}


def unproven(twin: Any, output: str, body: Body, handed_on: set[str], scale: float, cap: float) -> str:
    """What is missing of the proofs, with the arguments that it may be called with; empty where nothing is.

    A loss that leaves out what an attention mask or a padding token marks, or weighs a class, has ops of its own.
    """
    weight = vars(twin)["_modules"][output].weight
    labels = labels_of(len(weight))
    ids = ids_of(len(weight))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    tensors = {"attention_mask": mask, "position_ids": torch.arange(TOKENS).expand(ids.shape)}
    tensors["token_type_ids"] = torch.ones_like(ids)
    given = {name: value for name, value in tensors.items() if name in handed_on}
    for more, size in itertools.product(({}, given), SCALES):
        body.hidden = hidden = hidden_states(size).requires_grad_()
        with torch.enable_grad(), quiet():
            try:
                found = trace(_named, twin, input_ids=ids, labels=labels, **more, allowed=("device",))
            except Exception as failure:  # whatever a stranger's forward may raise
                return f"structure not proven: its forward fails ({type(failure).__name__})"
            if why := found.why_not(BUDGET, "the loss of each next token"):
                return f"structure not proven: {why}"
            mine = found.result.loss.detach(), *torch.autograd.grad(found.result.loss, hidden)
            wide, single = (
                _loss_step(hidden, weight, labels, scale, cap, kind) for kind in (torch.float64, torch.float32)
            )
        for one, true, other in zip(mine, wide, single, strict=True):
            if not probe.same(one.double(), true) and not error("", one.float(), other.float(), true).ok:
                return "values not proven: its loss or its gradient is not that of each next token"
    missing = _elsewhere(twin, output, body)
    body.hidden = hidden_states()
    return missing


def _elsewhere(twin: Any, output: str, body: Body) -> str:
    """Whether it does the same at other lengths and in other data types, by its ops and their numbers."""
    head = vars(twin)["_modules"][output]
    weight, known = head.weight, None
    for dtype, tokens in ((torch.float64, TOKENS), (torch.float64, MANY), *((dtype, TOKENS) for dtype in DTYPES)):
        where = f"in {str(dtype).removeprefix('torch.')}" if tokens == TOKENS else "at other sizes"
        body.hidden = torch.empty(BATCH, tokens, FEATURES, dtype=dtype, device="meta")
        ids = torch.empty(BATCH, tokens, dtype=torch.int64, device="meta")
        head._parameters["weight"] = torch.nn.Parameter(weight.to("meta", dtype), requires_grad=False)
        try:
            with torch.no_grad(), quiet():
                found = trace(_named, twin, input_ids=ids, labels=ids, allowed=("device",))
        except Exception as failure:  # whatever a stranger's forward may raise
            return f"structure not proven: its forward fails {where} ({type(failure).__name__})"
        finally:
            head._parameters["weight"] = weight
        known = known or (found.ops, found.numbers)
        if (found.ops, found.numbers) != known:
            return f"structure not proven: its forward does otherwise {where}"
    return ""


def _loss_step(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float, cap: float, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The loss of each next token and its gradient, from logits that are rounded to this data type."""
    logits = hidden @ weight.T * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    flat, following = logits[:, :-1].flatten(0, 1).to(dtype), labels[:, 1:].flatten()
    loss = F.cross_entropy(flat, following, ignore_index=IGNORED)
    return loss.detach(), *torch.autograd.grad(loss, hidden)


def _named(twin: Any, **given: Any) -> Any:
    return type(twin).forward(twin, **given)


def weight_of(classes: int) -> torch.Tensor:
    return random(classes, FEATURES, seed=5) * SPREAD


def ids_of(classes: int) -> torch.Tensor:
    return torch.randint(classes, (BATCH, TOKENS), generator=torch.Generator().manual_seed(6))


def labels_of(classes: int) -> torch.Tensor:
    """Of the tokens, but for two that are to be left out."""
    labels = ids_of(classes)
    labels[0, 1] = labels[1, TOKENS - 1] = IGNORED
    return labels
