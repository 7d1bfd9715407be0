"""Any nn.Module: it runs once on meta tensors, which hold no numbers, and every op that it calls is timed.

What is timed is PyTorch as it is: each op a kernel of its own, attention as one. Costs are those that traces get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sublight.backend import private
from sublight.cost import attention as attention_costs
from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import dense
from sublight.errors import BadInput
from sublight.predict import clocks
from sublight.predict.estimate import OfOps, TimedOperation, in_a_long_run
from sublight.predict.machine import Machine
from sublight.predict.operation import Operation
from sublight.trace.costs import cost_of, no_cost
from sublight.trace.costs.shapes import DTYPES
from sublight.trace.record import Detail

HOST_CALL_S = 11.5e-6  # of Python and PyTorch for one op, views included: Hugging Face's Llama of 16 layers makes 1,424
# calls a token in 17.7 ms on one H200's host and in 15.1 ms on another (benchmarks/end_to_end_h200*.json)
_FREE = ("aten::detach", "aten::empty_like", "aten::empty", "aten::new_empty", "aten::alias", "aten::lift_fresh")
_LESS, _MORE = {"aten::lt", "aten::le"}, {"aten::gt", "aten::ge"}
_WORD_OF = {name: word for word, name in reversed(DTYPES.items())}  # the profiler's word for a data type


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePrediction(OfOps):
    """One pass of a module on one GPU."""

    name: str
    machine: Machine
    ops: tuple[TimedOperation, ...]  # those that are alike together, most time first
    parameter_bytes: int
    unknown: tuple[str, ...]  # ops whose cost is not known: each counts as one pass over what it reads and writes
    calls: int = 0  # that the host makes, views included
    guesses: int = 0  # of what a tensor holds, where the module asks: taken as true
    has_recurrence: bool = False

    @property
    def host_s(self) -> float:
        """What Python and PyTorch need to launch it, op by op."""
        return self.calls * HOST_CALL_S

    @property
    def eager_s(self) -> float:
        """Launched op by op, without a graph: the slower of the GPU and its host."""
        return max(self.expected_s, self.host_s)

    def __str__(self) -> str:
        from sublight import units

        head = f"{self.name} on {self.machine.gpu.name}: {units.text(self.expected_s, 's')} ± {100 * self.error:.0f} %"
        host = f"{units.text(self.host_s, 's')} for {self.calls} calls"
        limit = ", which is the limit unless a graph launches them" if self.host_s > self.expected_s else ""
        lines = [f"{head}, floor {units.text(self.floor_s, 's')}; its host needs about {host}{limit}"]
        for op in self.ops[:8]:
            share = units.percent(op.expected_s / (self.expected_s or 1.0))
            time = units.text(op.expected_s, "s")
            lines.append(f"{op.operation.name:40} x{op.runs:<5} {time:>9} {share:>6}  {op.bound}")
        if self.unknown:
            lines.append(f"cost not known, taken as one pass: {', '.join(self.unknown)}")
        if self.guesses:
            lines.append(f"the module asks {self.guesses} times whether something of its data holds: taken as true")
        if self.has_recurrence:
            lines.append("recurrent layers are counted op by op: cuDNN launches fewer, and takes less")
        return "\n".join(lines)


def predict_module(
    module: torch.nn.Module, *args: Any, machine: Machine, train: bool = False, **named: Any
) -> ModulePrediction:
    """The forward pass, and with `train` the backward pass, of these inputs. The module itself is left as it is."""
    if not isinstance(module, torch.nn.Module):
        raise BadInput(f"predict_module takes a torch.nn.Module, not {type(module).__name__}")
    recorder, whole = _Recorder(), _Pass(module, train)
    meta_args, meta_named = private.pytree.tree_map_only(torch.Tensor, _on_meta, (args, named))
    states = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    state = {name: _on_meta(value) for name, value in states.items()}
    kept = [(each, dict(each.__dict__)) for each in module.modules()]  # a module may keep what it saw, or count calls
    try:
        with torch.set_grad_enabled(train), recorder, _Attention(recorder):
            torch.func.functional_call(whole, state, meta_args, meta_named, tie_weights=True)
    except (NotImplementedError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        name = type(module).__name__
        raise BadInput(f"{name} cannot run on meta tensors: {first}; its config.json can be given instead") from None
    finally:
        for each, attributes in kept:
            each.__dict__.clear()
            each.__dict__.update(attributes)
    counts: dict[tuple[Any, ...], tuple[Operation, int]] = {}
    for op in recorder.ops:
        key = (op.name, op.direction, op.dtype, op.cost.bytes, op.cost.total_flops, *op.shape.items())
        counts[key] = (op, counts.get(key, (op, 0))[1] + 1)
    longer = clocks.slower(machine) if train else 1.0
    timed = [
        TimedOperation(operation=op, timed=in_a_long_run(op, machine, longer), runs=runs)
        for op, runs in counts.values()
    ]
    return ModulePrediction(
        name=type(module).__name__,
        machine=machine,
        ops=tuple(sorted(timed, key=lambda op: -op.expected_s)),
        parameter_bytes=sum(value.numel() * value.element_size() for value in module.parameters()),
        unknown=tuple(dict.fromkeys(recorder.unknown)),
        calls=recorder.calls,
        guesses=recorder.guesses,
        has_recurrence=any(isinstance(each, torch.nn.RNNBase) for each in module.modules()),
    )


class _Pass(torch.nn.Module):
    """The forward pass, and the backward pass if it trains: there, checkpoints run parts of the module again."""

    def __init__(self, module: torch.nn.Module, train: bool) -> None:
        super().__init__()
        self.module, self.trains = module, train

    def forward(self, *args: Any, **named: Any) -> None:
        result = self.module(*args, **named)
        if self.trains:
            _loss(result).backward()


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("meta").requires_grad_(value.requires_grad)


def _loss(result: Any) -> torch.Tensor:
    """The model's own loss where it has one, else the sum of what it returns."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [
        leaf for leaf in private.pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not tensors:
        raise BadInput("nothing that the module returns has a gradient: leave train out")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


