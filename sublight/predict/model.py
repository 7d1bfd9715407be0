"""A model as a few numbers: what its config says, in words that the census can count with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Family = Literal["decoder", "encoder", "vision", "diffusion", "convolution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture: each token goes to `chosen` of `count` experts, and through the shared ones."""

    count: int
    chosen: int
    inner: int
    shared_inner: int = 0
    bias: bool = False  # on the router and on every expert's products
    score_bias: bool = False  # one number an expert, added when choosing


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values are made of one short vector a token, and only that is kept."""

    q_rank: int | None  # None: queries are made of the hidden state itself
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """So many layers that are alike."""

    count: int
    inner: int = 0  # of the dense MLP; 0 where there are experts
    experts: Experts | None = None
    window: int | None = None  # keys that a query sees, where that is not all


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Bottleneck blocks of a convolutional network at one resolution."""

    count: int
    width: int
    in_channels: int
    out_channels: int
    in_size: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One network. Sizes are of the config; what a config does not say is what its class does."""

    name: str
    source: str
    family: Family
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    blocks: tuple[Block, ...] = ()
    latent: Latent | None = None
    tied: bool = False
    gated: bool = True  # the MLP makes gate and up, else up alone
    rms: bool = True  # RMSNorm, else LayerNorm with a bias
    norms: int = 2  # a layer
    qk_norm: bool = False  # of each head, before the rotation
    rotary: bool = True
    sinks: bool = False  # one number a head beside the scores
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    positions: int = 0  # rows of a learned table
    segments: int = 0  # rows of BERT's second table
    pooler: bool = False
    labels: int = 0  # of a classifier at the end
    patch: int = 0
    channels: int = 3
    tokens: int = 0  # of an image; 0 where the user says how long a sequence is
    float_norms: bool = False  # Hugging Face's code multiplies by the norm's weight in float32
    score_bytes: int = 0  # that its attention keeps of a query and a key, where it calls none that is fused
    joined: bool = False  # q, k and v are one matrix in the checkpoint, as are gate and up
    modulation: bool = False  # DiT: six vectors a layer, made of the time step and the class
    longest: int | None = None  # positions that it was trained for
    stages: tuple[Stage, ...] = ()
    image: int = 0
    is_part: bool = False  # the text part of a larger model
    stored: str = ""  # how its weights are published, where that is not in 16 bits: "fp8", "awq of 4 bits"

    @property
    def layers(self) -> int:
        return sum(block.count for block in self.blocks) or sum(stage.count for stage in self.stages)

    @property
    def generates(self) -> bool:
        return self.family == "decoder"

    @property
    def norm_parameters(self) -> int:
        """The parameters of one norm over the hidden size."""
        return self.hidden * (1 if self.rms else 2)

    @property
    def cache_width(self) -> int:
        """Numbers that one layer keeps of one token."""
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim


def attention_parameters(model: Model) -> int:
    """The parameters of one layer's projections, with their biases and inner norms."""
    hidden, heads, latent = model.hidden, model.heads, model.latent
    if latent:
        per_head = latent.nope_dim + latent.rope_dim
        rank = latent.q_rank
        queries = hidden * rank + rank + rank * heads * per_head if rank else hidden * heads * per_head
        keys = hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        keys += latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        return queries + keys + heads * latent.value_dim * hidden
    wide, narrow = heads * model.head_dim, model.kv_heads * model.head_dim
    count = hidden * (wide + 2 * narrow) + wide * hidden
    count += (wide + 2 * narrow) * model.qkv_bias + hidden * model.out_bias
    return count + 2 * model.head_dim * model.qk_norm + heads * model.sinks


def mlp_parameters(model: Model, inner: int) -> int:
    ways = 2 if model.gated else 1
    return (ways + 1) * model.hidden * inner + (ways * inner + model.hidden) * model.mlp_bias


def expert_parameters(model: Model, experts: Experts) -> int:
    """The parameters of one expert."""
    return 3 * model.hidden * experts.inner + (2 * experts.inner + model.hidden) * experts.bias


def block_parameters(model: Model, block: Block, *, active: bool = False) -> int:
    """The parameters of one layer; `active`: of its experts only those that a token goes through."""
    count = attention_parameters(model) + model.norms * model.norm_parameters
    if model.modulation:
        count += 6 * model.hidden * (model.hidden + 1)  # one linear layer; the norms themselves have no parameters
    if block.experts is None:
        return count + mlp_parameters(model, block.inner)
    experts = block.experts
    count += model.hidden * experts.count + experts.count * (experts.bias + experts.score_bias)
    count += (experts.chosen if active else experts.count) * expert_parameters(model, experts)
    return count + (mlp_parameters(model, experts.shared_inner) if experts.shared_inner else 0)


