"""The backward ops of a training step, made of the forward ones, and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sublight import cost
from sublight.cost import attention, matmul, movement, norm, optimizer
from sublight.cost.dtypes import matmul_limit
from sublight.cost.record import Cost, Shape
from sublight.cost.tensor import dense
from sublight.predict import model as models
from sublight.predict.forward import Builder, transformer
from sublight.predict.model import Model
from sublight.predict.operation import Operation, weight_tensors
from sublight.predict.step import Parallel, Step

GRADIENTS = "gradient all-reduce"  # the op of data parallel training


def backward(builder: Builder) -> Iterator[Operation]:
    """The gradients, last op first; with checkpointing each layer's forward ops come again before them."""
    step = builder.step
    for place, op in reversed(list(enumerate(builder.ops))):
        if step.checkpointing and op.name not in ("embedding", "positions", "head", "loss", "patches"):
            yield replace(op, name=f"{op.name} (again)")
        if op.kind == "product":
            if (
                op.name == "qkv projection"
            ):  # attention leaves three gradients, by heads; this product takes one, by tokens
                yield _moved(op, "q, k, v joined", "transpose", {"rows": op.shape["m"], "cols": op.shape["n"]})
            is_first = op.name == "patches" or (op.op == "conv2d" and place == 0)
            yield from _product_backward(op, step, trained=place not in builder.frozen, is_first=is_first)
        elif op.kind == "link":
            yield replace(op, direction="bwd")
        elif op.kind == "attention":
            yield replace(op, direction="bwd", cost=_attention_backward(op))
        elif op.name == "embedding":
            if step.lora is None:
                rows, cols, vocab = (op.shape[size] for size in ("rows", "cols", "vocab"))
                dy, table = dense(op.dtype, rows, cols), dense(op.dtype, vocab, cols)
                yield replace(op, direction="bwd", cost=movement.lookup_backward(dy, table, dense("int64", rows)))
        elif op.name == "weighted sum":
            yield replace(op, direction="bwd")  # the same bytes the other way
        elif op.op == "batch_norm":
            x, weight = dense(op.dtype, op.shape["rows"], op.shape["cols"]), dense(op.dtype, op.shape["cols"])
            spent = norm.backward(x, x, weight, gradients=(weight, weight), kind=norm.CENTERED)
            yield replace(op, direction="bwd", cost=spent)
        elif op.name not in ("loss", "routing", "positions"):  # done in the forward pass, or no gradient of its own
            yield replace(op, direction="bwd", cost=cost.find(op.op)(op.shape, op.dtype, "bwd"))
    if step.parallel.data > 1:
        shape = {"numel": shared(builder.model, step), "ranks": step.parallel.data, "span": step.parallel.gpus}
        spent = cost.find("all_reduce")(shape, step.precision.gradients, "fwd")
        yield Operation(
            name=GRADIENTS,
            op="all_reduce",
            kind="link",
            shape=shape,
            dtype=step.precision.gradients,
            direction="bwd",
            count=1,
            cost=spent,
            once=True,
        )


def _product_backward(op: Operation, step: Step, *, trained: bool, is_first: bool) -> Iterator[Operation]:
    """The products of dy and the weight (x's gradient, which nobody needs of the first one) and of dy and x (the
    weight's), each as large as the forward."""
    m, n, k = (op.shape[size] for size in ("m", "n", "k"))
    groups = op.shape.get("groups", 1)
    dtype = step.precision.products if op.op == "conv2d" else op.dtype
    x, dy = dense(dtype, m, k), dense(dtype, m, n)
    weight, *scales = weight_tensors(op.stored if not trained else dtype, groups * n, k)
    limit = matmul_limit(dtype)
    if op.op == "conv2d":  # its input is smaller than the matrix that it stands for
        x = dense(dtype, op.shape["batch"], op.shape["in_channels"], op.shape["size"], op.shape["size"])
    flops = 2.0 * m * n * k
    if not is_first:
        spent = replace(matmul.product(dy, weight, x, n, *scales, limit=limit), flops={limit: flops})
        yield replace(op, name=op.name, direction="bwd", shape={**op.shape, "n": k, "k": n}, cost=spent)
    if trained:
        out = dense(step.precision.gradients, groups * n, k)
        spent = replace(matmul.product(dy, x, out, m / groups, limit=limit), flops={limit: flops})
        yield replace(
            op, name=f"{op.name} (weight)", direction="bwd", shape={**op.shape, "m": n, "n": k, "k": m}, cost=spent
        )
        if op.op == "linear":
            yield _moved(op, f"{op.name} (bias)", "reduce_sum", {"outer": 1, "n": m, "inner": n})


