"""The forward ops of a step: what each kind of layer calls, with which shapes.

What is counted is a good implementation: attention as one op, residual additions inside the norms, q, k and v in one
product, gate and up in another. A dense model that decodes one token has norms and activations inside the products, as
this project's engine runs it. Of a model that is cut over GPUs, the ops of one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from sublight import cost
from sublight.cost import attention, communication, convolution, moe, movement, norm, pointwise
from sublight.cost.dtypes import find_dtype
from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import dense
from sublight.predict import model as models
from sublight.predict.model import Block, Experts, Latent, Model
from sublight.predict.operation import Kind, Operation, product
from sublight.predict.step import Step, adapter_precision, outer_precision


@dataclass(slots=True, kw_only=True)
class Builder:
    """Collects the forward ops."""

    model: Model
    step: Step
    ops: list[Operation] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)  # products whose weight is not trained, by their place in ops

    @property
    def tokens(self) -> int:
        return self.step.batch * self.step.queries

    @property
    def is_one_row(self) -> bool:
        """One token of a model whose norms and activations fit into the products: no link stands between them."""
        model, step = self.model, self.step
        is_dense = not model.latent and not any(block.experts for block in model.blocks)
        is_plain = model.rms and model.gated and model.norms == 2 and not model.modulation
        is_one = step.mode == "decode" and self.tokens == 1 == step.parallel.tensor
        return is_one and is_dense and is_plain and not step.eager

    def product(
        self,
        name: str,
        m: int,
        n: int,
        k: int,
        count: int,
        *,
        bias: bool = False,
        adapted: bool = True,
        outer: bool = False,
        parts: tuple[int, ...] = (),
        inside: tuple[str, str, int] | None = None,
    ) -> None:
        """y[m, n] = x[m, k] w[n, k]^T; with adapters, two thin products beside it, or beside each of the `parts` that
        n has in the checkpoint. `inside`: name, op and width of what one row gets on its way in; `outer`: it lies
        before or behind the layers."""
        if min(m, n, k) < 1:
            return
        step = replace(self.step, precision=outer_precision(self.step.precision)) if outer else self.step
        if self.is_one_row:
            made = product(step, name, m, n, k, count, bias=bias)
            if inside:
                what, op, cols = inside
                more = cost.find(op)({"rows": 1, "cols": cols}, self.step.precision.activations, "fwd")
                made = replace(made, name=f"{what} + {name}", cost=replace(made.cost + more, launches=1))
            self.ops.append(replace(made, chained=find_dtype(step.precision.weights).bits == 16))
            return
        rank = self.step.lora if self.step.trains else None
        if rank is not None:
            self.frozen.add(len(self.ops))
        self.ops.append(product(step, name, m, n, k, count, bias=bias))
        if rank is not None and adapted:
            thin = replace(self.step, precision=adapter_precision(self.step.precision))
            for width in (n,) if self.model.joined or not parts else parts:
                self.ops.append(product(thin, "adapters", m, rank, k, count))
                self.ops.append(product(thin, "adapters", m, width, rank, count))

    def stream(self, name: str, op: str, shape: Shape, count: int) -> None:
        dtype = self.step.precision.activations
        spent = cost.find(op)(shape, dtype, "fwd")
        self.ops.append(Operation(name=name, op=op, kind="stream", shape=shape, dtype=dtype, count=count, cost=spent))

    def add(
        self, name: str, op: str, kind: Kind, shape: Shape, count: int, spent: Cost, direction: Direction = "fwd"
    ) -> None:
        dtype = self.step.precision.activations
        each = Operation(name=name, op=op, kind=kind, shape=shape, dtype=dtype, count=count, cost=spent)
        stored = self.step.precision.cache if kind == "attention" and self.step.mode == "decode" else ""
        self.ops.append(replace(each, direction=direction, stored=stored))

    def norm(self, name: str, count: int, *, adds: bool = True, cols: int = 0, rows: int = 0) -> None:
        if self.is_one_row:
            return  # inside the products
        op = ("add_" if adds else "") + ("rms_norm" if self.model.rms else "layer_norm")
        self.stream(name, op, {"rows": rows or self.tokens, "cols": cols or self.model.hidden}, count)


def transformer(builder: Builder) -> None:
    model, step = builder.model, builder.step
    _first(builder)
    before = len(builder.ops)
    for block in model.blocks:
        _block(builder, block, -(-block.count // step.parallel.pipeline))
    if step.parallel.pipeline > 1:
        size = dense(step.precision.activations, builder.tokens, model.hidden).bytes
        shape = {"numel": builder.tokens * model.hidden, "ranks": 2, "span": step.parallel.gpus}
        builder.add("stage hand-over", "send", "link", shape, 1, communication.collective("send", size, size, 2))
    after = len(builder.ops)
    _last(builder)
    if step.parallel.pipeline > 1:
        builder.ops = [
            op if before <= place < after else replace(op, at_end=True) for place, op in enumerate(builder.ops)
        ]


def _first(builder: Builder) -> None:
    """Tokens, or patches, become vectors."""
    model, tokens = builder.model, builder.tokens
    dtype = builder.step.precision.activations
    if model.vocab:
        ids, out = dense("int64", tokens), dense(dtype, tokens, model.hidden)
        spent = movement.lookup(dense(dtype, model.vocab, model.hidden), out, ids)
        shape = {"rows": tokens, "cols": model.hidden, "vocab": model.vocab}
        builder.add("embedding", "embedding", "stream", shape, 1, spent)
    if model.patch:
        builder.product("patches", tokens, model.hidden, model.channels * model.patch**2, 1, bias=True, outer=True)
    if model.positions:
        builder.stream("positions", "add", {"numel": tokens * model.hidden}, 1)
    if model.segments:  # BERT norms what it puts in
        builder.norm("norm", 1, adds=False)


def _block(builder: Builder, block: Block, count: int) -> None:
    model, step = builder.model, builder.step
    tensor = step.parallel.tensor
    if model.modulation:
        builder.product("modulation", step.batch, 6 * model.hidden, model.hidden, count, bias=True)
        builder.norm("norm", 2 * count, adds=False)
    else:
        builder.norm("norm", 2 * count)
        if model.norms == 4:
            builder.norm("norm after", 2 * count, adds=False)
    if model.latent:
        _latent(builder, model.latent, count)
    else:
        _attention(builder, block, count)
    _all_reduce(builder, "attention all-reduce", count)
    if block.experts:
        _experts(builder, block.experts, count)
    else:
        _mlp(builder, block.inner // tensor, count, "MLP")
    _all_reduce(builder, "MLP all-reduce", count)
    if model.modulation:
        builder.stream(
            "gated residual", "bias_dropout_residual", {"rows": builder.tokens, "cols": model.hidden}, 2 * count
        )


def _attention(builder: Builder, block: Block, count: int) -> None:
    model, step, tokens = builder.model, builder.step, builder.tokens
    heads = max(model.heads // step.parallel.tensor, 1)
    kv_heads = -(-model.kv_heads // step.parallel.tensor)
    width = (heads + 2 * kv_heads) * model.head_dim
    norm = ("norm", "add_rms_norm", model.hidden)
    parts = (heads * model.head_dim, kv_heads * model.head_dim, kv_heads * model.head_dim)
    builder.product("qkv projection", tokens, width, model.hidden, count, bias=model.qkv_bias, parts=parts, inside=norm)
    head_shape = {"batch": step.batch, "q_len": step.queries, "heads": heads, "kv_heads": kv_heads}
    head_shape["head_dim"] = model.head_dim
    if model.rotary:
        name, op = ("qk norm and rotary", "qk_norm_rope") if model.qk_norm else ("rotary", "rope")
        builder.stream(name, op, head_shape, count)
    window = block.window if block.window and block.window < step.context else 0
    seen = min(step.context, window or step.context)
    shape = {**head_shape, "kv_len": seen if step.mode == "decode" else step.context}
    shape["causal"] = int(model.generates)
    if window and step.mode != "decode":
        shape["window"] = window
    name = "attention (window)" if window else "attention"
    builder.add(name, "attention", "attention", shape, count, _attention_cost(builder, shape))
    builder.product("output projection", tokens, model.hidden, heads * model.head_dim, count, bias=model.out_bias)


def _attention_cost(builder: Builder, shape: Shape) -> Cost:
    """While tokens are generated their keys and values go into the cache: written there by a launch of its own."""
    model, precision, mode = builder.model, builder.step.precision, builder.step.mode
    if not model.generates or mode == "train":
        return attention.attention(shape, precision.activations, "fwd")
    if mode == "decode":
        spent = attention.paged_attention(shape, precision.activations, "fwd", kv_dtype=precision.cache)
    else:
        spent = attention.attention(shape, precision.activations, "fwd")
    rows = dense(precision.activations, builder.tokens, shape["kv_heads"] * shape["head_dim"])
    return spent + movement.store_rows([rows, rows], precision.cache, dense("int64", builder.tokens))


def _latent(builder: Builder, latent: Latent, count: int) -> None:
    """Prompts: keys and values are made whole. Decoding: queries are turned into the latent space instead."""
    model, step, tokens = builder.model, builder.step, builder.tokens
    heads = max(model.heads // step.parallel.tensor, 1)
    per_head = latent.nope_dim + latent.rope_dim
    kept = latent.kv_rank + latent.rope_dim
    if latent.q_rank:
        builder.product("query down projection", tokens, latent.q_rank, model.hidden, count)
        builder.norm("latent norm", count, adds=False, cols=latent.q_rank)
    builder.product("query projection", tokens, heads * per_head, latent.q_rank or model.hidden, count)
    builder.product("latent projection", tokens, kept, model.hidden, count)
    builder.norm("latent norm", count, adds=False, cols=latent.kv_rank)
    turned = {"batch": step.batch, "q_len": step.queries, "heads": heads, "kv_heads": 1, "head_dim": latent.rope_dim}
    builder.stream("rotary", "rope", turned, count)
    dtype, cache = step.precision.activations, step.precision.cache
    pairs = step.batch * heads * attention.attended(step.queries, step.context, causal=True, bottom_right=True)
    stored = movement.store_rows([dense(dtype, tokens, kept)], cache, dense("int64", tokens))
    shape = {"batch": step.batch, "q_len": step.queries, "kv_len": step.context, "heads": heads, "causal": 1}
    if step.mode == "decode":
        _per_head(builder, "queries to latent", heads, latent.kv_rank, latent.nope_dim, count)
        q = dense(dtype, step.batch, heads, 1, kept)
        spent = attention.latent_forward(q, dense(cache, step.batch, step.context, kept), latent.kv_rank, pairs)
        shape |= {"kv_heads": 1, "head_dim": kept}
        builder.add("latent attention", "attention", "attention", shape, count, spent + stored)
        _per_head(builder, "values from latent", heads, latent.value_dim, latent.kv_rank, count)
    else:
        builder.product("keys and values", tokens, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank, count)
        q = k = dense(dtype, step.batch, heads, step.context, per_head)
        v = dense(dtype, step.batch, heads, step.context, latent.value_dim)
        shape |= {"kv_heads": heads, "head_dim": per_head, "value_dim": latent.value_dim}
        spent = attention.forward(q, k, v, pairs)
        builder.add("attention", "attention", "attention", shape, count, spent if step.trains else spent + stored)
    builder.product("output projection", tokens, model.hidden, heads * latent.value_dim, count)


def _per_head(builder: Builder, name: str, heads: int, n: int, k: int, count: int) -> None:
    """A product for each head, with the head's own matrix: as many groups of rows."""
    builder.ops.append(product(builder.step, name, heads * builder.tokens, n, k, count, groups=heads))