def end_parameters(model: Model) -> tuple[int, int]:
    """The parameters before the layers and after them; a tied table counts at both ends."""
    hidden = model.hidden
    if model.family == "diffusion":
        return _diffusion_ends(model)
    before, after = hidden * (model.vocab + model.positions + model.segments), 0
    if model.patch:
        before += hidden * (model.channels * model.patch**2 + 1) + hidden  # the patches' projection, the class token
    if model.family == "encoder":
        before += model.norm_parameters  # BERT norms what it puts in
    else:
        after += model.norm_parameters
    after += hidden * model.vocab * model.generates
    return before, after + model.pooler * hidden * (hidden + 1) + model.labels * (hidden + 1)


def outside_parameters(model: Model) -> int:
    """The parameters before and after the layers."""
    return sum(end_parameters(model)) - model.hidden * model.vocab * model.tied


def _diffusion_ends(model: Model) -> tuple[int, int]:
    hidden, values = model.hidden, model.patch**2 * model.channels
    patches = hidden * (values + 1)
    time = 256 * hidden + hidden + hidden * (hidden + 1)  # a sinusoid of 256, then two layers
    classes = (model.labels + 1) * hidden  # one more for "no class"
    last = 2 * hidden * (hidden + 1) + (hidden + 1) * 2 * values  # modulation; noise and its variance
    return patches + time + classes, last


def stage_convolutions(stage: Stage) -> tuple[tuple[int, dict[str, int]], ...]:
    """How often, and the shape without its batch, of each convolution of a bottleneck stage."""
    width, size = stage.width, stage.in_size
    small = -(-size // stage.stride)

    def conv(inputs: int, outputs: int, at: int, taps: int, stride: int = 1) -> dict[str, int]:
        sizes = {"in_channels": inputs, "out_channels": outputs, "size": at, "taps": taps}
        return {**sizes, "stride": stride, "padding": taps // 2}

    is_cut_short = stage.in_channels != stage.out_channels or stage.stride != 1  # else the input itself is added
    first = (
        (1, conv(stage.in_channels, width, size, 1)),
        (1, conv(width, width, size, 3, stage.stride)),
        (int(is_cut_short), conv(stage.in_channels, stage.out_channels, size, 1, stage.stride)),
    )
    rest = stage.count - 1
    others = ((rest, conv(stage.out_channels, width, small, 1)), (rest, conv(width, width, small, 3)))
    return (*first, *others, (stage.count, conv(width, stage.out_channels, small, 1)))


def stem_convolution(model: Model) -> dict[str, int]:
    first = model.stages[0].in_channels
    return {
        "in_channels": model.channels,
        "out_channels": first,
        "size": model.image,
        "taps": 7,
        "stride": 2,
        "padding": 3,
    }


def convolutions(model: Model) -> tuple[tuple[int, dict[str, int]], ...]:
    """Every convolution of a convolutional network: how often, and its shape without the batch."""
    return ((1, stem_convolution(model)), *(pair for stage in model.stages for pair in stage_convolutions(stage)))


def parameters(model: Model, *, active: bool = False) -> int:
    """How many numbers are trained; `active`: that a token goes through.

    A table that is looked up is active, as is the head: most publications count so (OpenAI's leave the table out).
    """
    if model.family == "convolution":
        shapes = convolutions(model)
        weights = sum(n * s["in_channels"] * s["out_channels"] * s["taps"] ** 2 for n, s in shapes)
        norms = sum(2 * n * s["out_channels"] for n, s in shapes)
        return weights + norms + model.labels * (model.stages[-1].out_channels + 1)
    layers = sum(block.count * block_parameters(model, block, active=active) for block in model.blocks)
    return layers + outside_parameters(model)


def cache_bytes(model: Model, batch: int, context: int, dtype_bits: int, stages: int = 1) -> int:
    """The bytes of the KV cache, of a pipeline's fullest stage; a layer with a window keeps no more than the window."""
    kept = sum(-(-block.count // stages) * min(context, block.window or context) for block in model.blocks)
    return math.ceil(batch * kept * model.cache_width * dtype_bits / 8) if model.generates else 0