def _moved(op: Operation, name: str, moves: str, shape: Shape) -> Operation:
    """An op that moves bytes, as often as a product runs whose gradients it serves."""
    spent = cost.find(moves)(shape, op.dtype, "fwd")
    return replace(op, name=name, op=moves, kind="stream", direction="fwd", shape=shape, cost=spent)


def _attention_backward(op: Operation) -> Cost:
    shape, dtype = op.shape, op.dtype
    if "value_dim" not in shape:
        return attention.attention(shape, dtype, "bwd")
    q = k = dense(dtype, shape["batch"], shape["heads"], shape["q_len"], shape["head_dim"])
    v = out = dense(dtype, shape["batch"], shape["heads"], shape["q_len"], shape["value_dim"])
    logs = dense("float32", shape["batch"], shape["heads"], shape["q_len"])
    pairs = attention.attended(shape["q_len"], shape["kv_len"], causal=True, bottom_right=True)
    return attention.backward(q, k, v, out, shape["batch"] * shape["heads"] * pairs, out, logs)


def adapter_parameters(model: Model, rank: int) -> int:
    """The parameters of the adapters: two thin matrices beside every adapted product."""
    step = Step(mode="train", batch=1, context=1, lora=rank)
    builder = Builder(model=model, step=step)
    transformer(builder)
    thin = [op for op in builder.ops if op.name == "adapters"]
    return sum(op.count * op.shape["n"] * op.shape["k"] for op in thin)


def held(model: Model, parallel: Parallel) -> int:
    """Parameters of one GPU, in a pipeline of the fullest stage: its part of every product and of the layers, and its
    experts."""
    if model.family == "convolution":
        return models.parameters(model)
    stages = parallel.pipeline
    layers = sum(-(-block.count // stages) * models.block_parameters(model, block) for block in model.blocks)
    ways = _groups_of_experts(parallel)
    if ways > 1:
        experts = _expert_parameters(model, stages)
        layers += experts // ways - experts
    return -(-layers // parallel.tensor) + held_outside(model, parallel)


def held_outside(model: Model, parallel: Parallel) -> int:
    """Of these, the ones before and after the layers: of a pipeline's stages the first and the last have them."""
    if model.family == "convolution":
        return 0
    outside = max(models.end_parameters(model)) if parallel.pipeline > 1 else models.outside_parameters(model)
    return -(-outside // parallel.tensor)


def _groups_of_experts(parallel: Parallel) -> int:
    """Tensor parallel cuts experts as it cuts everything; beyond that they are spread."""
    return max(parallel.expert // parallel.tensor, 1)


def _expert_parameters(model: Model, stages: int) -> int:
    return sum(
        -(-block.count // stages) * block.experts.count * models.expert_parameters(model, block.experts)
        for block in model.blocks
        if block.experts
    )


def shared(model: Model, step: Step) -> int:
    """Parameters of one GPU whose gradients are summed: spread experts are nobody else's."""
    parallel, ways = step.parallel, _groups_of_experts(step.parallel)
    own = _expert_parameters(model, parallel.pipeline) // ways if ways > 1 and step.lora is None else 0
    return trained(model, step) - own // parallel.tensor


def trained(model: Model, step: Step) -> int:
    """Parameters of one GPU that get a gradient."""
    if step.lora is None:
        return held(model, step.parallel)
    return -(-adapter_parameters(model, step.lora) // (step.parallel.tensor * step.parallel.pipeline))


def optimizer_step(model: Model, step: Step) -> Iterator[Operation]:
    """AdamW over everything that is trained, in one pass."""
    numel, precision = trained(model, step), step.precision
    kept = precision.weights if step.lora is None else precision.gradients
    updated = [dense(kept, numel), *(dense(precision.optimizer, numel) for _ in range(2))]
    if precision.master:
        updated.append(dense(precision.master, numel))
    spent = optimizer.update(updated, [dense(precision.gradients, numel)], each=optimizer.ADAM)
    shape = {"tensors": 1, "numel": numel}
    yield Operation(
        name="optimizer",
        op="adamw",
        kind="stream",
        shape=shape,
        dtype=precision.weights,
        count=1,
        cost=spent,
        once=True,
    )