def _mlp(builder: Builder, inner: int, count: int, name: str) -> None:
    model, tokens = builder.model, builder.tokens
    ways, bias = 2 if model.gated else 1, model.mlp_bias
    norm, activation = ("norm", "add_rms_norm", model.hidden), ("activation", "swiglu", inner)
    parts = (inner,) * ways
    builder.product(f"{name} up", tokens, ways * inner, model.hidden, count, bias=bias, parts=parts, inside=norm)
    if not builder.is_one_row:
        op = "swiglu" if model.gated else "gelu"
        builder.stream(f"{name} activation", op, {"rows": tokens, "cols": inner}, count)
    builder.product(f"{name} down", tokens, model.hidden, inner, count, bias=bias, inside=activation)


def touched(experts: int, chosen: int, tokens: int) -> int:
    """How many experts are expected to get a token, if each choice is as likely as any other.

    >>> touched(8, 2, 1), touched(256, 8, 16), touched(8, 2, 1000)
    (2, 102, 8)
    """
    return min(experts, math.ceil(experts * (1 - (1 - chosen / experts) ** tokens) - 1e-9))


def _experts(builder: Builder, experts: Experts, count: int) -> None:
    """Tokens are spread evenly: over the GPUs that hold experts, and over those experts."""
    model, step, tokens = builder.model, builder.step, builder.tokens
    spread, tensor = step.parallel.expert, step.parallel.tensor
    builder.product("router", tokens, experts.count, model.hidden, count, bias=experts.bias, adapted=False)
    builder.stream(
        "routing", "moe_routing", {"tokens": tokens, "experts": experts.count, "top_k": experts.chosen}, count
    )
    here = experts.count // spread if spread > 1 else experts.count
    gathered = tokens * _token_groups(step)  # all tokens that reach the GPUs among which the experts are spread
    rows = max(gathered * experts.chosen // spread, 1)
    groups = min(touched(experts.count, experts.chosen, gathered), experts.count) * here // experts.count or 1
    inner = experts.inner if spread > 1 else max(experts.inner // tensor, 1)
    _all_to_all(builder, "tokens to experts", count, tokens * experts.chosen)
    for name, n, k in (("experts up", 2 * inner, model.hidden), ("experts down", model.hidden, inner)):
        if step.trains and step.lora is not None:
            builder.frozen.add(len(builder.ops))
        builder.ops.append(product(step, name, rows, n, k, count, groups=groups, bias=experts.bias))
        if name == "experts up":
            builder.stream("experts activation", "swiglu", {"rows": rows, "cols": inner}, count)
    _all_to_all(builder, "tokens from experts", count, tokens * experts.chosen)
    dtype = step.precision.activations
    x, out = dense(dtype, tokens * experts.chosen, model.hidden), dense(dtype, tokens, model.hidden)
    shape = {"rows": tokens * experts.chosen, "cols": model.hidden}
    builder.add("weighted sum", "moe_routing", "stream", shape, count, moe.combination(x, out))
    if experts.shared_inner:
        _mlp(builder, max(experts.shared_inner // tensor, 1), count, "shared expert")


def _token_groups(step: Step) -> int:
    """GPUs with tokens of their own among those that share the experts."""
    return max(step.parallel.expert // step.parallel.tensor, 1)


def _last(builder: Builder) -> None:
    model, step = builder.model, builder.step
    tensor = step.parallel.tensor
    rows = builder.tokens if step.trains else step.batch
    if model.family == "diffusion":
        builder.product("modulation", step.batch, 2 * model.hidden, model.hidden, 1, bias=True)
        builder.norm("norm", 1, adds=False)
        values = 2 * model.patch**2 * model.channels
        builder.product("noise", builder.tokens, values, model.hidden, 1, bias=True)
        return
    if model.family == "encoder":
        builder.product("pooler", step.batch, model.hidden, model.hidden, int(model.pooler), bias=True)
        return
    builder.norm("norm", 1)
    if model.labels:
        builder.product("classifier", step.batch, model.labels, model.hidden, 1, bias=True, adapted=False, outer=True)
        return
    norm = ("norm", "add_rms_norm", model.hidden)
    builder.product("head", rows, model.vocab // tensor, model.hidden, 1, adapted=False, outer=True, inside=norm)
    shape = {"rows": rows, "vocab": model.vocab // tensor}
    if step.trains:
        logits = {"rows": rows, "cols": model.vocab // tensor}
        spent = cost.find("cross_entropy")(logits, step.precision.activations, "fwd+bwd")
        builder.add("loss", "cross_entropy", "stream", logits, 1, spent, direction="fwd+bwd")
    else:
        builder.stream("sampling", "sample", shape, 1)


def _all_reduce(builder: Builder, name: str, count: int) -> None:
    ranks = builder.step.parallel.tensor
    if ranks > 1:
        _link(builder, name, "all_reduce", builder.tokens * builder.model.hidden, ranks, count)


def _all_to_all(builder: Builder, name: str, count: int, rows: int) -> None:
    ranks = builder.step.parallel.expert
    if ranks > 1:
        _link(
            builder,
            name,
            "all_to_all",
            max(rows * _token_groups(builder.step) // ranks, 1) * builder.model.hidden,
            ranks,
            count,
        )


def _link(builder: Builder, name: str, op: str, numel: int, ranks: int, count: int) -> None:
    dtype = builder.step.precision.activations
    shape = {"numel": numel, "ranks": ranks}
    builder.add(name, op, "link", shape, count, cost.find(op)(shape, dtype, "fwd"))


def convolutional(builder: Builder) -> None:
    """Convolutions as products of as many rows as there are pixels; norm and activation in one pass over the result."""
    model, step = builder.model, builder.step
    dtype = step.precision.activations
    for count, sizes in models.convolutions(model):
        shape = {"batch": step.batch, **sizes}
        after = convolution.output_sizes(
            (sizes["size"],), (sizes["taps"],), (sizes["stride"],), (sizes["padding"],), (1,)
        )
        pixels, channels = step.batch * after[0] ** 2, sizes["out_channels"]
        inner = sizes["in_channels"] * sizes["taps"] ** 2
        spent = convolution.conv2d(shape, step.precision.products, "fwd")
        product = {"m": pixels, "n": channels, "k": inner, **shape}
        name = f"convolution {sizes['taps']}x{sizes['taps']}"
        builder.add(name, "conv2d", "product", product, count, spent)
        x, weight = dense(dtype, pixels, channels), dense(dtype, channels)
        rows = {"rows": pixels, "cols": channels}
        if step.trains:
            builder.add(
                "norm", "batch_norm", "stream", rows, count, norm.forward(x, weight, weight, kind=norm.CENTERED)
            )
        else:
            builder.add("norm", "add", "stream", rows, count, pointwise.elementwise([x, weight, weight], x, each=4))
    width = model.stages[-1].out_channels
    builder.product("classifier", step.batch, model.labels, width, 1, bias=True, outer=True)
