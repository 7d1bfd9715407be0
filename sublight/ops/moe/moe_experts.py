"""The experts of a mixture: each token goes to a few of them, gated blocks of their own, and what they make is added.

Tokens are sorted by expert (`sorting.py`), both products run over all experts in one launch each, with SwiGLU between
them, and every token adds up what its experts made of it. The first product reads the tokens where they lie: they are
never written in the experts' order. How many rows an expert gets is known on the device alone, and the host waits for
nothing.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.device import facts
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.moe import moe_experts as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Op, Plan, Provider
from sublight.ops.kernels.rows import copies_of, generator_for, why_no_kernel
from sublight.ops.matmul import grouped
from sublight.ops.matmul.grouped_matmul import Rows, engine_step, product_step, weights_step, why_no_engine
from sublight.ops.matmul.matmul import allows_tf32
from sublight.ops.matmul.product import ENGINE_BYTES
from sublight.ops.moe import rows as row_kernels
from sublight.ops.moe import sorting
from sublight.ops.moe.rows import tiles_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

MOST_PAIRS = 2**31 - 1


def reference(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    tf32: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Expert by expert in PyTorch's ops, which wait for the device at each of them."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(index == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None]
        y = y.index_add(0, token, out.to(y.dtype))
    return y


def _combine(name: str, result: str, *, tokens: int, cols: int, top_k: int, is_weighted: bool) -> Step:
    tiles = tiles_of(tokens, cols)
    return Step(
        row_kernels._combine_kernel, (tiles.down * tiles.across,), tokens, tiles.across, cols,
        on=f"{name} place {'weights' if is_weighted else 'place'} {result}",
        tile=tiles, TOP_K=top_k, WEIGHTED=is_weighted, **tiles.options,
    )  # fmt: skip


def plan_experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, tf32: bool,
    *, is_kept: bool = True,
) -> Plan:  # fmt: skip
    """`is_kept`: what the backward pass needs is handed out, too."""
    (tokens, hidden), top_k, experts, inner = x.shape, index.shape[1], down.shape[0], down.shape[2]
    pairs = tokens * top_k
    steps, buffers = sorting.sort_by_expert(pairs, experts)
    alike: dict[str, Any] = {"rows": pairs, "kind": x.dtype, "tf32": tf32, "gpu": facts(x)}
    into = Rows(name="x", strides=x.stride(), index="source", share=top_k)
    dims = experts, hidden, 2 * inner
    is_aligned = gate_up.data_ptr() % ENGINE_BYTES == 0
    buffers |= {
        "inner": Buffer(shape=(pairs, inner), dtype=x.dtype),
        "out": Buffer(shape=(pairs, hidden), dtype=x.dtype),
        "y": Buffer(shape=(tokens, hidden), dtype=x.dtype),
    }
    is_gated = not why_no_engine(into, dims, _turned(gate_up), x.dtype, facts(x), is_aligned=is_aligned)
    if is_kept or not is_gated:
        buffers["hidden"] = Buffer(shape=(pairs, 2 * inner), dtype=x.dtype)
    if is_gated:
        first = [
            engine_step(
                into, "gate_up", "inner", rows=pairs, dims=(experts, hidden, inner), kind=x.dtype, gpu=facts(x),
                is_gated=True, hidden="hidden" if is_kept else "",
            )
        ]  # fmt: skip
    else:
        tiles = tiles_of(pairs, inner)
        first = [
            product_step(into, "gate_up", "hidden", dims=dims, strides=_turned(gate_up), **alike),
            Step(
                row_kernels._gate_kernel, (tiles.down * tiles.across,), pairs, tiles.across, inner,
                on="hidden inner", tile=tiles, **tiles.options,
            ),
        ]  # fmt: skip
    second = product_step(
        Rows(name="inner", strides=(inner, 1)), "down", "out", dims=(experts, inner, hidden),
        strides=_turned(down), is_aligned=down.data_ptr() % ENGINE_BYTES == 0, **alike,
    )  # fmt: skip
    combine = _combine("out", "y", tokens=tokens, cols=hidden, top_k=top_k, is_weighted=True)
    return Plan(
        provider="sublight",
        reason="sorted by prefix sums, one launch a product over all experts, no wait for the device",
        copies=copies_of(index=not index.is_contiguous(), weights=not weights.is_contiguous()),
        buffers=buffers,
        steps=(*steps, *first, second, combine),
        outputs=("y", "hidden", "place", "source", "ends") if is_kept else ("y",),
    )


def plan_backward(
    dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    hidden: torch.Tensor, place: torch.Tensor, source: torch.Tensor, ends: torch.Tensor,
    tf32: bool, wants_x: bool, wants_gate_up: bool, wants_down: bool,
) -> Plan:  # fmt: skip
    """dy through `down`, the gate, then what is wanted of: x through `gate_up`, and each expert's two matrices."""
    (tokens, width), top_k, (experts, _, inner) = x.shape, weights.shape[1], down.shape
    pairs = tokens * top_k
    tiles = tiles_of(pairs, inner)
    alike: dict[str, Any] = {"rows": pairs, "kind": x.dtype, "tf32": tf32, "gpu": facts(x)}
    through_index: dict[str, Any] = {"index": "source", "share": top_k}
    buffers = {
        "dinner": Buffer(shape=(pairs, inner), dtype=x.dtype),
        "dhidden": Buffer(shape=(pairs, 2 * inner), dtype=x.dtype),
        "weighted": Buffer(shape=(pairs, inner), dtype=x.dtype),
        "dweights": Buffer(shape=tuple(weights.shape), dtype=weights.dtype, is_zero=True),  # pairs without a row
        "dx": Buffer(shape=tuple(x.shape) if wants_x else (0,), dtype=x.dtype),
        "dgate_up": Buffer(shape=tuple(gate_up.shape) if wants_gate_up else (0,), dtype=x.dtype),
        "ddown": Buffer(shape=tuple(down.shape) if wants_down else (0,), dtype=x.dtype),
    }
    steps = [
        product_step(
            Rows(name="dy", strides=dy.stride(), **through_index), "down", "dinner", dims=(experts, width, inner),
            strides=down.stride(), is_aligned=down.data_ptr() % ENGINE_BYTES == 0, **alike,
        ),
        Step(
            row_kernels._gate_back_kernel, (tiles.down,), inner, experts,
            on="dinner hidden weights source ends dhidden weighted dweights", tile=tiles, **tiles.options,
        ),
    ]  # fmt: skip
    if wants_x:
        buffers["dout"] = Buffer(shape=(pairs, width), dtype=x.dtype)
        into_x = product_step(
            Rows(name="dhidden", strides=(2 * inner, 1)), "gate_up", "dout", dims=(experts, 2 * inner, width),
            strides=gate_up.stride(), is_aligned=gate_up.data_ptr() % ENGINE_BYTES == 0, **alike,
        )  # fmt: skip
        steps += [into_x, _combine("dout", "dx", tokens=tokens, cols=width, top_k=top_k, is_weighted=False)]
    if wants_gate_up:
        steps.append(
            weights_step(
                Rows(name="dhidden", strides=(2 * inner, 1)), Rows(name="x", strides=x.stride(), **through_index),
                "dgate_up", dims=(experts, 2 * inner, width), **alike,
            )
        )  # fmt: skip
    if wants_down:
        steps.append(
            weights_step(
                Rows(name="dy", strides=dy.stride(), **through_index), Rows(name="weighted", strides=(inner, 1)),
                "ddown", dims=(experts, width, inner), **alike,
            )
        )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one launch a product over all experts",
        copies=copies_of(weights=not weights.is_contiguous()),
        buffers=buffers,
        steps=tuple(steps),
        outputs=("dx", "dweights", "dgate_up", "ddown"),
    )


