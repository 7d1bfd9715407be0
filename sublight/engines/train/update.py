"""One change of the weights: loss and gradients of a batch's parts, clipping, AdamW. None of it waits for the device.

In mode `ours` on a GPU the model computes with 16-bit copies of its fp32 weights, which AdamW writes beside them, and
the whole change is one CUDA graph: the host then copies a batch and a learning rate, and launches once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sublight.engines.train import products
from sublight.engines.train.data import split_labels
from sublight.engines.train.gpt2 import Gpt2, hold, parameter_groups
from sublight.engines.train.settings import Settings
from sublight.fix.graph.callable import Graph
from sublight.ops.adamw.optimizer import AdamW

BETA1 = 0.9
ALL_MEMORY = 1 << 60  # bytes: a graph of all that a run does may take what it needs
Result = tuple[torch.Tensor, torch.Tensor]  # the mean loss, and the gradients' norm before they were clipped


@dataclass(kw_only=True)
class Change:
    """What a graph holds: everything behind the copy of a batch."""

    model: nn.Module
    forward: Callable[..., torch.Tensor]  # the model, or what torch.compile made of it
    optimizer: torch.optim.Optimizer
    clip: float

    def run(self, batch: torch.Tensor) -> Result:
        """A batch in parts, (parts, sequences, context + 1)."""
        total = torch.zeros((), device=batch.device)
        for part in batch:
            loss = self.forward(*split_labels(part)) / len(batch)
            loss.backward()
            total = total + loss.detach()
            if len(batch) > 1:
                self._widen_gradients()
        norm = torch.zeros((), device=batch.device)
        if self.clip and not isinstance(self.optimizer, AdamW):  # ours clips in its own launch
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if isinstance(self.optimizer, AdamW) and self.optimizer.grad_norm is not None:
            norm = self.optimizer.grad_norm.clone()  # the next step writes over it
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _widen_gradients(self) -> None:
        """Gradients of 16-bit copies to their fp32 weights, where those of several parts are added up."""
        if not isinstance(self.optimizer, AdamW):
            return
        for parameter, copy in self.optimizer.copies.items():
            if copy.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = copy.grad.to(parameter.dtype)
            else:
                parameter.grad.add_(copy.grad)
            copy.grad = None


class Update:
    """What changes a model's weights by one batch after another."""

    def __init__(self, model: Gpt2, settings: Settings, device: torch.device) -> None:
        self.model, self.settings, self.shape = model, settings, model.shape
        self.products: list[dict[str, Any]] = []  # which kernel each is by, and what was measured
        is_ours, on_gpu = settings.mode == "ours", device.type == "cuda"
        self.lr: torch.Tensor | float = settings.lr
        if is_ours and on_gpu:
            self.lr = torch.tensor(settings.lr, device=device)  # a graph reads it where it lies
        self.optimizer = _optimizer(model, settings, self.lr, on_gpu=on_gpu)
        forward = torch.compile(model) if settings.mode == "compile" else model
        change = Change(model=model, forward=forward, optimizer=self.optimizer, clip=settings.clip).run
        self.graph = Graph(change, memory_budget=ALL_MEMORY) if is_ours and on_gpu and settings.graph else None
        self._run: Callable[[torch.Tensor], Result] = self.graph or change

    def prepare(self) -> None:
        """Before the first step, once the weights are loaded: copies of them in the type that is computed in, and the
        fastest product for each size."""
        settings, dtype = self.settings, getattr(torch, self.settings.dtype)
        if not isinstance(self.optimizer, AdamW) or dtype == torch.float32:
            return
        self.optimizer.copies = hold(self.model, dtype)
        device = next(self.model.parameters()).device
        if device.type == "cuda" and not settings.deterministic:
            rows = settings.batch // settings.accumulate * settings.context
            self.products = products.tune(rows, self.shape.dim, self.shape.vocab, dtype, device)

    def __call__(self, batch: torch.Tensor, lr: float) -> Result:
        """Do a step on a batch in parts, (parts, sequences, context + 1)."""
        if isinstance(self.lr, torch.Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        return self._run(batch)

    def why_no_graph(self) -> str:
        """Why steps are not a graph although they should be; else empty."""
        if self.graph is None:
            return ""
        report = self.graph.report()
        return "" if report.graphs else "; ".join(row.reason for row in report.eager)


def _optimizer(
    model: nn.Module, settings: Settings, lr: torch.Tensor | float, *, on_gpu: bool
) -> torch.optim.Optimizer:
    groups, betas = parameter_groups(model, settings.weight_decay), (BETA1, settings.beta2)
    if settings.mode == "ours" and (on_gpu or settings.dtype != "float32"):  # on a CPU ours goes tensor by tensor
        return AdamW(groups, lr=lr, betas=betas, max_norm=settings.clip)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=on_gpu or settings.mode == "ours")
