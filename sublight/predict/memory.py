"""What one GPU holds during a step, by kind, and the largest batch that fits.

Training: what each layer keeps for its backward pass, by the tensors that autograd saves; the loss holds its logits
on top of that, and that moment is the peak. Eager is PyTorch's own ops as Hugging Face writes the layers, fused are
kernels that keep only what they cannot make again cheaply, as `sublight.patch` puts in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sublight.cost.dtypes import find_dtype, size_bytes
from sublight.predict import backward
from sublight.predict import model as models
from sublight.predict.model import Block, Model
from sublight.predict.operation import GROUP
from sublight.predict.step import Step, outer_precision

USABLE = 0.95  # of the GPU's memory: the rest is the driver's, the context's and what the allocator cannot fill
LOSS_CHUNK_BYTES = 1280 * 2**20  # logits that a fused loss holds at once
MOST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU at the peak."""

    weights: int
    cache: int = 0
    activations: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.gradients + self.optimizer

    def kinds(self) -> dict[str, int]:
        """The kinds of memory that take any bytes, the largest first."""
        every = {
            "weights": self.weights,
            "cache": self.cache,
            "activations": self.activations,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }
        return dict(sorted(((k, v) for k, v in every.items() if v), key=lambda pair: -pair[1]))


def memory(model: Model, step: Step) -> Memory:
    """The memory of one GPU; `step.batch` is that GPU's."""
    parallel, precision = step.parallel, step.precision
    weights = _weights(model, step)
    if not step.trains:
        bits = find_dtype(precision.cache).bits
        cache = models.cache_bytes(model, step.batch, step.context, bits, parallel.pipeline)
        if not model.latent and model.kv_heads:  # the latent vector belongs to all heads
            cache = cache * -(-model.kv_heads // parallel.tensor) // model.kv_heads
        return Memory(weights=weights, cache=cache, activations=_working(model, step))
    trained = backward.trained(model, step)
    adapters = size_bytes(trained, precision.gradients) if step.lora is not None else 0
    state = 2 * size_bytes(trained, precision.optimizer)
    state += size_bytes(trained, precision.master) if precision.master else 0
    gradients = size_bytes(trained, precision.gradients)
    kept, loss = _kept(model, step), _loss(model, step)
    # gradients appear as activations go: at the loss there are none yet, at the end all of them and no activations
    working = _working(model, step)
    if parallel.pipeline > 1:  # those of one part of the batch wait while others run
        return Memory(weights=weights + adapters, activations=kept + loss, gradients=gradients, optimizer=state)
    if kept + loss >= gradients + working:
        return Memory(weights=weights + adapters, activations=kept + loss, optimizer=state)
    return Memory(weights=weights + adapters, activations=working, gradients=gradients, optimizer=state)


def _weights(model: Model, step: Step) -> int:
    """Tables and heads are kept in 16 bits where the layers have fewer."""
    numel, outside = backward.held(model, step.parallel), backward.held_outside(model, step.parallel)
    precision = step.precision
    return _weight_bytes(numel - outside, precision.weights) + size_bytes(outside, outer_precision(precision).weights)


def _weight_bytes(numel: int, dtype: str) -> int:
    scales = 2 * -(-numel // GROUP) if find_dtype(dtype).bits < 8 else 0
    return size_bytes(numel, dtype) + scales


def _widest(model: Model) -> int:
    """Numbers that the widest MLP makes of a token, before and after its activation."""
    ways = 3 if model.gated else 2
    inner = [
        block.inner or (block.experts.inner * block.experts.chosen + block.experts.shared_inner if block.experts else 0)
        for block in model.blocks
    ]
    return ways * max(inner, default=0)


def _working(model: Model, step: Step) -> int:
    """What is alive in the widest moment of a pass that keeps nothing: the residual, a layer's input, its MLP."""
    size = find_dtype(step.precision.activations).bits // 8
    if model.family == "convolution":
        largest = max(_image(sizes) for _, sizes in models.convolutions(model))
        return 3 * size * step.batch * largest
    tokens = step.batch * step.queries
    logits = step.batch * model.vocab * (size + 4) if model.generates and not step.trains else 0
    return tokens * size * (2 * model.hidden + _widest(model) // step.parallel.tensor) + logits // step.parallel.tensor


def _image(sizes: dict[str, int]) -> int:
    return sizes["out_channels"] * (-(-sizes["size"] // sizes["stride"])) ** 2


def _kept(model: Model, step: Step) -> int:
    """Activations that wait for the backward pass."""
    size = find_dtype(step.precision.activations).bits // 8
    if model.family == "convolution":  # each convolution's input and its norm's
        made = sum(count * _image(sizes) for count, sizes in models.convolutions(model))
        return 2 * size * step.batch * made
    tokens, stages = step.batch * step.context, step.parallel.pipeline
    if step.checkpointing:  # each layer's input, and one layer whole
        inputs = -(-model.layers // stages) * model.hidden * size
        one = max(_layer_bytes(model, block, step) for block in model.blocks)
        return tokens * (inputs + one + _norm_bytes(model, step))
    layers = sum(-(-block.count // stages) * _layer_bytes(model, block, step) for block in model.blocks)
    return tokens * (layers + _norm_bytes(model, step))


def _norm_bytes(model: Model, step: Step) -> int:
    """A token's, of one norm: its input and its output; Hugging Face's RMSNorm also keeps both in between."""
    size = find_dtype(step.precision.activations).bits // 8
    if step.eager and model.rms:
        return model.hidden * (_between_bytes(model, size) + size)
    return model.hidden * (size + size) + 8


def _between_bytes(model: Model, size: int) -> int:
    """A number's, of Hugging Face's RMSNorm: the input in float32 and the normed one, before its weight."""
    return 4 + (4 if model.float_norms else size)


def _layer_bytes(model: Model, block: Block, step: Step) -> int:
    """A token's, of one layer."""
    size, tensor = find_dtype(step.precision.activations).bits // 8, step.parallel.tensor
    if model.latent:
        latent = model.latent
        per_head = 2 * (latent.nope_dim + latent.rope_dim) + 2 * latent.value_dim
        heads = model.heads * per_head + (latent.q_rank or 0) * 2 + latent.kv_rank * 2
    else:
        heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim  # q, k, v and what attention puts out
    attention = heads * size + 4 * model.heads  # and the logs of its sums
    if model.qk_norm:  # and q and k before their norm; PyTorch's own ops: in float32, and normed
        attention += (
            (model.heads + model.kv_heads) * model.head_dim * (_between_bytes(model, size) if step.eager else size)
        )
    if step.eager and model.joined and model.rotary:  # the values are a view of all three, which are kept with them
        attention += (model.heads + model.kv_heads) * model.head_dim * size
    if step.eager and model.score_bytes:  # whole scores, and keys and values again for each head of queries
        attention += model.heads * model.score_bytes * step.context
        attention += 2 * (model.heads - model.kv_heads) * model.head_dim * size
    norms = max(model.norms, 2) * _norm_bytes(model, step)
    return norms + (attention + _mlp_bytes(model, block, step, size)) // tensor


def _mlp_bytes(model: Model, block: Block, step: Step, size: int) -> int:
    experts = block.experts
    inner = block.inner or (experts.inner * experts.chosen + experts.shared_inner if experts else 0)
    # gated: gate, up, the activated gate and the product; fused: gate and up, of which the rest is made again
    # gpt-oss: both, both clamped, the sigmoid, its product, the product; fused as others
    # plain: input and output; gelu_new as Hugging Face writes it: x, x/2, the tangent, one more than it, the product
    if model.gated:
        kept = (7 if experts and experts.bias else 4) if step.eager else 2
    else:
        kept = 5 if step.eager and model.generates else 2
    # the tokens in their experts' order; PyTorch's own ops: and what the experts made of them, before it is weighted
    routed = experts.chosen * model.hidden * (2 if step.eager else 1) if experts else 0
    return size * (kept * inner + routed)


def _loss(model: Model, step: Step) -> int:
    """Eager: logits in float32, their log-softmax and its gradient; fused: a chunk of logits, the head's gradient."""
    if not model.generates:
        return 0
    size = find_dtype(step.precision.activations).bits // 8
    tokens, vocab = step.batch * step.context, model.vocab // step.parallel.tensor
    if step.eager:
        return 3 * 4 * tokens * vocab
    chunks = max(1, -(-tokens * vocab * size // LOSS_CHUNK_BYTES))
    head = 0 if step.lora is not None else size_bytes(model.hidden * vocab, step.precision.gradients)
    return -(-tokens // chunks) * vocab * size + head + tokens * model.hidden * size


def largest_batch(model: Model, step: Step, memory_bytes: int) -> int:
    """How many sequences a GPU takes; 0 where not even one fits."""
    room = USABLE * memory_bytes

    def fits(batch: int) -> bool:
        return memory(model, replace(step, batch=batch)).total <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