def _turned(matrices: torch.Tensor) -> tuple[int, ...]:
    """The strides of (experts, n, k) as (experts, k, n)."""
    return matrices.mT.stride()


def why_torch(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, tf32: bool
) -> str:
    if reason := why_no_kernel(x):
        return reason
    if 0 in (x.numel(), index.numel(), gate_up.numel(), down.numel()):
        return "nothing to multiply"
    if {gate_up.dtype, down.dtype} != {x.dtype} or weights.dtype not in (x.dtype, torch.float32):
        return "the arguments differ in data type"
    if any(other.device != x.device for other in (index, weights, gate_up, down)):
        return "the arguments lie on different devices"
    return "more rows than 32 bits count" if index.numel() > MOST_PAIRS else ""


def _fake(x: torch.Tensor, index: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    gate_up, pairs = others[1], index.numel()
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((pairs, gate_up.shape[1])),
        x.new_empty((pairs,), dtype=torch.int32),
        x.new_empty((pairs,), dtype=torch.int32),
        x.new_empty((gate_up.shape[0],), dtype=torch.int32),
    )


def _fake_backward(dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    (gate_up, down), (wants_x, wants_gate_up, wants_down) = others[:2], others[-3:]
    return (
        x.new_empty(x.shape if wants_x else (0,)),
        weights.new_empty(weights.shape),
        x.new_empty(gate_up.shape if wants_gate_up else (0,)),
        x.new_empty(down.shape if wants_down else (0,)),
    )


def backward(*args: Any) -> tuple[Any, ...]:
    """Gradients of x, weights, gate_up and down, None where one is not wanted."""
    *given, (wants_x, wants_weights, wants_gate_up, wants_down) = args
    dx, dweights, dgate_up, ddown = _experts_backward.call(*given, wants_x, wants_gate_up, wants_down)
    return (
        dx if wants_x else None,
        dweights if wants_weights else None,
        dgate_up if wants_gate_up else None,
        ddown if wants_down else None,
    )


def _by_torch(saved: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Through the reference, with a graph behind it."""
    x, weights, gate_up, down = (saved[name] for name in ("x", "weights", "gate_up", "down"))
    wanted = [y for y in (x, weights, gate_up, down) if y.requires_grad]
    with torch.enable_grad():
        y = reference(x, saved["index"], weights, gate_up, down)
        found = iter(torch.autograd.grad(y, wanted, grads, create_graph=True, allow_unused=True))
    return tuple([next(found) if each.requires_grad else None for each in (x, weights, gate_up, down)])


_experts_backward = Registered(
    schema=(
        "moe_experts_backward(Tensor dy, Tensor x, Tensor weights, Tensor gate_up, Tensor down, Tensor hidden, "
        "Tensor place, Tensor source, Tensor ends, bool tf32, bool wants_x, bool wants_gate_up, bool wants_down) "
        "-> (Tensor dx, Tensor dweights, Tensor dgate_up, Tensor ddown)"
    ),
    plan=plan_backward,
    fake=_fake_backward,
)
_experts = Registered(
    schema=(
        "moe_experts(Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor down, bool tf32) "
        "-> (Tensor y, Tensor hidden, Tensor place, Tensor source, Tensor ends)"
    ),
    reference=reference,
    theirs="a block an expert",
    why_torch=why_torch,
    plan=plan_experts,
    plan_results=partial(plan_experts, is_kept=False),
    fake=_fake,
    results=1,
    gradient=Gradient(
        by=SimpleNamespace(call=lambda dy, index, *rest: backward(dy, *rest)),
        saves=("index", "x", "weights", "gate_up", "down", "hidden", "place", "source", "ends"),
        options=("tf32",),
        gives=("x", "weights", "gate_up", "down"),
        by_torch=_by_torch,
        is_masked=True,
    ),
)


def moe_experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The sum over a token's experts of weight * (silu(gate) * up) @ down.T, where gate and up are x @ gate_up.T.

    x is (…, hidden); `index` (…, k) names each token's experts and `weights` (…, k) what each counts for; `gate_up` is
    (experts, 2 * inner, hidden), gate first, and `down` (experts, hidden, inner). An index that is no expert adds
    nothing. It is not looked at on the host, so that nothing waits for it.
    """
    check(x, index, weights, gate_up, down)
    return _experts.call(*arguments(x, index, weights, gate_up, down)).view(x.shape)  # type: ignore[no-any-return]


def check(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    if x.dim() < 1 or gate_up.dim() != 3 or down.dim() != 3 or index.dtype not in (torch.int32, torch.int64):
        raise BadInput(
            "moe_experts takes x (…, hidden), whole index (…, k), weights (…, k), gate_up (experts, 2 * inner, hidden) "
            f"and down (experts, hidden, inner), not {_kinds(x, index, weights, gate_up, down)}"
        )
    (experts, width, inner), hidden = down.shape, x.shape[-1]
    if gate_up.shape != (experts, 2 * inner, hidden) or width != hidden:
        raise BadInput(f"x, gate_up and down do not fit together: {_kinds(x, gate_up, down)}")
    if index.shape != weights.shape or index.shape[:-1] != x.shape[:-1]:
        raise BadInput(f"x, index and weights do not fit together: {_kinds(x, index, weights)}")


def _kinds(*tensors: torch.Tensor) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors)


def arguments(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[Any, ...]:
    """What the registered op takes: tokens in one dimension."""
    flat = x.reshape(-1, x.shape[-1])
    of_tokens = (each.reshape(flat.shape[0], each.shape[-1]) for each in (index, weights))
    return flat, *of_tokens, gate_up, down, allows_tf32(x)


def launch(*inputs: torch.Tensor) -> torch.Tensor:
    given = arguments(*inputs)
    return _experts.runner(plan_experts(*given, is_kept=False))(*given).view(inputs[0].shape)  # type: ignore[no-any-return, union-attr]


def launch_backward(dy: torch.Tensor, *inputs: torch.Tensor) -> Inputs:
    given = arguments(*inputs)
    x, _, weights, gate_up, down, tf32 = given
    _, *kept = _experts.by_kernels(*given)
    flat = dy.reshape(x.shape)
    return _experts_backward.by_kernels(flat, x, weights, gate_up, down, *kept, tf32, True, True, True)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Each token goes to different experts; weights are a softmax in fp32, as routers give them."""
    generator = generator_for(device, seed)
    kind = getattr(torch, dtype)
    tokens, hidden, inner, experts = (shape[key] for key in ("tokens", "hidden", "inner", "experts"))

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator, device=device) * scale).to(kind)

    logits = torch.randn(tokens, experts, generator=generator, device=device)
    values, index = torch.topk(torch.softmax(logits, -1), shape["top_k"])
    weights = values / values.sum(-1, keepdim=True)
    gate_up = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    return normal(tokens, hidden), index, weights, gate_up, normal(experts, hidden, inner, scale=inner**-0.5)


MOE_EXPERTS = Op(
    name="moe_experts",
    summary="tokens through the experts they were sent to, and their weighted sum",
    reference=reference,
    call=moe_experts,
    plan=lambda *inputs: _experts.decide(*arguments(*inputs)),
    providers={
        "sublight": Provider(
            launch=launch,
            backward=launch_backward,
            kernels=(
                *sorting.KERNELS,
                grouped.GROUPED,
                grouped.GROUPED_ENGINE,
                *row_kernels.KERNELS,
                grouped.GROUPED_WEIGHTS,
            ),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=(
        {"tokens": 8192, "hidden": 2048, "inner": 768, "experts": 128, "top_k": 8},
        {"tokens": 4096, "hidden": 4096, "inner": 14336, "experts": 8, "top_k": 2},
        {"tokens": 64, "hidden": 2048, "inner": 768, "experts": 128, "top_k": 8},
    ),
    test_shapes=(
        {"tokens": 3, "hidden": 8, "inner": 1, "experts": 1, "top_k": 1},
        {"tokens": 37, "hidden": 33, "inner": 17, "experts": 5, "top_k": 2},
        {"tokens": 70, "hidden": 64, "inner": 40, "experts": 3, "top_k": 3},
    ),
    wrt=(0, 2, 3, 4),
    batch="tokens",
    library_args=arguments,
)
