"""Draw one token a row: temperature, the k most likely, the nucleus; the logits are read once.

`softmax_topk`'s kernels find the k largest logits; a second, tiny launch turns them into probabilities, keeps the
shortest run from the top that holds `top_p` of them, and takes from it by a number that depends on the seed and the row
alone (Philox, a counter-based generator). So the same seed gives the same tokens, on any GPU and in PyTorch, and in a
CUDA graph a new seed is written into the tensor that the graph reads.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.backend.device import is_interpreted
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import sample as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.philox import words
from sublight.ops.kernels.rows import copies_of, rows_of, why_torch
from sublight.ops.record.library import Registered
from sublight.ops.softmax import softmax_topk
from sublight.ops.softmax.softmax import exp_below

TEMPERATURE, TOP_K, TOP_P = 1.0, 64, 1.0
COLDEST = 1e-5  # a temperature below takes the most likely token: its probability is 1 in fp32 long before
ROWS = 16  # that a program draws for
ROUNDS = 10  # of Philox, as tl.rand makes them
MASK = 0xFFFFFFFF
SCALE = 4.6566127342e-10  # of 31 random bits, to just below 1: Triton's own


def reference(
    logits: torch.Tensor, seed: torch.Tensor, temperature: float = TEMPERATURE, top_k: int = TOP_K, top_p: float = TOP_P
) -> torch.Tensor:
    return _by_torch(logits, seed, *_terms(logits, temperature, top_k), top_p)


def _terms(logits: torch.Tensor, temperature: float, top_k: int) -> tuple[int, float]:
    """How many candidates there are, and what logits are multiplied by."""
    k = 1 if temperature < COLDEST else min(top_k, logits.shape[-1])
    return k, 1 / max(temperature, COLDEST)


def _by_torch(logits: torch.Tensor, seed: torch.Tensor, k: int, sharpness: float, top_p: float) -> torch.Tensor:
    values, index = torch.topk(logits, k)
    wide = values if values.dtype == torch.float64 else values.float()
    p = torch.exp((wide - wide[..., :1]) * sharpness)
    up_to = torch.cumsum(p, -1)
    kept = up_to - p < top_p * up_to[..., -1:]
    held = torch.where(kept, p, 0.0).sum(-1, keepdim=True)
    level = uniform(seed, values[..., 0].numel()).view(values.shape[:-1])
    passed = up_to <= level[..., None] * held
    slot = torch.minimum(passed.sum(-1, keepdim=True), kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return index.gather(-1, slot)[..., 0]


def uniform(seed: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers in [0, 1), fp32, one a row, as tl.rand(seed, row) has them: of four words at a counter the first."""
    word = words(seed, 4 * count, ROUNDS)[::4]
    return torch.where(word > MASK >> 1, MASK - word, word).float() * SCALE


