"""One case measured: inputs made once, each provider checked against float64, its kernels timed alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sublight import correct, timing
from sublight.backend import private
from sublight.bench.case import DISPATCHED, UNDISPATCHED, Case
from sublight.correct import FAR_OFF, Inputs
from sublight.limits.run import Machine
from sublight.op import Op
from sublight.results import Limits, Result
from sublight.timing import Thunk

CHECK_ELEMENTS = 2**25  # a float64 reference of more than this is taken over the first rows
MAX_INPUT_SETS = 512


class CaseBench:
    """One case: its inputs, made once, and its providers, measured one after the other."""

    def __init__(self, case: Case, machine: Machine, limits: Limits, quick: bool) -> None:
        self.case, self.device, self.limits = case, machine.kind, limits
        self.time_limit_s = 0.05 if quick else 0.15
        self.cache_bytes = machine.cache_bytes
        self.calls: dict[str, Thunk] = {}  # provider -> its timed call, for `with_calls`

    @functools.cached_property
    def sets(self) -> list[Inputs]:
        """Distinct sets of inputs to time over, together larger than the cache if so many fit in one graph."""
        case = self.case
        wanted = min(timing.sets_for(case.cost.bytes, self.cache_bytes), MAX_INPUT_SETS)
        return [case.op.inputs(case.shape, case.dtype, self.device, seed) for seed in range(wanted)]

    @property
    def cold(self) -> bool:
        return self.case.cost.bytes * len(self.sets) >= self.cache_bytes

    def with_calls(self, rows: Sequence[Result]) -> list[Result]:
        """The rows with `call_s`, the host time of a call, added; the providers take turns."""
        import torch

        try:
            with torch.set_grad_enabled(self.case.direction != "fwd"):
                seconds = timing.calls_in_turns([*self.calls.values()], device=self.device, time_limit_s=0.02)
        except Exception as error:  # all providers' inputs at once may need too much memory
            return [replace(row, note=f"no host time: {type(error).__name__}") for row in rows]
        known = dict(zip(self.calls, seconds, strict=True))
        return [replace(row, call_s=known.get(row.provider)) for row in rows]

    def release(self) -> None:
        self.__dict__.pop("sets", None)
        self.calls.clear()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def measure(self, provider: str) -> Result:
        """One provider's row; where it cannot be measured, the row says why."""
        case = self.case
        cost = case.cost
        floor = self.limits.floor(cost)
        row = Result(
            op=case.op.name,
            direction=case.direction,
            shape=dict(case.shape),
            dtype=case.dtype,
            provider=provider,
            floor_s=floor.seconds if floor else None,
            bound=floor.bound if floor else "",
            bytes=cost.bytes,
            flops=cost.total_flops,
        )
        try:
            return self._timed(row, provider)
        except ImportError as error:
            return replace(row, unavailable=f"not installed: {error.name or error}")
        except Exception as error:  # a peer may fail in any way; the others' rows must not be lost with it
            reason = str(error).splitlines()[0] if str(error) else ""
            return replace(row, unavailable=f"{type(error).__name__}: {reason}"[:200])

    def _timed(self, row: Result, provider: str) -> Result:
        import torch

        case = self.case
        with torch.set_grad_enabled(case.direction != "fwd"):
            error = self._error(provider)
            thunks = [self.thunk(provider, inputs) for inputs in self.sets]
            kernels = timing.kernels_of(thunks[0], device=self.device)
            samples = timing.measure(
                thunks,
                device=self.device,
                time_limit_s=self.time_limit_s,
                keep_outputs=case.cost.bytes < 2 * self.cache_bytes,
            )
        self.calls[provider] = thunks[0]
        if provider == "compile" and self.device == "cpu":
            kernels = ("inductor",)  # the profiler's list is not what compiled code runs on a CPU
        ours = {kernel.name for kernel in case.op.kernels}
        return replace(
            row,
            ours=any(name in ours for name in kernels),
            kernel=", ".join(dict.fromkeys(name[:80] for name in kernels)),
            median_s=samples.median_s,
            spread_s=samples.spread_s,
            n=samples.n,
            method=samples.method,
            cache="cold" if self.cold else "warm",
            clock_mhz=samples.clock_mhz[1] if samples.clock_mhz else None,
            energy_j=samples.energy_j,
            error=error,
            note=", ".join(filter(None, (samples.note, *samples.throttle))),
        )

    def thunk(self, provider: str, inputs: Inputs) -> Thunk:
        """The timed call: forward; backward alone, over a forward pass made before; or forward, then backward."""
        if self.case.direction == "fwd":
            return self._bound(provider, inputs)
        return Backward(
            functools.partial(self._bound, provider), inputs, self.case.op.wrt, alone=self.case.direction == "bwd"
        )

    def _bound(self, provider: str, inputs: Inputs) -> Thunk:
        op = self.case.op
        if own := {DISPATCHED: op.call, UNDISPATCHED: op.launch, "torch": op.reference}.get(provider):
            return functools.partial(own, *inputs)
        if provider in op.providers:
            step = op.providers[provider]
            if reason := step.why_not(*inputs):
                raise NotImplementedError(reason)
            return functools.partial(step.launch, *inputs)
        if provider == "compile":
            return functools.partial(_compiled(op), *inputs)
        if provider not in op.peers:
            raise NotImplementedError(f"{provider} has no {op.name}")
        return op.peers[provider](*inputs)

    def _error(self, provider: str) -> float:
        """Our error over PyTorch's, against float64: the check that a timed kernel computes the right thing."""
        op, inputs = self.case.op, self._checked(self.sets[0])
        bind = functools.partial(self._bound, provider)
        if self.case.direction == "fwd":
            calls = op.judged(lambda *x: bind(x)()), op.judged(op.reference)
            errors = correct.forward_errors(*calls, inputs, writes=bool(op.writes))
        else:
            errors = correct.backward_errors(
                lambda *tensors: correct.gradients(
                    lambda *leaves: bind(leaves)(), tensors[-len(inputs) :], tensors[: -len(inputs)], wrt=op.wrt
                ),
                op.reference,
                inputs,
                correct.random_grads(op.reference, inputs, wrt=op.wrt),
                wrt=op.wrt,
            )
        return min(correct.worst(errors).ratio, FAR_OFF)

    def _checked(self, inputs: Inputs) -> Inputs:
        """The first rows only, or other inputs of a smaller shape, where a float64 reference of all would be large."""
        op, shape = self.case.op, dict(self.case.shape)
        if op.batch in shape:  # a batch's entries do not depend on one another
            entries = shape[op.batch]
            keep = max(1, CHECK_ELEMENTS * entries // max(1, max(x.numel() for x in inputs)))
            return tuple(x[:keep] if x.dim() and x.shape[0] == entries > keep else x for x in inputs)
        fewer = dict(shape)
        while op.cost(fewer, self.case.dtype, "fwd").bytes > 16 * CHECK_ELEMENTS and max(fewer.values()) > 1:
            first = next(key for key, size in fewer.items() if size > 1)
            fewer[first] //= 2
        return inputs if fewer == shape else op.inputs(fewer, self.case.dtype, self.device, 0)


class Backward:
    """A backward pass, alone over a forward pass made on first use and kept, or with its forward pass each time.

    Autograd runs a backward on the streams of its forward and of its leaves' first use, and a graph captures one stream
    only: so both are made anew on the stream that is current.
    """

    def __init__(
        self, bind: Callable[[Inputs], Thunk], inputs: Inputs, wrt: tuple[int, ...] | None, *, alone: bool
    ) -> None:
        self._bind, self._inputs, self._wrt, self._alone = bind, inputs, wrt, alone
        self._stream: int | None = None
        self._kept: tuple[list[Any], Inputs, Inputs] | None = None

    def __call__(self) -> Any:
        import torch

        stream = torch.cuda.current_stream().cuda_stream if self._inputs[0].is_cuda else 0
        if self._kept is None or stream != self._stream:
            leaves = correct.leaves_of(self._inputs, self._wrt)
            outputs = self._outputs(leaves)
            # a single number is a loss: its gradient is 1
            draw = [torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in outputs]
            grads = self._kept[2] if self._kept else tuple(draw)
            self._stream, self._kept = stream, (outputs, tuple(x for x in leaves if x.requires_grad), grads)
            self._leaves = leaves
        outputs, wanted, grads = self._kept
        if self._alone:
            return torch.autograd.grad(outputs, wanted, grads, retain_graph=True)
        outputs = self._outputs(self._leaves)
        return (*outputs, *torch.autograd.grad(outputs, wanted, grads))

    def _outputs(self, leaves: Inputs) -> list[Any]:
        result = self._bind(leaves)()
        return [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]


@functools.cache
def _compiled(op: Op) -> Callable[..., Any]:
    import torch

    private.dynamo.config.cache_size_limit = 4096  # entries: dynamo makes one for each shape, that is for each case
    return torch.compile(op.reference, dynamic=False)