class _Recorder(private.TorchDispatchMode):
    """Every op below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Operation] = []
        self.unknown: list[str] = []
        self.calls = 0
        self.guesses = 0
        self.drawn: dict[int, tuple[torch.Tensor, bool]] = {}  # random numbers, and how a comparison with one turns out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            if id(args[0]) in self.drawn:
                return self.drawn[id(args[0])][1]
            if not args[0].is_meta:
                return func(*args)  # made by the module itself: it is there to be read
            self.guesses += 1  # `if mask.all():` asks what no meta tensor holds; the usual batch has no padding
            return True
        result = func(*args, **(kwargs or {}))
        self._record(func, args, kwargs or {}, result)
        self._draw(func._schema.name, args, result)
        return result

    def _draw(self, name: str, args: Sequence[Any], result: Any) -> None:
        """`if torch.rand([]) < self.layerdrop: continue` skips a layer now and then: what is likely is taken."""
        if (name == "aten::rand" and result.numel() == 1) or (name == "aten::detach" and id(args[0]) in self.drawn):
            self.drawn[id(result)] = result, True
        elif name in _LESS | _MORE and id(args[0]) in self.drawn and isinstance(args[1], int | float):
            self.drawn[id(result)] = result, args[1] > 0.5 if name in _LESS else args[1] < 0.5

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = func._schema.name
        rest = func._schema.arguments[len(args) :]
        values = [*args, *(kwargs.get(each.name, each.default_value) for each in rest)]
        detail = _detail(values)
        if name in _FREE or no_cost(name, detail) or func.is_view:
            return
        outputs = [leaf for leaf in private.pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        known = cost_of(name, detail)
        if known is None:
            self.unknown.append(name)
            spent, dtype = _one_pass(values, outputs), "float32"
        else:
            spent, dtype = known.cost, known.dtype
        if not spent.bytes and not spent.flops:
            return
        step = 8 if "convolution" in name else _row_step([*values, *outputs])
        products = _product_sizes(name, values, outputs) or [{}]
        for sizes in products:
            self.ops.append(
                Operation(
                    name=name.removeprefix("aten::"),
                    op=name,
                    kind="product" if sizes else "stream",
                    shape=sizes or {"numel": sum(output.numel() for output in outputs)},
                    dtype=dtype,
                    count=1,
                    cost=_part(spent, len(products)),
                    row_step=step if sizes else 8,
                )
            )


def _part(cost: Cost, parts: int) -> Cost:
    """Of an op that is so many products: each has as many FLOPs as the others, and about as many bytes."""
    flops = {limit: count / parts for limit, count in cost.flops.items()}
    return replace(cost, read_bytes=cost.read_bytes // parts, write_bytes=cost.write_bytes // parts, flops=flops)


def _row_step(values: Sequence[Any]) -> int:
    """What divides the distance of one row of each matrix from the next, up to 8 elements: 16 bytes in 16 bits."""
    strides = [
        max(value.stride()[-2:])
        for value in values
        if isinstance(value, torch.Tensor) and value.dim() > 1 and min(value.shape[-2:]) > 1
    ]
    return math.gcd(8, *strides)


def _detail(values: Sequence[Any]) -> Detail:
    """The arguments as the profiler would have recorded them."""
    dims: list[Any] = []
    strides: list[Any] = []
    types: list[str] = []
    concrete: list[str] = []
    for value in values:
        tensors = value if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor) else None
        if isinstance(value, torch.Tensor):
            dims.append(tuple(value.shape))
            strides.append(tuple(value.stride()))
            types.append(_WORD_OF.get(str(value.dtype).removeprefix("torch."), ""))
        elif tensors is not None:
            dims.append(tuple(tuple(each.shape) for each in tensors))
            strides.append(tuple(tuple(each.stride()) for each in tensors))
            types.append("TensorList")
        else:
            dims.append(())
            strides.append(())
            types.append("ScalarList" if isinstance(value, list | tuple) else "Scalar" if value is not None else "")
        concrete.append("" if isinstance(value, torch.Tensor) or tensors is not None or value is None else str(value))
    return Detail(dims=tuple(dims), strides=tuple(strides), types=tuple(types), concrete=tuple(concrete))


def _one_pass(values: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost:
    inputs = [leaf for leaf in private.pytree.tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]
    return Cost(read_bytes=sum(map(_bytes, inputs)), write_bytes=sum(map(_bytes, outputs)))


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _product_sizes(name: str, values: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[Shape]:
    """m, n and k of each product that the op is; none where it is none."""
    factors = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
    if name in factors:
        left, right = values[factors[name]], values[factors[name] + 1]
        batch = left.shape[0] if left.dim() == 3 else 1
        sizes = {"m": batch * left.shape[-2], "n": right.shape[-1], "k": left.shape[-1]}
        return [sizes | ({"groups": batch} if batch > 1 else {})] if min(sizes.values()) else []
    if name == "aten::convolution" and outputs and outputs[0].numel():
        return [_convolution_sizes(values[0], values[1], outputs[0], is_transposed=values[6])]
    if name == "aten::convolution_backward" and values[0].numel():
        sizes = _convolution_sizes(values[1], values[2], values[0], is_transposed=values[7])
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        wanted = zip(values[10], ({"m": m, "n": k, "k": n}, {"m": n, "n": k, "k": m}), strict=False)
        return [each for is_wanted, each in wanted if is_wanted]
    return []


def _convolution_sizes(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, is_transposed: bool
) -> dict[str, int]:
    """A row for each pixel: of the result, or of the input where that is spread out over a larger result."""
    taps = math.prod(weight.shape[1:])
    if is_transposed:
        return {"m": x.numel() // x.shape[1], "n": taps, "k": x.shape[1]}
    return {"m": y.numel() // y.shape[1], "n": y.shape[1], "k": taps}


class _Attention(TorchFunctionMode):
    """Attention as one op, which PyTorch would take apart on meta tensors; autocast, which it would leave out, is
    refused."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            raise BadInput("autocast does not reach meta tensors: give the module in 16 bits, as in module.bfloat16()")
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        q, k, v = given["query"], given["key"], given["value"]
        return _Whole.apply(q, k, v, bool(given.get("is_causal")), self.recorder)