@triton.jit
def _draw_kernel(
    value_ptr, index_ptr, seed_ptr, token_ptr, rows, k, sharpness, top_p, ROWS: tl.constexpr, K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, K)[None, :]
    inside = (row < rows)[:, None] & (slot < k)
    value = tl.load(value_ptr + row[:, None] * k + slot, mask=inside, other=-float("inf")).to(tl.float32)
    highest = tl.load(value_ptr + row * k, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    p = exp_below((value - highest) * sharpness, 0.0)
    up_to = tl.cumsum(p, 1)
    kept = up_to - p < top_p * tl.sum(p, 1)[:, None]
    level = tl.rand(tl.load(seed_ptr), row) * tl.sum(tl.where(kept, p, 0.0), 1)
    passed = tl.sum((up_to <= level[:, None]).to(tl.int32), 1)
    last = tl.sum((kept & (p > 0.0)).to(tl.int32), 1) - 1  # -1 in a row of NaN
    chosen = tl.maximum(tl.minimum(passed, last), 0)
    token = tl.load(index_ptr + row * k + chosen, mask=row < rows, other=0)
    tl.store(token_ptr + row, token, mask=row < rows)


def draw_step(rows: int, k: int) -> Step:
    """One of each row's k candidates, which come with the largest logit first."""
    each = 1024 if is_interpreted() else ROWS  # the interpreter takes its time for each program, not for each row
    return Step(
        _draw_kernel, (cdiv(rows, each),), rows, k, "sharpness", "top_p",
        on="values index seed token", ROWS=each, K=next_power_of_2(k), num_warps=4,
    )  # fmt: skip


def plan_sample(logits: torch.Tensor, seed: torch.Tensor, k: int, sharpness: float, top_p: float) -> Plan:
    """The k largest logits of each row, then the draw; of one candidate its place is the answer."""
    index = "token" if k == 1 else "index"
    steps, buffers = softmax_topk.find_largest(logits, "logits", k, probability=False, values="values", index=index)
    token = Buffer(shape=tuple(logits.shape[:-1]), dtype=torch.int64)
    return Plan(
        provider="sublight",
        reason="one pass over the logits, then a draw of few",
        copies=copies_of(logits=rows_of(logits).is_copy),
        buffers=buffers | {"token": token},
        steps=steps if k == 1 else (*steps, draw_step(rows_of(logits).rows, k)),
        outputs=("token",),
    )


_sample = Registered(
    schema="sample(Tensor logits, Tensor seed, int k, float sharpness, float top_p) -> Tensor token",
    reference=_by_torch,
    theirs="torch.topk, torch.cumsum",
    why_torch=lambda logits, *rest: why_torch(logits),
    plan=plan_sample,
    fake=lambda logits, *rest: logits.new_empty(logits.shape[:-1], dtype=torch.int64),
    free=("sharpness", "top_p"),
)


def arguments(
    logits: torch.Tensor,
    seed: int | torch.Tensor,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
) -> tuple[torch.Tensor, torch.Tensor, int, float, float]:
    """What `sample` is given, as torch.ops.sublight.sample takes it."""
    if not isinstance(seed, torch.Tensor):
        if not isinstance(seed, int | torch.SymInt):
            raise BadInput(f"seed is {type(seed).__name__}: give a whole number, or one int64 beside the logits")
        seed = torch.full((), seed, dtype=torch.int64, device=logits.device)
    check(logits, seed, temperature, top_k, top_p)
    return logits.detach(), seed, *_terms(logits, temperature, top_k), float(top_p)


def check(logits: torch.Tensor, seed: torch.Tensor, temperature: float, top_k: int, top_p: float) -> None:
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise BadInput(f"logits have the shape {tuple(logits.shape)}: give (…, vocabulary)")
    if not 0 <= temperature < float("inf"):
        raise BadInput(f"temperature is {temperature}: give 0 for the most likely token, or a positive number")
    if not 1 <= top_k <= softmax_topk.MAX_K:
        raise BadInput(f"top_k is {top_k}: give 1 to {softmax_topk.MAX_K}")
    if not 0 < top_p <= 1:
        raise BadInput(f"top_p is {top_p}: give more than 0 and at most 1")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != logits.device:
        raise BadInput(f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: give one int64 beside the logits")


def sample(
    logits: torch.Tensor,
    seed: int | torch.Tensor,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
) -> torch.Tensor:
    """A token (int64) for each row of logits (…, vocabulary), drawn from the softmax of logits / temperature.

    First the `top_k` most likely are kept (at most 64, so that much of a flat distribution's tail is never drawn), then
    of these the fewest that together have `top_p` of their probability. The same seed gives the same tokens; a seed
    that lives on the GPU, one int64, may be changed between replays of a CUDA graph. Temperature 0: the most likely.
    """
    return _sample.call(*arguments(logits, seed, temperature, top_k, top_p))  # type: ignore[no-any-return]


def plan(logits: torch.Tensor, seed: int | torch.Tensor, *options: Any) -> Plan:
    """What `sample(logits, seed, …)` runs, and why."""
    return _sample.decide(*arguments(logits, seed, *options))


def launch(logits: torch.Tensor, seed: int | torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """Our kernels, whether or not they win."""
    return _sample.by_kernels(*arguments(logits, seed, *options, **named))  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    sizes = {"rows": shape["rows"], "cols": shape["vocab"]}
    logits = softmax_topk.logits_with_distinct_tops(sizes, dtype, device, seed)
    return logits, torch.full((), 1234 + seed, dtype=torch.int64, device=device)


SAMPLE = Op(
    name="sample",
    summary="draw a token a row: temperature, top-k, top-p",
    reference=reference,
    call=sample,
    plan=plan,
    providers={"sublight": Provider(launch=launch, kernels=(Kernel(jit=_draw_kernel), *softmax_topk.KERNELS))},
    inputs=inputs,
    cost=cost,
    shapes=tuple({"rows": rows, "vocab": vocab} for rows in (1024, 128, 16, 1) for vocab in (32000, 128256, 151936)),
    test_shapes=tuple({"rows": rows, "vocab": vocab} for rows, vocab in ((1, 3000), (3, 4097), (2, 16385), (4, 5000))),
    wrt=(),
    directions=("fwd",),
    batch="",  # a row's token depends on its number: rows cannot be taken out and drawn again
    library_args=arguments,
)
