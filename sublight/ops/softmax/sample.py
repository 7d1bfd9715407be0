"""Draw one token a row: temperature, the k most likely, the nucleus; the logits are read once.

`softmax_topk`'s kernels find the k largest logits; a second, tiny launch turns them into probabilities, keeps the
shortest run from the top that holds `top_p` of them, and takes from it by a number that depends on the seed and the row
alone (Philox, a counter-based generator). So the same seed gives the same tokens, on any GPU and in PyTorch, and in a
CUDA graph a new seed is written into the tensor that the graph reads.
"""

from __future__ import annotations

import torch

from sublight.backend.device import is_interpreted
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import sample as cost
from sublight.errors import BadInput
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.rows import why_torch
from sublight.ops.record.library import LIBRARY
from sublight.ops.softmax import softmax_topk
from sublight.ops.softmax.softmax import exp_below

TEMPERATURE, TOP_K, TOP_P = 1.0, 64, 1.0
COLDEST = 1e-5  # a temperature below takes the most likely token: its probability is 1 in fp32 long before
ROWS = 16  # that a program draws for
MASK = 0xFFFFFFFF
SCALE = 4.6566127342e-10  # of 31 random bits, to just below 1: Triton's own


def philox(seed: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), fp32, as tl.rand(seed, counter) has them: ten rounds of Philox-4x32 in whole numbers."""
    key = [seed & MASK, (seed >> 32) & MASK]
    zero = torch.zeros_like(counter)
    c = [counter & MASK, counter >> 32, zero, zero]
    for _ in range(10):
        low, high = _product(0xD2511F53, c[0]), _product(0xCD9E8D57, c[2])
        c = [high[1] ^ c[1] ^ key[0], high[0], low[1] ^ c[3] ^ key[1], low[0]]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    drawn = torch.where(c[0] > MASK >> 1, MASK - c[0], c[0])
    return drawn.float() * SCALE


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and high 32 bits of a product that int64 cannot hold."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    middle = (low >> 16) + (high & 0xFFFF)
    return (low & 0xFFFF) | ((middle & 0xFFFF) << 16), ((high >> 16) + (middle >> 16)) & MASK


def reference(
    logits: torch.Tensor, seed: torch.Tensor, temperature: float = TEMPERATURE, top_k: int = TOP_K, top_p: float = TOP_P
) -> torch.Tensor:
    values, index = torch.topk(logits, _candidates(logits, temperature, top_k))
    wide = values if values.dtype == torch.float64 else values.float()
    p = torch.exp((wide - wide[..., :1]) * (1 / max(temperature, COLDEST)))
    up_to = torch.cumsum(p, -1)
    kept = up_to - p < top_p * up_to[..., -1:]
    held = torch.where(kept, p, 0.0).sum(-1, keepdim=True)
    row = torch.arange(values[..., 0].numel(), device=logits.device).view(values.shape[:-1])
    passed = up_to <= philox(seed, row)[..., None] * held
    slot = torch.minimum(passed.sum(-1, keepdim=True), kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return index.gather(-1, slot)[..., 0]


def _candidates(logits: torch.Tensor, temperature: float, top_k: int) -> int:
    return 1 if temperature < COLDEST else min(top_k, logits.shape[-1])


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


def launch(
    logits: torch.Tensor, seed: torch.Tensor, temperature: float = TEMPERATURE, top_k: int = TOP_K, top_p: float = TOP_P
) -> torch.Tensor:
    """Our kernels, whatever `choose` would say."""
    k = _candidates(logits, temperature, top_k)
    values, index = softmax_topk.largest(logits, k, probability=False)
    return index.view(logits.shape[:-1]) if k == 1 else draw(values, index, seed, temperature, top_p)


def draw(
    values: torch.Tensor, index: torch.Tensor, seed: torch.Tensor, temperature: float, top_p: float
) -> torch.Tensor:
    """One of each row's candidates, which come with the largest logit first."""
    k = values.shape[-1]
    rows = values.numel() // k
    tokens = torch.empty(values.shape[:-1], dtype=torch.int64, device=values.device)
    each = 1024 if is_interpreted() else ROWS  # the interpreter takes its time for each program, not for each row
    _draw_kernel[(cdiv(rows, each),)](
        values, index, seed, tokens, rows, k, 1 / max(temperature, COLDEST), float(top_p),
        ROWS=each, K=next_power_of_2(k), num_warps=4,
    )  # fmt: skip
    return tokens


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


def choose(logits: torch.Tensor, seed: int | torch.Tensor = 0, *options: float) -> Choice:
    """What `sample(logits, seed)` runs, and why."""
    if reason := why_torch(logits):
        return Choice(provider="torch", kernel="torch.topk, torch.cumsum", reason=reason)
    return Choice(provider="sublight", kernel="_groups_kernel", reason="one pass over the logits, then a draw of few")


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
    logits = logits.detach()
    if not isinstance(seed, torch.Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=logits.device)
    check(logits, seed, temperature, top_k, top_p)
    run = reference if why_torch(logits) else _sample
    return run(logits, seed, temperature, top_k, top_p)  # type: ignore[no-any-return]


_sample = LIBRARY.op(
    "sample(Tensor logits, Tensor seed, float temperature, int top_k, float top_p) -> Tensor",
    cpu=lambda *args: reference(*args).contiguous(),
    cuda=launch,
    fake=lambda logits, seed, temperature, top_k, top_p: logits.new_empty(logits.shape[:-1], dtype=torch.int64),
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    sizes = {"rows": shape["rows"], "cols": shape["vocab"]}
    logits = softmax_topk.logits_with_distinct_tops(sizes, dtype, device, seed)
    return logits, torch.full((), 1234 + seed, dtype=torch.int64, device=device)


SAMPLE = Op(
    name="sample",
    summary="draw a token a row: temperature, top-k, top-p",
    reference=reference,
    call=sample,
    launch=launch,
    launch_backward=None,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=(Kernel(jit=_draw_kernel), *softmax_topk.SOFTMAX_TOPK.kernels),
    # not rows and cols: a row's token depends on its number, so rows cannot be taken out and drawn again
    shapes=tuple({"rows": rows, "vocab": vocab} for rows in (1024, 128, 16, 1) for vocab in (32000, 128256, 151936)),
    test_shapes=tuple({"rows": rows, "vocab": vocab} for rows, vocab in ((1, 3000), (3, 4097), (2, 16385), (4, 5000))),
    wrt=(),
    directions=("fwd",),
    library_args=lambda logits, seed: (logits, seed, TEMPERATURE, TOP_K, TOP_P),
)
