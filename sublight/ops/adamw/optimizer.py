"""AdamW as a torch.optim.Optimizer: one launch a parameter group and data type, its state what torch.optim.AdamW's is.

Steps count on the device and the gradients' norm stays there, so a CUDA graph may hold the whole step.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sublight.backend.private import foreach_copy_
from sublight.backend.state import is_capturing
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.ops.adamw.adamw import reference_update, why_torch
from sublight.ops.adamw.tables import Batch, batches_of, check, put_back, together
from sublight.ops.adamw.update import CLIP_EPS, Settings, update

SEED_STEP = 7919  # between the noise of one launch and the next
Work = list[tuple[dict[str, Any], list[Inputs]]]  # a parameter group; parameter, gradient, averages, step of each
Key = tuple[tuple[Any, ...], ...]


class Table(NamedTuple):
    """The addresses of a parameter group's tensors, and what they depend on."""

    key: Key
    batches: list[Batch] | None


NO_TABLE = Table((), None)


class AdamW(torch.optim.Optimizer):
    """A drop-in for torch.optim.AdamW.

    `max_norm` clips all gradients by their common norm (0: never), which `grad_norm` tells, on the device, of the last
    step. `state_dtype` is the averages' (None: the parameter's); `stochastic_rounding` rounds bf16 parameters up or
    down by chance, right on average, so that updates too small for their digits are not lost. `copies` has for a
    parameter a copy of it in another data type, which a model computes with: the gradient is the copy's where the
    parameter has none, and a step writes both.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_norm: float = 0.0,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        Settings(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay, max_norm=max_norm)
        self.max_norm, self.state_dtype = max_norm, state_dtype
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self.copies = dict(copies or {})
        self.grad_norm: torch.Tensor | None = None
        self._tables: dict[int, Table] = {}  # by the number of the parameter group
        like_torch = {"amsgrad": False, "foreach": None, "capturable": True, "differentiable": False, "fused": None}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**defaults, **like_torch})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, self._fives(group)) for group in self.param_groups]
        tables = self._known(work)
        new = [fives for (_, fives), table in zip(work, tables, strict=True) if table.batches is None]
        if any(why_torch(five) for fives in new for five in fives):
            self._by_torch(work)
        else:
            self._by_ours(work, tables)
        self._write_copies([five[0] for _, fives in work for five in fives])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and of their copies."""
        super().zero_grad(set_to_none)
        for copy in self.copies.values():
            if set_to_none:
                copy.grad = None
            elif copy.grad is not None:
                copy.grad.zero_()

    def _write_copies(self, changed: Sequence[torch.Tensor]) -> None:
        pairs = [(self.copies[p], p) for p in changed if p in self.copies]
        if pairs:
            foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Ours or torch.optim.AdamW's; averages keep to `state_dtype`, where PyTorch would cut them."""
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise BadInput("this state was made with amsgrad=True, which this AdamW has not: use torch.optim.AdamW")
        super().load_state_dict(dict(state_dict))
        names = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for name, p in zip(names, params, strict=True):
            if saved := state_dict["state"].get(name):
                state = self._new_state(p)
                for key, value in state.items():
                    value.copy_(torch.as_tensor(saved[key]))
                self.state[p].update(state)

    def _settings(self, group: dict[str, Any], seed: int) -> Settings:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        return Settings(
            lr=float(lr) if isinstance(lr, torch.Tensor) and not lr.is_cuda else lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            max_norm=self.max_norm,
            stochastic=self.stochastic_rounding,
            seed=seed,
        )

    def _fives(self, group: dict[str, Any]) -> list[Inputs]:
        """Parameter, gradient, averages and step of what has a gradient."""
        found: list[Inputs] = []
        for p in group["params"]:
            copy = self.copies.get(p)
            grad = copy.grad if p.grad is None and copy is not None else p.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise BadInput("a gradient is sparse: AdamW takes dense ones (embedding with sparse=False)")
            state = self.state[p]
            if not state:
                state.update(self._new_state(p))
            found.append((p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"]))
        return found

    def _new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        zeros = [torch.zeros_like(p, dtype=self.state_dtype or p.dtype) for _ in range(2)]
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        return {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def _by_ours(self, work: Work, tables: Sequence[Table] | None = None) -> None:
        launches: dict[torch.device, list[tuple[Batch, Settings]]] = {}
        copies = []
        for number, ((group, fives), (key, batches)) in enumerate(
            zip(work, self._known(work) if tables is None else tables, strict=True)
        ):
            if batches is None:
                fours = [five[:4] for five in fives]
                check(fours)
                own = together(fours)
                copies.append((fours, own))
                batches = batches_of([(*four, five[4]) for four, five in zip(own, fives, strict=True)])
                if key and all(map(operator.is_, own, fours)):  # copies lie elsewhere every time
                    self._tables[number] = Table(key, batches)
            for batch in batches:
                mine = launches.setdefault(batch.sizes.device, [])
                mine.append((batch, self._settings(group, seed=self.seed + SEED_STEP * len(mine))))
        if self.max_norm and len(launches) > 1:
            raise BadInput("max_norm needs all parameters on one GPU: clip with torch.nn.utils.clip_grad_norm_ instead")
        for device, mine in launches.items():
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                self.grad_norm = update(mine, increments=True)
        for fours, own in copies:
            put_back(fours, own)

    def _known(self, work: Work) -> list[Table]:
        """Of each group the tables of the step before, if nothing has moved since.

        A graph that is being captured may outlive this optimizer, and gets tables of its own.
        """
        if any(fives and fives[0][0].is_cuda for _, fives in work) and is_capturing():
            return [NO_TABLE] * len(work)
        keys = [key_of(fives) for _, fives in work]
        known = [self._tables.get(number, NO_TABLE) for number in range(len(work))]
        return [old if old.key == key else Table(key, None) for old, key in zip(known, keys, strict=True)]

    def _by_torch(self, work: Work) -> None:
        clip = 1.0
        if self.max_norm:
            norms = [torch.linalg.vector_norm(five[1].double()).cpu() for _, fives in work for five in fives]
            self.grad_norm = torch.stack(norms).norm().float()
            clip = min(1.0, self.max_norm / (float(self.grad_norm) + CLIP_EPS))
        for group, fives in work:
            settings = replace(self._settings(group, self.seed), max_norm=0.0)
            for p, g, m, v, step in fives:
                step += 1
                reference_update([p], [g if clip == 1.0 else g * clip], [m], [v], step, settings)


def key_of(fives: Sequence[Inputs]) -> Key:
    """What the tables of these tensors depend on: where they lie, and how. A gradient's layout and data type may change
    from one step to the next, and its address stay the same."""
    return tuple(
        [
            (
                p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), step.data_ptr(), p.shape,
                p.stride(), g.stride(), m.stride(), v.stride(), p.dtype, g.dtype, m.dtype, g.is_neg(),
            )
            for p, g, m, v, step in fives
        ]
    )  # fmt: skip