class _Whole(torch.autograd.Function):
    """Records the op and its gradient, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, recorder: _Recorder) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.causal, ctx.recorder = causal, recorder
        recorder.ops.append(_attention(q, k, v, causal, "fwd"))
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v = ctx.saved_tensors
        ctx.recorder.ops.append(_attention(q, k, v, ctx.causal, "bwd"))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, direction: Direction) -> Operation:
    dtype = str(q.dtype).removeprefix("torch.")
    batch, (queries, head_dim), keys = math.prod(q.shape[:-3]), q.shape[-2:], k.shape[-2]
    heads, kv_heads = (each.shape[-3] if each.dim() > 2 else 1 for each in (q, k))
    shape = {"batch": batch, "q_len": queries, "kv_len": keys, "heads": heads, "kv_heads": kv_heads}
    shape |= {"head_dim": head_dim, "causal": int(causal)}
    pairs = batch * heads * attention_costs.attended(queries, keys, causal=causal, bottom_right=False)
    query, key, value = (dense(dtype, *each.shape) for each in (q, k, v))
    out = dense(dtype, *q.shape[:-1], v.shape[-1])
    logs = dense("float32", *q.shape[:-1])
    if direction == "fwd":
        spent = attention_costs.forward(query, key, value, pairs)
    else:
        spent = attention_costs.backward(query, key, value, out, pairs, out, logs)
    return Operation(
        name="attention",
        op="attention",
        kind="attention",
        shape=shape,
        dtype=dtype,
        direction=direction,
        count=1,
        cost=spent,
    )
